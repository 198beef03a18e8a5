// Threads for the cores of a chip, which compute operations one after the other.
//
//   operation 0          |  operation 1        |  ...
//   thread 0  #### ####  |  #### ##            |      each takes the items of its own share from the
//   thread 1  ### #### # |  #### #### (##)     |      front, then those of others from the back
//
// An operation is over when all its items are computed, whoever computed them: a thread whose core does
// other work delays the others by the item it has begun, and by nothing if it has begun none. Who finds
// no item spins for a while and then sleeps: to wake it takes tens of microseconds, an operation
// sometimes less than one.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "operation.h"

namespace polychip {

class ThreadPool {
 public:
  // One of the threads is whoever calls `run`. They run on whatever cores the process may use: pinned to
  // one each, they would share it with the caller, which goes where it likes.
  // Throws std::system_error if there are no threads to be had.
  ThreadPool(int threads, std::int64_t spin_ns);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Computes them in order; returns when all are done. One caller at a time: a second one aborts.
  void run(const Operation* const* operations, std::int32_t count);

 private:
  // The items that are left of a share in one word, with the number of their operation: who comes late
  // takes none of another one.
  struct alignas(64) Share {
    std::atomic<std::uint64_t> items{0};
  };

  void stop();
  void serve(int thread);
  // Computes items of operation `number` until none is left to take.
  void compute(int thread, std::uint32_t number);
  bool take(int thread, std::uint32_t number, std::int32_t& item);
  void begin(const Operation* operation);
  void finish();
  std::uint32_t await_another(std::uint32_t number);

  int threads_;
  std::int64_t spin_ns_;
  // Of the operations of a run, those after the current one.
  const Operation* const* next_ = nullptr;
  const Operation* const* stop_ = nullptr;
  bool stopping_ = false;
  std::atomic<bool> running_{false};
  std::vector<Share> shares_;
  std::atomic<const Operation*> operation_{nullptr};
  alignas(64) std::atomic<std::int32_t> left_{0};
  // The number of the current operation, one more for each; between runs of none.
  alignas(64) std::atomic<std::uint32_t> number_{0};
  std::atomic<std::uint32_t> sleepers_{0};
  std::vector<std::thread> helpers_;
};

}  // namespace polychip
