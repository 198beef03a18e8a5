#define POLYCHIP_ISA portable
#include "rows.inl"
