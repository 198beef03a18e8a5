#define POLYCHIP_ISA avx2
#define POLYCHIP_ISA_ROWS 4
#include "quantized_panel.inl"
