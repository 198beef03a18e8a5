#define POLYCHIP_ISA avx2
#define POLYCHIP_ISA_SUMS 12
#include "linear_panel.inl"
