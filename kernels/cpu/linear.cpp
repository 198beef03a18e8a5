#include "linear.h"

namespace polychip {

PanelKernel panel_kernel(Number number, Instructions instructions) {
  const bool narrow = number == Number::kBfloat16;
  switch (instructions) {
#if defined(__x86_64__)
    case Instructions::kAmx:
      return narrow ? amx::bfloat16_panel : avx512::float32_panel;
    case Instructions::kAvx512:
      return narrow ? avx512::bfloat16_panel : avx512::float32_panel;
    case Instructions::kAvx2:
      return narrow ? avx2::bfloat16_panel : avx2::float32_panel;
#endif
    default:
      return narrow ? portable::bfloat16_panel : portable::float32_panel;
  }
}

}  // namespace polychip
