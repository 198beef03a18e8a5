#define POLYCHIP_ISA avx2
#include "rows.inl"
