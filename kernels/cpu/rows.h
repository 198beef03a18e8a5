// Operations that treat every row for itself: lookup, norms, rotation, activations. See
// kernels/spec.py for what they compute; numbers are of the kind `number` unless it says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

#include "instructions.h"
#include "operation.h"
#include "packed_matrix.h"

namespace polychip {

// Rows [outer][inner][size]: `outer_stride` and `inner_stride` numbers apart.
struct Rows {
  void* numbers;
  std::int64_t outer_stride;
  std::int64_t inner_stride;
};

// The rows of a table whose numbers are `ids` less `first_row`, times `scale`; zeros where it has none.
// The table is a weight or, where that is null, the rows [table_rows][size] of a tensor.
struct Lookup {
  Number number;
  std::int64_t outer, size;
  const std::int64_t* ids;
  std::int64_t first_row;
  const PackedMatrix* weight;
  Rows table;
  std::int64_t table_rows;
  float scale;
  Rows output;
};

struct RmsNorm {
  Number number;
  std::int64_t outer, inner, size;
  Rows input;
  const void* weight;
  float epsilon;
  Rows output;
};

struct AddRmsNorm {
  Number number;
  std::int64_t outer, size;
  Rows input;
  Rows residual;
  Number residual_number;
  const void* weight;
  float epsilon;
  Rows output;
  Rows total;  // float32
};

// Rotates [outer tokens][inner heads][size]; angles: [positions][size], cosines then sines, float32.
struct Rotary {
  Number number;
  std::int64_t outer, inner, size;
  Rows input;
  const std::int64_t* positions;
  const float* angles;
  Rows output;
};

enum class Activation : std::int32_t { kSilu = 0, kGelu = 1 };

// input [outer][2 size], output [outer][size].
struct GatedActivation {
  Number number;
  Activation activation;
  std::int64_t outer, size;
  Rows input;
  Rows output;
};

// Keys [outer tokens][inner heads][size] and values into their places of a paged cache.
struct WriteKV {
  Number number;
  std::int64_t outer, inner, size;
  Rows keys;
  Rows values;
  std::byte* cached_keys;
  std::byte* cached_values;
  std::int64_t block_bytes;
  std::int64_t blocks_count, block_tokens;
  const std::int64_t* blocks;
  const std::int64_t* places;
};

// The rows from `first` to before `stop` of the outermost dimension.
template <typename Call>
using RowKernel = void (*)(const Call& call, std::int64_t first, std::int64_t stop);

struct RowKernels {
  RowKernel<Lookup> lookup;
  RowKernel<RmsNorm> rms_norm;
  RowKernel<AddRmsNorm> add_rms_norm;
  RowKernel<Rotary> rotary;
  RowKernel<GatedActivation> gated_activation;
  RowKernel<WriteKV> write_kv;
};

RowKernels row_kernels(Instructions instructions);

namespace portable {
extern const RowKernels kRowKernels;
}
namespace avx2 {
extern const RowKernels kRowKernels;
}
namespace avx512 {
extern const RowKernels kRowKernels;
}

// Some rows to an item: each item has work for some microseconds, or there is but one.
template <typename Call>
class RowOperation final : public Operation {
 public:
  RowOperation(const Call& call, RowKernel<Call> kernel)
      : call_(call), kernel_(kernel), rows_(rows_of_item(call)) {}
  std::int32_t items() const override {
    return static_cast<std::int32_t>((call_.outer + rows_ - 1) / rows_);
  }
  void compute(std::int32_t item) const override {
    const std::int64_t first = item * rows_;
    const std::int64_t stop = first + rows_ < call_.outer ? first + rows_ : call_.outer;
    kernel_(call_, first, stop);
  }

 private:
  static constexpr std::int64_t kNumbersOfItem = 32768;
  static std::int64_t numbers_of_row(const Lookup& call) { return call.size; }
  static std::int64_t numbers_of_row(const RmsNorm& call) { return call.inner * call.size; }
  static std::int64_t numbers_of_row(const AddRmsNorm& call) { return call.size; }
  static std::int64_t numbers_of_row(const Rotary& call) { return call.inner * call.size; }
  static std::int64_t numbers_of_row(const GatedActivation& call) { return 2 * call.size; }
  static std::int64_t numbers_of_row(const WriteKV& call) { return 2 * call.inner * call.size; }
  static std::int64_t rows_of_item(const Call& call) {
    const std::int64_t row = numbers_of_row(call) < 1 ? 1 : numbers_of_row(call);
    return row < kNumbersOfItem ? kNumbersOfItem / row : 1;
  }

  Call call_;
  RowKernel<Call> kernel_;
  std::int64_t rows_;
};

}  // namespace polychip
