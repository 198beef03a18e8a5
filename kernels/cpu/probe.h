// What the machine gives at the moment: the same cores may be twice as far from each other, and their
// memory half as fast, a second later.
#pragma once

#include <cstdint>

namespace polychip {

struct Probe {
  double barrier_ns;        // until two cores have waited for each other; 0 if there is but one, or
                            // they were never free together
  double read_one_per_s;    // bytes of memory that one core reads
  double read_every_per_s;  // that all of them read together
};

// On the cores that the caller may use, for some tenths of a second. Throws std::bad_alloc or
// std::system_error.
Probe probe_machine();

}  // namespace polychip
