#include "communicator.h"

#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <utility>

#include "bell.h"

namespace polychip {
namespace {

// Beyond this many they cost as much together as apart.
constexpr std::ptrdiff_t kPackedSumsMax = 64;

std::int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * std::int64_t{1'000'000'000} + time.tv_nsec;
}

// Tells the core that this is a spinning loop.
void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using PartPlace = std::vector<Part>::const_iterator;

// Up to where the sums from `first` on travel as one: at least that one.
PartPlace run_end(PartPlace first, PartPlace last, std::uint64_t bytes_max) {
  std::uint64_t bytes = packed_bytes(*first);
  PartPlace end = first + 1;
  for (; end != last && end - first < kPackedSumsMax; ++end) {
    bytes += packed_bytes(*end);
    if (bytes > bytes_max) break;
  }
  return end;
}

bool is_message(Kind kind) { return kind == Kind::kSend || kind == Kind::kReceive; }

std::string names_of(RankSet ranks) {
  std::string names;
  int count = 0;
  for (int rank = 0; rank < kRanksMax; ++rank) {
    if (!(ranks & rank_bit(rank))) continue;
    if (count++ > 0) names += ", ";
    names += std::to_string(rank);
  }
  return (count == 1 ? "rank " : "ranks ") + names;
}

}  // namespace

Communicator::Communicator(Segment segment, int rank, const Timing& timing)
    : segment_(segment),
      rank_(rank),
      timing_(timing),
      collectives_(segment, rank),
      liveness_(segment, rank, timing.beat_ns, timing.still_beats, [this] { tend(); }) {
  for (int peer = 0; peer < segment.world_size(); ++peer) {
    const int other = peer == rank ? (rank + 1) % segment.world_size() : peer;
    outgoing_.emplace_back(segment, rank, other);
    incoming_.emplace_back(segment, rank, other);
  }
  segment.control(rank).attendance.presence.store(Presence::kPresent, std::memory_order_release);
}

std::uint64_t Communicator::nonce_of(int rank) const {
  return segment_.control(rank).identity.nonce.load(std::memory_order_acquire);
}

bool Communicator::start() {
  // A spinning rank would hold the core that the rank it waits for needs.
  if (liveness_.cores_of_all() < segment_.world_size()) timing_.spin_ns = 0;
  liveness_.watch();
  return timing_.spin_ns > 0;
}

std::uint64_t Communicator::submit(const Request& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return enqueue(Operation(request, now()));
}

std::uint64_t Communicator::submit_sums(std::uint64_t code, const std::vector<Part>& parts) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::uint64_t last = 0;
  for (auto next = parts.begin(); next != parts.end();) {
    const auto end = run_end(next, parts.end(), collectives_.packed_bytes_max());
    const std::uint64_t number =
        end - next == 1 ? enqueue(Operation({code, next->data, next->data, next->bytes}, now()))
                        : enqueue(Operation(code, {next, end}, now()));
    // The one before knows why.
    if (number == 0) break;
    last = number;
    next = end;
  }
  return last;
}

// The number of the operation; 0 if the communicator is broken.
std::uint64_t Communicator::enqueue(Operation submitted) {
  if (broken()) return 0;
  // Before progress, which may retire it.
  const std::uint64_t number = oldest_.load(std::memory_order_relaxed) + operations_.size();
  operations_.push_back(std::move(submitted));
  Operation& operation = operations_.back();
  if (is_message(operation.kind)) ++messages_pending_;
  switch (operation.kind) {
    case Kind::kSend: outgoing_[operation.peer].submit(operation); break;
    case Kind::kReceive: incoming_[operation.peer].submit(operation); break;
    default: collectives_.submit(operation);
  }
  progress();
  return number;
}

Status Communicator::poll(std::uint64_t number) {
  if (number < oldest_.load(std::memory_order_acquire)) return Status::kDone;
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return Status::kPending;  // another thread makes progress
  progress();
  judge(number, now());
  return status_of(number);
}

