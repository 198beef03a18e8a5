// Rows of logits that many threads look at, each in the same parts whatever else is computed.
//
//   row 0  | part 0 | part 1 | part 2 |      a part is an item: one row keeps several threads busy,
//   row 1  | part 0 | part 1 | part 2 |      and what is summed over parts is the same in any company
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "logits.h"
#include "operation.h"

namespace polychip {

// [rows][vocabulary] float32, rows `stride` numbers apart.
struct LogitRows {
  const float* numbers;
  std::int64_t stride;
  std::int64_t rows;
  std::int64_t vocabulary;

  const float* row(std::int64_t index) const { return numbers + index * stride; }
};

// The ids from `first` to before `stop` of a row.
struct LogitPart {
  std::int64_t row;
  std::int64_t first;
  std::int64_t stop;
};

// An operation on the parts of some rows.
class PartsOperation : public Operation {
 public:
  PartsOperation(const LogitRows& logits, std::vector<std::int64_t> rows)
      : logits_(logits), rows_(std::move(rows)) {}
  std::int32_t items() const final {
    return static_cast<std::int32_t>(parts() * static_cast<std::int64_t>(rows_.size()));
  }
  void compute(std::int32_t item) const final;

 protected:
  // What is found in a part, at its place.
  virtual void compute_part(const LogitPart& part, std::size_t place) const = 0;

  std::int64_t parts() const { return (logits_.vocabulary + kPartLogits - 1) / kPartLogits; }
  std::size_t first_place(std::int64_t row) const { return static_cast<std::size_t>(row * parts()); }
  std::size_t places() const { return first_place(logits_.rows); }

  LogitRows logits_;

 private:
  // Some microseconds of work, and in a core's first cache when it is looked at again.
  static constexpr std::int64_t kPartLogits = 8192;

  std::vector<std::int64_t> rows_;
};

// The likeliest token of each row.
class LikeliestOfRows final : public PartsOperation {
 public:
  LikeliestOfRows(const LogitRows& logits, const LogitKernels& kernels);

  Likeliest of(std::int64_t row) const;
  // Whether the row has a softmax: no NaN, no +infinity, and something above -infinity.
  bool has_softmax(std::int64_t row) const;

 private:
  void compute_part(const LogitPart& part, std::size_t place) const override;

  LogitKernels kernels_;
  mutable std::vector<Likeliest> found_;
};

// The sum of exp(logit / temperature) relative to the likeliest token's, for some rows.
class WeightsOfRows final : public PartsOperation {
 public:
  // temperatures: of all rows; null where it is 1.
  WeightsOfRows(const LogitRows& logits, const LogitKernels& kernels,
                const LikeliestOfRows& likeliest, const float* temperatures,
                std::vector<std::int64_t> rows);

  double of(std::int64_t row) const;

 private:
  void compute_part(const LogitPart& part, std::size_t place) const override;

  LogitKernels kernels_;
  const LikeliestOfRows& likeliest_;
  const float* temperatures_;
  mutable std::vector<double> sums_;
};

// All rows.
std::vector<std::int64_t> every_row(std::int64_t rows);

// Leaves in `found` the `count` largest logits, in no order, fewer only if there are not so many.
void largest_values(const LogitKernels& kernels, const float* logits, std::int64_t vocabulary,
                    std::int64_t count, std::vector<float>& found);

}  // namespace polychip
