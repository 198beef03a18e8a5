#define POLYCHIP_ISA avx512
#include "rows.inl"
