// Operations in the order they were asked for, kept with their buffers to be computed again.
//
//   operations ... | call | operations ... | call | operations ...
//
// A call goes to native code that these kernels know nothing of, such as a collective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

#include "operation.h"
#include "thread_pool.h"

namespace polychip {

// 0 once it is done what it was called for.
using CallFunction = std::int32_t (*)(void* context);

class Program {
 public:
  template <typename T>
  void add(const T& operation) {
    owned_.push_back(std::make_unique<T>(operation));
    operations_.push_back(owned_.back().get());
  }

  // On the thread that runs the program, between what was added before and what is added from now on.
  void add_call(CallFunction function, void* context) {
    calls_.push_back({function, context, operations_.size()});
  }

  // Goes on behind the first `calls_done` calls. Ends at a call that does not return 0, and returns how
  // many calls were made by then, that one included; -1 when all is computed.
  std::int32_t run(ThreadPool& pool, std::int32_t calls_done) const {
    auto call = calls_.begin() + calls_done;
    std::size_t begin = call == calls_.begin() ? 0 : std::prev(call)->place;
    for (; call != calls_.end(); ++call) {
      compute(pool, begin, call->place);
      begin = call->place;
      if (call->function(call->context) != 0) {
        return static_cast<std::int32_t>(call - calls_.begin()) + 1;
      }
    }
    compute(pool, begin, operations_.size());
    return -1;
  }

 private:
  struct Call {
    CallFunction function;
    void* context;
    std::size_t place;  // in front of the operation of that number
  };

  void compute(ThreadPool& pool, std::size_t begin, std::size_t end) const {
    if (begin != end) pool.run(operations_.data() + begin, static_cast<std::int32_t>(end - begin));
  }

  std::vector<std::unique_ptr<const Operation>> owned_;
  std::vector<const Operation*> operations_;
  std::vector<Call> calls_;
};

}  // namespace polychip
