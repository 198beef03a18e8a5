#include "instructions.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace polychip {
namespace {

#if defined(__x86_64__)
// Linux gives a process the tile registers when it asks for them.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct Leaf {
  unsigned eax, ebx, ecx, edx;
};

// For what older compilers do not ask for by name.
Leaf leaf(unsigned number) {
  Leaf found{number, 0, 0, 0};
  asm volatile("cpuid" : "+a"(found.eax), "=b"(found.ebx), "+c"(found.ecx), "=d"(found.edx));
  return found;
}

Instructions found() {
  constexpr unsigned kHalfFloats = 1U << 29;
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      (leaf(1).ecx & kHalfFloats) == 0) {
    return Instructions::kPortable;
  }
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) {
    return Instructions::kAvx2;
  }
  constexpr unsigned kBfloat16Tiles = 1U << 22, kTiles = 1U << 24, kByteTiles = 1U << 25;
  constexpr unsigned kAll = kBfloat16Tiles | kTiles | kByteTiles;
  return (leaf(7).edx & kAll) == kAll && may_use_tiles() ? Instructions::kAmx : Instructions::kAvx512;
}
#else
Instructions found() { return Instructions::kPortable; }
#endif

}  // namespace

Instructions best_instructions() {
  static const Instructions best = found();
  return best;
}

}  // namespace polychip
