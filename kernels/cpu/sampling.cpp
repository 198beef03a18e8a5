#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

namespace polychip {
namespace {

// A float that no logit is below whose distance from the largest, over the temperature, is at most
// `distance`: rounding may keep some more. A finite one.
float least_within(float largest, double temperature, double distance) {
  const double rounding = std::fabs(largest) * 0x1p-50;
  const double least = largest - temperature * distance * (1.0 + 1e-9) - rounding;
  return static_cast<float>(std::max(least, double{std::numeric_limits<float>::lowest()}));
}

}  // namespace

FiltersOfRows::FiltersOfRows(const Sample& call, const LogitKernels& kernels,
                             const LikeliestOfRows& likeliest, const WeightsOfRows& weights,
                             std::vector<std::int64_t> rows)
    : call_(call),
      kernels_(kernels),
      likeliest_(likeliest),
      weights_(weights),
      rows_(std::move(rows)),
      found_(static_cast<std::size_t>(call.logits.rows)) {}

void FiltersOfRows::compute(std::int32_t item) const {
  const std::int64_t row = rows_[static_cast<std::size_t>(item)];
  if (likeliest_.has_softmax(row)) found_[static_cast<std::size_t>(row)] = survivors_of(row);
}

Survivors FiltersOfRows::survivors_of(std::int64_t row) const {
  Survivors survivors;
  if (call_.has_top_k(row) || call_.has_top_p(row)) {
    // A thread's own: as many numbers as a row may have, whose memory it keeps.
    thread_local std::vector<float> values;
    thread_local std::vector<std::int64_t> ids;
    const std::int64_t count = likeliest_values(row, values);
    const float border = values[static_cast<std::size_t>(count - 1)];
    survivors.least = survivors.border = border;
    survivors.last_tied = call_.logits.vocabulary;
    ids.clear();
    kernels_.ids_from(call_.logits.row(row), call_.logits.vocabulary, border, ids);
    if (count < static_cast<std::int64_t>(ids.size())) {
      auto tied = std::count(values.begin(), values.begin() + count, border);
      survivors.last_tied = *std::find_if(ids.begin(), ids.end(), [&](std::int64_t id) {
        return call_.logits.row(row)[id] == border && --tied == 0;
      });
    }
  }
  if (call_.has_min_p(row)) {
    survivors.min_weight = call_.min_p[row];
    const float least = least_within(likeliest_.of(row).logit, call_.temperature[row],
                                     -std::log(survivors.min_weight));
    survivors.least = std::max(survivors.least, least);
  }
  return survivors;
}

// How many tokens top_k and top_p keep. `values` begins with their logits, of which the last is the
// smallest.
std::int64_t FiltersOfRows::likeliest_values(std::int64_t row, std::vector<float>& values) const {
  const float* logits = call_.logits.row(row);
  const std::int64_t vocabulary = call_.logits.vocabulary;
  const float largest = likeliest_.of(row).logit;
  const double temperature = call_.temperature[row];
  // Below 0 it keeps one token, as at 0.
  const double top_p = std::max(0.0, double{call_.top_p[row]});
  if (call_.has_top_k(row)) {
    largest_values(kernels_, logits, vocabulary, call_.top_k[row], values);
    if (!call_.has_top_p(row)) {
      std::iter_swap(std::min_element(values.begin(), values.end()), values.end() - 1);
      return call_.top_k[row];
    }
    const double sum = kernels_.sum_of_weights(values.data(), call_.top_k[row], largest, temperature);
    return count_within(values, row, top_p * sum);
  }
  const double sum = weights_.of(row);
  // Were all tokens beyond this distance, they would not sum to what top_p drops.
  const double distance =
      -std::log(0.999 * (1.0 - top_p) * sum / static_cast<double>(vocabulary));
  values.clear();
  kernels_.values_from(logits, vocabulary, least_within(largest, temperature, distance), values);
  return count_within(values, row, top_p * sum);
}

// How many of the likeliest it takes until the weights of those before sum to `wanted`, one at least.
// By halves: the sum of the likelier half tells in which one the last is.
std::int64_t FiltersOfRows::count_within(std::vector<float>& values, std::int64_t row,
                                         double wanted) const {
  const float largest = likeliest_.of(row).logit;
  const double temperature = call_.temperature[row];
  const auto at = [&](std::int64_t place) { return values.begin() + place; };
  // Those before `first` sum to `before`, less than wanted; `stop` is not kept.
  std::int64_t first = 0, stop = static_cast<std::int64_t>(values.size());
  double before = 0.0;
  while (stop - first > 1) {
    const std::int64_t middle = first + (stop - first) / 2;
    std::nth_element(at(first), at(middle), at(stop), std::greater<float>());
    const double sum = before + kernels_.sum_of_weights(values.data() + first, middle - first,
                                                        largest, temperature);
    if (sum < wanted) {
      first = middle;
      before = sum;
    } else {
      stop = middle;
    }
  }
  return first + 1;
}

RacesOfRows::RacesOfRows(const Sample& call, const LogitKernels& kernels,
                         const LikeliestOfRows& likeliest, const FiltersOfRows& filters,
                         std::vector<std::int64_t> rows)
    : PartsOperation(call.logits, std::move(rows)),
      call_(call),
      kernels_(kernels),
      likeliest_(likeliest),
      filters_(filters),
      found_(places()) {}

void RacesOfRows::compute_part(const LogitPart& part, std::size_t place) const {
  const std::int64_t row = part.row;
  if (!likeliest_.has_softmax(row)) return;
  const Race race{logits_.row(row),   call_.temperature[row], call_.seed[row], call_.choice[row],
                  call_.index[row], likeliest_.of(row),     filters_.of(row)};
  found_[place] = kernels_.race(race, part.first, part.stop);
}

std::int64_t RacesOfRows::winner_of(std::int64_t row) const {
  const auto first = found_.begin() + static_cast<std::ptrdiff_t>(first_place(row));
  return std::min_element(first, first + parts(),
                          [](const Drawn& one, const Drawn& other) { return one.before(other); })
      ->id;
}

}  // namespace polychip