Status Communicator::wait(std::uint64_t number, std::int64_t timeout_ns) {
  const std::int64_t started_ns = now();
  std::unique_lock<std::mutex> lock(mutex_);
  Bell& bell = segment_.control(rank_).bell;
  std::int64_t spin_until_ns = started_ns + timing_.spin_ns;
  for (;;) {
    if (progress()) spin_until_ns = now() + timing_.spin_ns;
    const Status status = status_of(number);
    if (status != Status::kPending) return status;
    std::int64_t now_ns = now();
    if (now_ns < spin_until_ns) {
      pause();
      continue;
    }
    const std::uint32_t heard = listen(bell, awaited_events());
    // What was awaited may have come before this rank said that it listens.
    if (progress()) continue;
    judge(number, now_ns);
    const Operation* const operation = pending(number);
    if (status_of(number) != Status::kPending) return status_of(number);
    now_ns = now();
    std::int64_t left_ns = operation->submitted_ns + timing_.deadline_ns - now_ns;
    if (timeout_ns >= 0) left_ns = std::min(left_ns, started_ns + timeout_ns - now_ns);
    if (left_ns <= 0) {
      fail_late(*operation, now_ns - started_ns);
      return Status::kFailed;
    }
    lock.unlock();
    // No longer than a beat: whether the other ranks live is looked at again then.
    const bool undisturbed = sleep(bell, heard, std::min(left_ns, timing_.beat_ns));
    if (!undisturbed) return Status::kInterrupted;
    lock.lock();
  }
}

Status Communicator::call(const Request& request, std::uint64_t& number) {
  const std::int64_t started_ns = now();
  number = submit(request);
  const Status status = number == 0 ? Status::kFailed : wait(number, -1);
  called_ns_.fetch_add(now() - started_ns, std::memory_order_relaxed);
  return status;
}

void Communicator::leave(FailureKind kind, const std::string& text) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    fail(kind, -1, text);
  }
  liveness_.stop();
}

FailureKind Communicator::failure(std::string& text) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  text = failure_text_;
  return failure_;
}

// True if anything moved.
bool Communicator::progress() {
  if (broken() || operations_.empty()) return false;
  bool moved = false;
  try {
    moved = collectives_.advance();
    if (messages_pending_ > 0) {
      for (auto& ring : outgoing_) moved |= ring.advance();
      for (auto& ring : incoming_) moved |= ring.advance();
    }
  } catch (const Misuse& misuse) {
    fail(FailureKind::kMisuse, misuse.rank, misuse.text);
    return true;
  }
  if (moved) retire();
  return moved;
}

void Communicator::retire() {
  std::uint64_t finished = 0;
  while (!operations_.empty() && operations_.front().finished) {
    if (is_message(operations_.front().kind)) --messages_pending_;
    operations_.pop_front();
    ++finished;
  }
  // Release: the results are there for who sees the number.
  if (finished > 0) oldest_.fetch_add(finished, std::memory_order_release);
}

void Communicator::judge(std::uint64_t number, std::int64_t now_ns) {
  const Operation* operation = pending(number);
  if (status_of(number) != Status::kPending) return;
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    if (!(missing(*operation) & rank_bit(rank)) || !departed(rank)) continue;
    // What it did before it left is there by now, and counts.
    while (progress()) {
    }
    operation = pending(number);
    if (status_of(number) != Status::kPending) return;
    if (missing(*operation) & rank_bit(rank)) return fail_lost(rank);
  }
  const std::int64_t waited_ns = now_ns - operation->submitted_ns;
  if (waited_ns >= timing_.deadline_ns) fail_late(*operation, waited_ns);
}

// Called by the beating thread: operations nobody waits for go on too, and end at their deadline.
void Communicator::tend() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  progress();
  if (broken()) return;
  const std::int64_t now_ns = now();
  for (const Operation& operation : operations_) {
    if (now_ns - operation.submitted_ns < timing_.deadline_ns) break;
    if (!operation.finished) return fail_late(operation, now_ns - operation.submitted_ns);
  }
}

