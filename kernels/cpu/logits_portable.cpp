#define POLYCHIP_ISA portable
#include "logits.inl"
