// What is done to the logits of a row, or to a part of them: a pass of vectors over many numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "instructions.h"

namespace polychip {

// The largest logit and the lowest id that has it; `ordered`: none of the logits is NaN. Only then
// does the rest mean anything.
struct Likeliest {
  float logit;
  std::int64_t id;
  bool ordered;
};

// Which tokens may be drawn: those from `least` on; of those at `border` the ids up to `last_tied`;
// and only those at least `min_weight` times as likely as the likeliest.
struct Survivors {
  float least = -__builtin_inff();
  float border = __builtin_nanf("");
  std::int64_t last_tied = -1;
  double min_weight = 0.0;
};

// A draw: of the survivors the one with the largest logit / temperature + noise, the lowest id on a
// tie. The noise is a function of key and id.
struct Race {
  const float* logits;
  double temperature;
  std::int64_t seed, choice, index;
  Likeliest likeliest;
  Survivors survivors;
};

struct Drawn {
  double score;
  std::int64_t id;
  // Whether this one is drawn and not `other`.
  bool before(const Drawn& other) const {
    return score > other.score || (score == other.score && id < other.id);
  }
};

struct LogitKernels {
  Likeliest (*likeliest)(const float* logits, std::int64_t count);
  // The sum of exp(logit / temperature - largest / temperature).
  double (*sum_of_weights)(const float* logits, std::int64_t count, float largest,
                           double temperature);
  // Appends the logits not below `least`, in their order.
  void (*values_from)(const float* logits, std::int64_t count, float least,
                      std::vector<float>& found);
  // Appends their ids.
  void (*ids_from)(const float* logits, std::int64_t count, float least,
                   std::vector<std::int64_t>& found);
  // The winner among the survivors with ids from `first` to before `stop`, and the likeliest of all.
  Drawn (*race)(const Race& race, std::int64_t first, std::int64_t stop);
};

LogitKernels logit_kernels(Instructions instructions);

namespace portable {
extern const LogitKernels kLogitKernels;
}
namespace avx2 {
extern const LogitKernels kLogitKernels;
}
namespace avx512 {
extern const LogitKernels kLogitKernels;
}

}  // namespace polychip
