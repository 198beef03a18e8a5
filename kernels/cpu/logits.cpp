#include "logits.h"

namespace polychip {

LogitKernels logit_kernels(Instructions instructions) {
  switch (instructions) {
#if defined(__x86_64__)
    case Instructions::kAmx:
    case Instructions::kAvx512:
      return avx512::kLogitKernels;
    case Instructions::kAvx2:
      return avx2::kLogitKernels;
#endif
    default:
      return portable::kLogitKernels;
  }
}

}  // namespace polychip
