#include "thread_pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstdlib>

namespace polychip {
namespace {

constexpr int kPausesBetweenClocks = 64;

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, nullptr,
                 nullptr, 0);
}

// A share as a word: the number of its operation, first item and one past the last.
constexpr int kItemBits = 20;
constexpr std::uint64_t kItemMask = (std::uint64_t{1} << kItemBits) - 1;

std::uint64_t tag_of(std::uint32_t number) {
  return static_cast<std::uint64_t>(number) << (2 * kItemBits);
}

std::uint64_t packed(std::uint32_t number, Range range) {
  return tag_of(number) | static_cast<std::uint64_t>(range.begin) << kItemBits |
         static_cast<std::uint64_t>(range.end);
}

// Takes an item off the front or the back of a share of operation `number`; -1 if there is none.
std::int32_t take_from(std::atomic<std::uint64_t>& share, std::uint32_t number, bool front) {
  std::uint64_t seen = share.load(std::memory_order_relaxed);
  for (;;) {
    Range range{static_cast<std::int32_t>(seen >> kItemBits & kItemMask),
                static_cast<std::int32_t>(seen & kItemMask)};
    if (seen != packed(number, range) || range.begin >= range.end) return -1;
    const std::int32_t item = front ? range.begin++ : --range.end;
    if (share.compare_exchange_weak(seen, packed(number, range), std::memory_order_acquire)) {
      return item;
    }
  }
}

}  // namespace

ThreadPool::ThreadPool(int threads, std::int64_t spin_ns)
    : threads_(threads), spin_ns_(spin_ns), shares_(static_cast<std::size_t>(threads)) {
  try {
    for (int thread = 1; thread < threads; ++thread) {
      helpers_.emplace_back([this, thread] { serve(thread); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stopping_ = true;
  finish();
  for (auto& helper : helpers_) helper.join();
}

void ThreadPool::run(const Operation* const* operations, std::int32_t count) {
  if (count == 1 && operations[0]->items() == 1) {
    // Not worth to wake anybody for.
    operations[0]->compute(0);
    return;
  }
  if (running_.exchange(true, std::memory_order_acquire)) {
    std::fputs("polychip: two threads use the kernels of one chip at a time\n", stderr);
    std::abort();
  }
  next_ = operations;
  stop_ = operations + count;
  std::uint32_t number = number_.load(std::memory_order_relaxed);
  const std::uint32_t over = number + static_cast<std::uint32_t>(count) + 1;
  finish();
  while (++number != over) {
    compute(0, number);
    // Somebody else may have begun the last item.
    if (number_.load(std::memory_order_acquire) == number) await_another(number);
  }
  running_.store(false, std::memory_order_release);
}

void ThreadPool::serve(int thread) {
  std::uint32_t number = 0;
  for (;;) {
    number = await_another(number);
    if (stopping_) return;
    compute(thread, number);
  }
}

void ThreadPool::compute(int thread, std::uint32_t number) {
  std::int32_t item = 0;
  while (take(thread, number, item)) {
    // Who has an item keeps its operation from being over.
    operation_.load(std::memory_order_relaxed)->compute(item);
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) finish();
  }
}

bool ThreadPool::take(int thread, std::uint32_t number, std::int32_t& item) {
  for (int distance = 0; distance < threads_; ++distance) {
    const int owner = (thread + distance) % threads_;
    item = take_from(shares_[static_cast<std::size_t>(owner)].items, number, distance == 0);
    if (item >= 0) return true;
  }
  return false;
}

// The current operation, or none, is over: hands out the next one that has items. By one thread alone:
// there is no item that another could finish.
void ThreadPool::finish() {
  std::uint32_t number = number_.load(std::memory_order_relaxed);
  while (next_ != stop_ && (*next_)->items() == 0) {
    ++next_;
    ++number;
  }
  ++number;
  if (next_ != stop_) {
    const Operation* operation = *next_++;
    operation_.store(operation, std::memory_order_relaxed);
    const std::int32_t items = operation->items();
    left_.store(items, std::memory_order_relaxed);
    for (int thread = 0; thread < threads_; ++thread) {
      shares_[static_cast<std::size_t>(thread)].items.store(
          packed(number, equal_share(items, thread, threads_)), std::memory_order_release);
    }
  }
  number_.store(number, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(number_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

// The current number as soon as it is not `number`.
std::uint32_t ThreadPool::await_another(std::uint32_t number) {
  const auto current = [&] { return number_.load(std::memory_order_seq_cst); };
  const std::int64_t limit = now_ns() + spin_ns_;
  do {
    for (int i = 0; i < kPausesBetweenClocks; ++i) {
      if (current() != number) return current();
      pause();
    }
  } while (now_ns() < limit);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (current() == number) futex(number_, FUTEX_WAIT_PRIVATE, number);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return current();
}

}  // namespace polychip
