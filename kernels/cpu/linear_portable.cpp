#define POLYCHIP_ISA portable
#define POLYCHIP_ISA_SUMS 12
#include "linear_panel.inl"
