#include "liveness.h"

#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

namespace polychip {
namespace {

// Fields of /proc/PID/stat from the state (the 3rd) to the start time (the 22nd).
constexpr int kFieldsToStart = 19;

// When the process started, in clock ticks since boot; 0 if it ended or cannot be seen.
std::uint64_t process_started(std::int32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return 0;
  // The name before it may hold blanks and brackets.
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::string field;
  // A killed process stays in the table until its parent asks for its status.
  if (!(fields >> field) || field == "Z" || field == "X") return 0;
  for (int i = 0; i < kFieldsToStart; ++i) fields >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
}

std::uint64_t pid_namespace() {
  struct stat status {};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

}  // namespace

Liveness::Liveness(Segment segment, int rank, std::int64_t beat_ns, std::uint32_t still_beats,
                   std::function<void()> on_beat)
    : segment_(segment),
      rank_(rank),
      beat_ns_(beat_ns),
      still_beats_(still_beats),
      on_beat_(std::move(on_beat)) {
  for (auto& life : lives_) life.store(Life::kLives, std::memory_order_relaxed);
}

void Liveness::start(std::uint64_t nonce) {
  Identity& identity = segment_.control(rank_).identity;
  identity.pid = getpid();
  identity.pid_namespace = pid_namespace();
  identity.started = process_started(identity.pid);
  CPU_ZERO(&identity.cores);
  sched_getaffinity(0, sizeof(identity.cores), &identity.cores);
  // Release: rank 0 reads the nonce, and after its verdict everyone reads the rest.
  identity.nonce.store(nonce, std::memory_order_release);
  // Signals are for the threads of the program, which know what to do with them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread(&Liveness::run, this);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Liveness::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  const std::lock_guard<std::mutex> alone(stopping_mutex_);
  if (thread_.joinable()) thread_.join();
}

int Liveness::cores_of_all() const {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    CPU_OR(&cores, &cores, &segment_.control(rank).identity.cores);
  }
  return CPU_COUNT(&cores);
}

void Liveness::run() {
  pthread_setname_np(pthread_self(), "polychip-beat");
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, std::chrono::nanoseconds(beat_ns_), [this] { return stopping_; })) {
    lock.unlock();
    segment_.control(rank_).beat.fetch_add(1, std::memory_order_relaxed);
    if (watching_.load(std::memory_order_acquire)) observe();
    on_beat_();
    lock.lock();
  }
}

void Liveness::observe() {
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    Observed& observed = observed_[rank];
    const std::uint64_t beat = segment_.control(rank).beat.load(std::memory_order_relaxed);
    observed.beats_without = beat == observed.beat ? observed.beats_without + 1 : 0;
    observed.beat = beat;
    lives_[rank].store(judged(rank, observed.beats_without), std::memory_order_relaxed);
  }
}

Life Liveness::judged(int rank, std::uint32_t beats_without) const {
  if (beats_without >= still_beats_) return Life::kStandsStill;
  // The process table is asked only about a rank that missed a beat: asking takes long.
  return beats_without > 0 && ended(rank) ? Life::kEnded : Life::kLives;
}

// Whether its process ended; false where that cannot be told.
bool Liveness::ended(int rank) const {
  const Identity& own = segment_.control(rank_).identity;
  const Identity& other = segment_.control(rank).identity;
  const bool visible = own.started != 0 && other.started != 0 && own.pid_namespace != 0 &&
                       own.pid_namespace == other.pid_namespace;
  // Compared because the number of an ended process is given away again.
  return visible && own.pid != other.pid && process_started(other.pid) != other.started;
}

}  // namespace polychip
