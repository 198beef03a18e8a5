#define POLYCHIP_ISA avx512
#define POLYCHIP_ISA_WIDTH 16
#define POLYCHIP_ISA_ROWS 12
#include "attention_vectors.inl"
