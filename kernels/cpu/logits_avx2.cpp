#define POLYCHIP_ISA avx2
#include "logits.inl"
