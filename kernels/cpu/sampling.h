// Draws a token of each row; see `sample` in kernels/spec.py.
//
//   likeliest    parts of all rows     the answer already where the temperature is 0
//   weights      parts                 of rows whose top_p is a share of the whole vocabulary
//   filters      rows                  with top_k, top_p or min_p: which tokens survive
//   races        parts                 of rows that are drawn
#pragma once

#include <cstdint>
#include <vector>

#include "logit_rows.h"

namespace polychip {

// Arrays of as many numbers as there are rows; ids and finite are the answer.
struct Sample {
  LogitRows logits;
  const float* temperature;
  const std::int64_t* seed;
  const std::int64_t* choice;
  const std::int64_t* index;
  const std::int64_t* top_k;
  const float* top_p;
  const float* min_p;
  std::int64_t* ids;
  bool* finite;

  bool is_drawn(std::int64_t row) const { return temperature[row] > 0.0f; }
  bool has_top_k(std::int64_t row) const { return 0 < top_k[row] && top_k[row] < logits.vocabulary; }
  bool has_top_p(std::int64_t row) const { return top_p[row] < 1.0f; }
  bool has_min_p(std::int64_t row) const { return min_p[row] > 0.0f; }
};

// The tokens of some rows that top_k, top_p and min_p leave.
class FiltersOfRows final : public Operation {
 public:
  FiltersOfRows(const Sample& call, const LogitKernels& kernels, const LikeliestOfRows& likeliest,
                const WeightsOfRows& weights, std::vector<std::int64_t> rows);
  std::int32_t items() const override { return static_cast<std::int32_t>(rows_.size()); }
  void compute(std::int32_t item) const override;

  const Survivors& of(std::int64_t row) const { return found_[static_cast<std::size_t>(row)]; }

 private:
  Survivors survivors_of(std::int64_t row) const;
  std::int64_t likeliest_values(std::int64_t row, std::vector<float>& values) const;
  std::int64_t count_within(std::vector<float>& values, std::int64_t row, double wanted) const;

  Sample call_;
  LogitKernels kernels_;
  const LikeliestOfRows& likeliest_;
  const WeightsOfRows& weights_;
  std::vector<std::int64_t> rows_;
  mutable std::vector<Survivors> found_;
};

// The draws of some rows.
class RacesOfRows final : public PartsOperation {
 public:
  RacesOfRows(const Sample& call, const LogitKernels& kernels, const LikeliestOfRows& likeliest,
              const FiltersOfRows& filters, std::vector<std::int64_t> rows);

  std::int64_t winner_of(std::int64_t row) const;

 private:
  void compute_part(const LogitPart& part, std::size_t place) const override;

  Sample call_;
  LogitKernels kernels_;
  const LikeliestOfRows& likeliest_;
  const FiltersOfRows& filters_;
  mutable std::vector<Drawn> found_;
};

}  // namespace polychip
