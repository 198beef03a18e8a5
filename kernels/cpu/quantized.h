// Products with weights of 8 and 4 bits. 32 columns of a row share a scale, as in a block of GGUF's
// Q8_0, Q4_0 and Q4_1; for a product the activations get 8 bits too, in the same groups of 32.
//
//   a group of a panel, 8 bits         4 bits
//   [8 steps][32 rows][4 columns]      [4 steps][32 rows][4 columns, in the upper half those 16 behind]
//   [32 scales]                        [32 scales]  [32 minima, Q4_1 alone]
//
// Scales and minima are float16. Numbers are stored without a sign: a weight is (number - offset) *
// scale + minimum. Of a group the integers' sum is exact, whatever instructions it is computed with.
#pragma once

#include <cstdint>
#include <vector>

#include "instructions.h"
#include "linear.h"
#include "operation.h"
#include "packed_matrix.h"

namespace polychip {

constexpr std::int64_t kGroupColumns = 32;
// There is memory for whole tiles of rows of activations, of whatever is in it.
constexpr std::int64_t kActivationRows = 16;

struct Q8 {
  static constexpr int kBits = 8;
  static constexpr int kOffset = 128;
  static constexpr bool kMinima = false;
};
struct Q4 {
  static constexpr int kBits = 4;
  static constexpr int kOffset = 8;
  static constexpr bool kMinima = false;
};
struct Q4Minima {
  static constexpr int kBits = 4;
  static constexpr int kOffset = 0;
  static constexpr bool kMinima = true;
};

// Calls `body` with an object of the form's kind; the form is none of plain numbers.
template <typename Body>
auto with_quantized(Form form, Body body) {
  switch (form) {
    case Form::kQ4_0:
      return body(Q4());
    case Form::kQ4_1:
      return body(Q4Minima());
    default:
      return body(Q8());
  }
}

template <typename Kind>
constexpr std::size_t kNumbersBytes = kPanelRows * kGroupColumns * Kind::kBits / 8;
template <typename Kind>
constexpr std::size_t kGroupBytes =
    kNumbersBytes<Kind> + kPanelRows * sizeof(std::uint16_t) * (Kind::kMinima ? 2 : 1);

// What a group of a panel takes.
std::size_t group_bytes(Form form);
// Puts 32 columns of a row into a group of its panel: numbers, which get a scale, into one of 8 bits.
// They must be finite and at most 127 times the largest float16; the worker refuses others by name.
void write_group(std::byte* group, std::int64_t row_in_panel, const float* numbers);
// A block as GGUF has it, of the form's type.
void write_block(Form form, std::byte* group, std::int64_t row_in_panel, const std::byte* block);
// What GGUF's block of the form takes.
std::size_t block_bytes(Form form);
// What GGUF's block of a form stands for.
void read_block(Form form, const std::byte* block, float* numbers);
// What the numbers of a row stand for.
void read_group(Form form, const std::byte* group, std::int64_t row_in_panel, float* numbers);

// The activations of one product in 8 bits, [rows][groups][32]: x is about number * scale.
class Activations {
 public:
  Activations(std::int64_t groups, std::int8_t* numbers, float* scales, std::int32_t* sums)
      : groups_(groups), numbers_(numbers), scales_(scales), sums_(sums) {}
  std::int64_t groups() const { return groups_; }
  std::int8_t* numbers(std::int64_t row) const { return numbers_ + row * groups_ * kGroupColumns; }
  float* scales(std::int64_t row) const { return scales_ + row * groups_; }
  // Of the numbers of each group.
  std::int32_t* sums(std::int64_t row) const { return sums_ + row * groups_; }

 private:
  std::int64_t groups_;
  std::int8_t* numbers_;
  float* scales_;
  std::int32_t* sums_;
};

// Where they are put, product after product.
class ActivationMemory {
 public:
  // Before any product of so many rows and groups is computed; it may be computed again and again.
  void reserve(std::int64_t rows, std::int64_t groups);
  Activations of(const Product& product) {
    return {product.weight->padded_columns() / kGroupColumns, numbers_.data(), scales_.data(),
            sums_.data()};
  }

 private:
  std::vector<std::int8_t> numbers_;
  std::vector<float> scales_;
  std::vector<std::int32_t> sums_;
};

struct QuantizedKernels {
  // Rows of the product's input become activations.
  void (*quantize)(const Product& product, const Activations& activations, std::int64_t first,
                   std::int64_t stop);
  // One panel of the product, all rows. A row's result depends on that row alone.
  void (*panel)(const Product& product, const Activations& activations, std::int32_t panel);
};

QuantizedKernels quantized_kernels(Instructions instructions);

namespace portable {
extern const QuantizedKernels kQuantizedKernels;
}
namespace avx2 {
extern const QuantizedKernels kQuantizedKernels;
}
namespace avx512 {
extern const QuantizedKernels kQuantizedKernels;
}
namespace amx {
void quantized_panel(const Product& product, const Activations& activations, std::int32_t panel);
}

// The first half of a product: its rows in 8 bits.
class QuantizeRows final : public Operation {
 public:
  QuantizeRows(const Product& product, ActivationMemory& memory, QuantizedKernels kernels)
      : product_(product), memory_(memory), kernels_(kernels) {}
  std::int32_t items() const override {
    return static_cast<std::int32_t>((product_.rows + kRowsOfItem - 1) / kRowsOfItem);
  }
  void compute(std::int32_t item) const override {
    const std::int64_t first = item * kRowsOfItem;
    const std::int64_t stop = first + kRowsOfItem;
    kernels_.quantize(product_, memory_.of(product_), first,
                      stop < product_.rows ? stop : product_.rows);
  }

 private:
  // About what it takes to wait for another thread.
  static constexpr std::int64_t kRowsOfItem = 4;

  Product product_;
  ActivationMemory& memory_;
  QuantizedKernels kernels_;
};

// The second half.
class QuantizedLinear final : public Operation {
 public:
  QuantizedLinear(const Product& product, ActivationMemory& memory, QuantizedKernels kernels)
      : product_(product), memory_(memory), kernels_(kernels) {}
  std::int32_t items() const override { return product_.weight->panels(); }
  void compute(std::int32_t item) const override { kernels_.panel(product_, memory_.of(product_), item); }

 private:
  Product product_;
  ActivationMemory& memory_;
  QuantizedKernels kernels_;
};

}  // namespace polychip
