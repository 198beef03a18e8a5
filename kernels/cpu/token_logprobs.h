// Log-probabilities of given tokens and of the likeliest; see `token_logprobs` in kernels/spec.py.
#pragma once

#include <cstdint>

#include "logit_rows.h"

namespace polychip {

// Of each row one token and `tops` of the likeliest; the last three are the answer: [rows] and
// [rows][tops]. All ids are in the vocabulary.
struct TokenLogprobs {
  LogitRows logits;
  const std::int64_t* ids;
  std::int64_t tops;
  float* logprobs;
  float* top_logprobs;
  std::int64_t* top_ids;
};

// Each row, when its likeliest token and the sum of its weights are known.
class LogprobsOfRows final : public Operation {
 public:
  LogprobsOfRows(const TokenLogprobs& call, const LogitKernels& kernels,
                 const LikeliestOfRows& likeliest, const WeightsOfRows& weights)
      : call_(call), kernels_(kernels), likeliest_(likeliest), weights_(weights) {}
  std::int32_t items() const override { return static_cast<std::int32_t>(call_.logits.rows); }
  void compute(std::int32_t item) const override;

 private:
  void find_top_ids(std::int64_t row, std::int64_t* top_ids) const;

  TokenLogprobs call_;
  LogitKernels kernels_;
  const LikeliestOfRows& likeliest_;
  const WeightsOfRows& weights_;
};

}  // namespace polychip
