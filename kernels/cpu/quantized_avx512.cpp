#define POLYCHIP_ISA avx512
#define POLYCHIP_ISA_ROWS 6
#include "quantized_panel.inl"
