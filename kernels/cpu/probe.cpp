#include "probe.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace polychip {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kBufferBytes = std::size_t{256} << 20;
constexpr int kReads = 3;
constexpr int kBatches = 20;
constexpr int kBarriersOfBatch = 1000;
// Of a batch that another process keeps from its cores; and after how long no other one is begun, nor
// another read.
constexpr auto kBatchLimit = std::chrono::milliseconds(10);
constexpr auto kEnough = std::chrono::milliseconds(200);

std::vector<int> allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) {
    throw std::system_error(errno, std::generic_category(), "sched_getaffinity");
  }
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Calls function(number) on so many cores at once, each call pinned to its own; seconds until all are
// done. Throws std::system_error if a thread cannot be started.
template <typename Function>
double on_each(const std::vector<int>& cores, std::size_t count, Function function) {
  enum class Signal { kWait, kGo, kLeave };
  std::atomic<std::size_t> waiting{count};
  std::atomic<Signal> signal{Signal::kWait};
  std::vector<std::thread> threads;
  const auto end = [&] {
    for (auto& thread : threads) thread.join();
  };
  try {
    for (std::size_t number = 0; number < count; ++number) {
      threads.emplace_back([&, number] {
        pin(cores[number]);
        waiting.fetch_sub(1);
        Signal seen = Signal::kWait;
        while ((seen = signal.load(std::memory_order_acquire)) == Signal::kWait) {
          std::this_thread::yield();
        }
        if (seen == Signal::kGo) function(number);
      });
    }
  } catch (...) {
    signal.store(Signal::kLeave, std::memory_order_release);
    end();
    throw;
  }
  while (waiting.load() > 0) std::this_thread::yield();
  const auto start = Clock::now();
  signal.store(Signal::kGo, std::memory_order_release);
  end();
  return seconds_since(start);
}

// The quickest batch: what disturbs it can only make it slower.
double barrier_ns(const std::vector<int>& cores) {
  struct alignas(64) Count {
    std::atomic<int> value{0};
  };
  double best = 0.0;
  const auto begun = Clock::now();
  for (int batch = 0; batch < kBatches && Clock::now() - begun < kEnough; ++batch) {
    Count counts[2];
    double seconds[2] = {};
    int done[2] = {};
    on_each(cores, 2, [&](std::size_t own) {
      std::atomic<int>& mine = counts[own].value;
      const std::atomic<int>& other = counts[1 - own].value;
      const auto start = Clock::now();
      for (int number = 1; number <= kBarriersOfBatch; ++number) {
        mine.store(number, std::memory_order_release);
        for (int spins = 0; other.load(std::memory_order_acquire) < number; ++spins) {
          if (spins % 1024 == 1023 && Clock::now() - start > kBatchLimit) return;
        }
        done[own] = number;
      }
      seconds[own] = seconds_since(start);
    });
    if (done[0] < kBarriersOfBatch || done[1] < kBarriersOfBatch) continue;
    const double found = std::max(seconds[0], seconds[1]) * 1e9 / kBarriersOfBatch;
    if (best == 0.0 || found < best) best = found;
  }
  return best;
}

struct Buffer {
  Buffer() {
    void* found = mmap(nullptr, kBufferBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    madvise(found, kBufferBytes, MADV_HUGEPAGE);
    numbers = static_cast<std::uint64_t*>(found);
  }
  ~Buffer() { munmap(numbers, kBufferBytes); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::uint64_t* numbers;
};

double read_per_s(const std::vector<int>& cores, std::size_t count, const Buffer& buffer) {
  const std::size_t each = kBufferBytes / sizeof(std::uint64_t) / count / 8 * 8;
  double best = 0.0;
  const auto begun = Clock::now();
  for (int read = 0; read < kReads && Clock::now() - begun < kEnough; ++read) {
    std::atomic<std::uint64_t> total{0};
    const double seconds = on_each(cores, count, [&](std::size_t number) {
      typedef std::uint64_t Line __attribute__((vector_size(64)));
      const auto* lines = reinterpret_cast<const Line*>(buffer.numbers + number * each);
      Line sums[4] = {};
      for (std::size_t line = 0; line + 4 <= each / 8; line += 4) {
        for (std::size_t i = 0; i < 4; ++i) sums[i] += lines[line + i];
      }
      std::uint64_t sum = 0;
      for (const Line& line : sums) {
        for (int i = 0; i < 8; ++i) sum += line[i];
      }
      // So that the reading is not left out.
      total.fetch_add(sum, std::memory_order_relaxed);
    });
    best = std::max(best, static_cast<double>(each * count * sizeof(std::uint64_t)) / seconds);
  }
  return best;
}

}  // namespace

Probe probe_machine() {
  const std::vector<int> cores = allowed_cores();
  const Buffer buffer;
  std::fill_n(buffer.numbers, kBufferBytes / sizeof(std::uint64_t), std::uint64_t{1});
  Probe probe{};
  if (cores.size() > 1) probe.barrier_ns = barrier_ns(cores);
  probe.read_one_per_s = read_per_s(cores, 1, buffer);
  probe.read_every_per_s = read_per_s(cores, cores.size(), buffer);
  return probe;
}

}  // namespace polychip
