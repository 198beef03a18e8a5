#define POLYCHIP_ISA portable
#define POLYCHIP_ISA_WIDTH 4
#define POLYCHIP_ISA_ROWS 6
#include "attention_vectors.inl"
