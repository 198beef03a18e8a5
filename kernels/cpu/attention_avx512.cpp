#define POLYCHIP_ISA avx512
#define POLYCHIP_ISA_PAIRS 12
#include "attention.inl"
