#define POLYCHIP_ISA avx2
#define POLYCHIP_ISA_PAIRS 4
#include "attention.inl"
