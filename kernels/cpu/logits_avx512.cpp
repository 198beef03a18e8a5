#define POLYCHIP_ISA avx512
#include "logits.inl"
