#define POLYCHIP_ISA portable
#define POLYCHIP_ISA_ROWS 4
#include "quantized_panel.inl"
