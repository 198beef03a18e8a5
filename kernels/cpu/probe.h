// What the machine gives at the moment: the same cores may be twice as far from each other, and their
// memory half as fast, a second later.
#pragma once

#include <cstdint>

namespace polychip {

struct Probe {
  double barrier_ns;        // between two cores, all waiting for all; 0 if there is one core only, or they were not free
  double read_one_per_s;    // bytes of memory that one core reads
  double read_every_per_s;  // that all of them read together
};

// On the cores that the caller may use, for some tenths of a second. Throws std::bad_alloc or
// std::system_error.
Probe probe_machine();

}  // namespace polychip
