#include "bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

namespace polychip {
namespace {

constexpr std::int64_t kSecondNs = 1'000'000'000;

// Not the private kind of futex: the ranks are processes.
long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, limit,
                 nullptr, 0);
}

}  // namespace

std::uint32_t listen(Bell& bell, std::uint32_t events) {
  // Read first: a ring from here on makes `sleep` return at once.
  const std::uint32_t heard = bell.rings.load(std::memory_order_acquire);
  bell.awaited.fetch_or(events, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return heard;
}

bool sleep(Bell& bell, std::uint32_t heard, std::int64_t limit_ns) {
  const timespec limit{limit_ns / kSecondNs, limit_ns % kSecondNs};
  return futex(bell.rings, FUTEX_WAIT, heard, &limit) == 0 || errno != EINTR;
}

void fence_before_ringing() { std::atomic_thread_fence(std::memory_order_seq_cst); }

void ring_if_awaited(Bell& bell, std::uint32_t events) {
  // Relaxed: ordered by the fence of the caller.
  if (bell.awaited.load(std::memory_order_relaxed) & events) ring(bell);
}

void ring(Bell& bell) {
  // Cleared so that only the first waker pays for the call; who still waits says so again.
  bell.awaited.exchange(0, std::memory_order_seq_cst);
  bell.rings.fetch_add(1, std::memory_order_release);
  futex(bell.rings, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace polychip
