#define POLYCHIP_ISA avx512
#define POLYCHIP_ISA_SUMS 24
#include "linear_panel.inl"
