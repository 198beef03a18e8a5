// Operations in the order they were asked for, kept with their buffers to be computed again.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "operation.h"
#include "thread_pool.h"

namespace polychip {

class Program {
 public:
  template <typename T>
  void add(const T& operation) {
    owned_.push_back(std::make_unique<T>(operation));
    operations_.push_back(owned_.back().get());
  }

  void run(ThreadPool& pool) const {
    pool.run(operations_.data(), static_cast<std::int32_t>(operations_.size()));
  }

 private:
  std::vector<std::unique_ptr<const Operation>> owned_;
  std::vector<const Operation*> operations_;
};

}  // namespace polychip
