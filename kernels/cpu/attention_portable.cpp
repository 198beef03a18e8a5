#define POLYCHIP_ISA portable
#define POLYCHIP_ISA_PAIRS 4
#include "attention.inl"
