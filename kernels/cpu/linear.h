// y = x W^T (+ bias) over a packed weight: each thread computes panels of the output.
#pragma once

#include <cstdint>

#include "instructions.h"
#include "operation.h"
#include "packed_matrix.h"

namespace polychip {

// One product. Numbers of `input` and `bias` are of the weight's kind, those of `output` are too or
// float32. Rows of the tensors are `..._stride` numbers apart; bias may be null.
struct Product {
  const PackedMatrix* weight;
  const void* input;
  std::int64_t input_stride;
  std::int64_t rows;
  const void* bias;
  void* output;
  std::int64_t output_stride;
  Number output_number;
};

// Computes one panel of a product, all rows; the weight is packed for as many threads as compute. A
// row's result depends on that row alone, not on how many others there are.
using PanelKernel = void (*)(const Product& product, std::int32_t panel);

// The one for a kind of number.
PanelKernel panel_kernel(Number number, Instructions instructions);

namespace portable {
void float32_panel(const Product& product, std::int32_t panel);
void bfloat16_panel(const Product& product, std::int32_t panel);
}  // namespace portable
namespace avx2 {
void float32_panel(const Product& product, std::int32_t panel);
void bfloat16_panel(const Product& product, std::int32_t panel);
}  // namespace avx2
namespace avx512 {
void float32_panel(const Product& product, std::int32_t panel);
void bfloat16_panel(const Product& product, std::int32_t panel);
}  // namespace avx512
namespace amx {
void bfloat16_panel(const Product& product, std::int32_t panel);
}  // namespace amx

class Linear final : public Operation {
 public:
  Linear(const Product& product, PanelKernel kernel) : product_(product), kernel_(kernel) {}
  std::int32_t items() const override { return product_.weight->panels(); }
  void compute(std::int32_t item) const override { kernel_(product_, item); }

 private:
  Product product_;
  PanelKernel kernel_;
};

}  // namespace polychip
