// Work of one step that many threads share.
#pragma once

#include <cstdint>

namespace polychip {

struct Range {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

// An operation in items, which any thread may compute in any order.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual std::int32_t items() const = 0;
  virtual void compute(std::int32_t item) const = 0;
};

// The part of `items` that a thread begins with: equal ones, in order. What is put near a thread, such
// as the panels of a matrix, follows it.
inline Range equal_share(std::int32_t items, int thread, int threads) {
  const auto edge = [&](int at) {
    return static_cast<std::int32_t>(static_cast<std::int64_t>(items) * at / threads);
  };
  return {edge(thread), edge(thread + 1)};
}

}  // namespace polychip
