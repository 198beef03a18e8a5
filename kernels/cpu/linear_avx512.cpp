#define POLYCHIP_ISA avx512
#define POLYCHIP_ISA_ROWS 12
#include "linear_panel.inl"
