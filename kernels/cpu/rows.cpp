#include "rows.h"

namespace polychip {

RowKernels row_kernels(Instructions instructions) {
  switch (instructions) {
#if defined(__x86_64__)
    case Instructions::kAmx:
    case Instructions::kAvx512:
      return avx512::kRowKernels;
    case Instructions::kAvx2:
      return avx2::kRowKernels;
#endif
    default:
      return portable::kRowKernels;
  }
}

}  // namespace polychip
