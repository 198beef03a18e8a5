#include "logit_rows.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace polychip {

void PartsOperation::compute(std::int32_t item) const {
  const std::int64_t row = rows_[static_cast<std::size_t>(item / parts())];
  const std::int64_t part = item % parts();
  const std::int64_t first = part * kPartLogits;
  const std::int64_t stop = std::min(first + kPartLogits, logits_.vocabulary);
  compute_part({row, first, stop}, first_place(row) + static_cast<std::size_t>(part));
}

LikeliestOfRows::LikeliestOfRows(const LogitRows& logits, const LogitKernels& kernels)
    : PartsOperation(logits, every_row(logits.rows)), kernels_(kernels), found_(places()) {}

void LikeliestOfRows::compute_part(const LogitPart& part, std::size_t place) const {
  Likeliest found = kernels_.likeliest(logits_.row(part.row) + part.first, part.stop - part.first);
  found.id += part.first;
  found_[place] = found;
}

Likeliest LikeliestOfRows::of(std::int64_t row) const {
  const auto first = found_.begin() + static_cast<std::ptrdiff_t>(first_place(row));
  return std::accumulate(first + 1, first + parts(), *first,
                         [](const Likeliest& before, const Likeliest& next) {
                           Likeliest both = next.logit > before.logit ? next : before;
                           both.ordered = before.ordered && next.ordered;
                           return both;
                         });
}

bool LikeliestOfRows::has_softmax(std::int64_t row) const {
  const Likeliest found = of(row);
  return found.ordered && std::isfinite(found.logit);
}

WeightsOfRows::WeightsOfRows(const LogitRows& logits, const LogitKernels& kernels,
                             const LikeliestOfRows& likeliest, const float* temperatures,
                             std::vector<std::int64_t> rows)
    : PartsOperation(logits, std::move(rows)),
      kernels_(kernels),
      likeliest_(likeliest),
      temperatures_(temperatures),
      sums_(places()) {}

void WeightsOfRows::compute_part(const LogitPart& part, std::size_t place) const {
  if (!likeliest_.has_softmax(part.row)) return;
  const double temperature = temperatures_ == nullptr ? 1.0 : temperatures_[part.row];
  sums_[place] = kernels_.sum_of_weights(logits_.row(part.row) + part.first, part.stop - part.first,
                                         likeliest_.of(part.row).logit, temperature);
}

double WeightsOfRows::of(std::int64_t row) const {
  const auto first = sums_.begin() + static_cast<std::ptrdiff_t>(first_place(row));
  return std::accumulate(first, first + parts(), 0.0);
}

std::vector<std::int64_t> every_row(std::int64_t rows) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(rows));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Piece by piece, each time only what is larger than the smallest of the largest so far.
void largest_values(const LogitKernels& kernels, const float* logits, std::int64_t vocabulary,
                    std::int64_t count, std::vector<float>& found) {
  constexpr std::int64_t kPiece = 1024;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto wanted = static_cast<std::size_t>(count);
  found.clear();
  if (count == 0) return;
  float least = -kInfinity;
  for (std::int64_t first = 0; first < vocabulary; first += kPiece) {
    const std::int64_t stop = std::min(first + kPiece, vocabulary);
    kernels.values_from(logits + first, stop - first, least, found);
    if (found.size() <= wanted || (found.size() < 2 * wanted && stop < vocabulary)) continue;
    const auto last = found.begin() + count - 1;
    std::nth_element(found.begin(), last, found.end(), std::greater<float>());
    least = std::nextafter(*last, kInfinity);
    found.resize(wanted);
  }
}

}  // namespace polychip
