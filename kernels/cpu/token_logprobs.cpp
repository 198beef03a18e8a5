#include "token_logprobs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace polychip {

void LogprobsOfRows::compute(std::int32_t item) const {
  const std::int64_t row = item;
  const float* logits = call_.logits.row(row);
  std::int64_t* top_ids = call_.top_ids + row * call_.tops;
  double normalizer = std::numeric_limits<double>::quiet_NaN();
  if (likeliest_.has_softmax(row)) {
    normalizer = likeliest_.of(row).logit + std::log(weights_.of(row));
    find_top_ids(row, top_ids);
  } else {
    std::iota(top_ids, top_ids + call_.tops, 0);
  }
  const auto logprob_of = [&](std::int64_t id) {
    return static_cast<float>(logits[id] - normalizer);
  };
  call_.logprobs[row] = logprob_of(call_.ids[row]);
  std::transform(top_ids, top_ids + call_.tops, call_.top_logprobs + row * call_.tops, logprob_of);
}

void LogprobsOfRows::find_top_ids(std::int64_t row, std::int64_t* top_ids) const {
  if (call_.tops == 0) return;
  // A thread's own: as many numbers as a row may have, whose memory it keeps.
  thread_local std::vector<float> values;
  thread_local std::vector<std::int64_t> ids;
  const float* logits = call_.logits.row(row);
  const std::int64_t vocabulary = call_.logits.vocabulary;
  largest_values(kernels_, logits, vocabulary, call_.tops, values);
  ids.clear();
  kernels_.ids_from(logits, vocabulary, *std::min_element(values.begin(), values.end()), ids);
  std::partial_sort_copy(ids.begin(), ids.end(), top_ids, top_ids + call_.tops,
                         [&](std::int64_t one, std::int64_t other) {
                           return logits[one] > logits[other] ||
                                  (logits[one] == logits[other] && one < other);
                         });
}

}  // namespace polychip
