// Which instructions this machine has.
#pragma once

#include <cstdint>

namespace polychip {

// Each includes those before it; kAvx512 means its bfloat16 and its products of 8 bits too.
enum class Instructions : std::int32_t { kPortable, kAvx2, kAvx512, kAmx };

// The best that both machine and operating system allow.
Instructions best_instructions();

}  // namespace polychip