// What this rank sleeps for. All that is pending goes on, whichever operation is waited for.
std::uint32_t Communicator::awaited_events() const {
  return collectives_.awaited_events() | (messages_pending_ > 0 ? kRing : std::uint32_t{0});
}

RankSet Communicator::missing(const Operation& operation) const {
  return is_message(operation.kind) ? rank_bit(operation.peer) : collectives_.missing();
}

bool Communicator::departed(int rank) const {
  // Acquire: with its leaving we see all it did before.
  const Presence presence =
      segment_.control(rank).attendance.presence.load(std::memory_order_acquire);
  return presence == Presence::kLeft || liveness_.of(rank) != Life::kLives;
}

void Communicator::fail_lost(int rank) {
  const std::string name = "rank " + std::to_string(rank);
  const Attendance& attendance = segment_.control(rank).attendance;
  if (attendance.presence.load(std::memory_order_acquire) != Presence::kLeft) {
    const bool ended = liveness_.of(rank) == Life::kEnded;
    const std::int64_t still_ms = timing_.beat_ns * timing_.still_beats / 1'000'000;
    return fail(FailureKind::kPeerLost, rank,
                ended ? name + " is gone: its process ended"
                      : name + " stands still: no sign of life for " + std::to_string(still_ms) +
                            " ms");
  }
  const int blamed = attendance.blamed.load(std::memory_order_relaxed);
  const std::string other = "rank " + std::to_string(blamed);
  switch (static_cast<FailureKind>(attendance.cause.load(std::memory_order_relaxed))) {
    case FailureKind::kMisuse:
      return fail(FailureKind::kMisuse, rank, name + " saw " + other + " call another operation");
    case FailureKind::kPeerLost:
      return fail(FailureKind::kPeerLost, blamed, name + " left because it lost " + other);
    case FailureKind::kTimeout:
      return fail(FailureKind::kPeerLost, rank, name + " left after it had waited in vain");
    case FailureKind::kAborted:
      return fail(FailureKind::kPeerLost, rank, name + " aborted");
    default:
      return fail(FailureKind::kPeerLost, rank, name + " left");
  }
}

void Communicator::fail_late(const Operation& operation, std::int64_t waited_ns) {
  const RankSet ranks = missing(operation);
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.3f", static_cast<double>(waited_ns) / 1e9);
  const std::string late = ranks == 0 ? "" : ": " + names_of(ranks) + " did not come";
  fail(FailureKind::kTimeout, -1, std::string("not done after ") + seconds + " s" + late);
}

// The first failure stays. Nothing touches a tensor any more once it is set.
void Communicator::fail(FailureKind kind, int blamed, const std::string& text) {
  if (broken()) return;
  failure_ = kind;
  failure_text_ = text;
  Attendance& attendance = segment_.control(rank_).attendance;
  attendance.cause.store(static_cast<std::uint32_t>(kind), std::memory_order_relaxed);
  attendance.blamed.store(blamed, std::memory_order_relaxed);
  // Release: the reason comes with it, and all this rank did before.
  attendance.presence.store(Presence::kLeft, std::memory_order_release);
  // All of them: also other threads of this rank may be waiting.
  for (int rank = 0; rank < segment_.world_size(); ++rank) ring(segment_.control(rank).bell);
}

// Null if it is finished.
Operation* Communicator::pending(std::uint64_t number) {
  const std::uint64_t oldest = oldest_.load(std::memory_order_relaxed);
  return number < oldest ? nullptr : &operations_[number - oldest];
}

Status Communicator::status_of(std::uint64_t number) {
  const Operation* const operation = pending(number);
  if (operation == nullptr || operation->finished) return Status::kDone;
  return broken() ? Status::kFailed : Status::kPending;
}

}  // namespace polychip
