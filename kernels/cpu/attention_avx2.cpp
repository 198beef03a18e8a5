#define POLYCHIP_ISA avx2
#define POLYCHIP_ISA_WIDTH 8
#define POLYCHIP_ISA_ROWS 6
#include "attention_vectors.inl"
