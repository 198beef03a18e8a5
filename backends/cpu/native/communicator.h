// The collectives of one rank for one epoch: submission, progress, waiting, failure.
//
// Nothing moves by itself: every call (submit, poll, wait) and every beat moves all operations as
// far as they can go without waiting. Collectives finish in the order of their submission, and so do
// the messages to one rank and those from one rank.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "liveness.h"
#include "numbered_buffers.h"
#include "pair_ring.h"

namespace polychip {

// How long is waited for what. Also part of the C interface.
struct Timing {
  std::int64_t deadline_ns;  // of an operation, from its submission
  std::int64_t spin_ns;      // before a wait sleeps, where each rank has a core
  std::int64_t beat_ns;
  std::uint32_t still_beats;  // so many own beats without one of a rank: it is lost
  std::uint32_t padding;
};

// Also part of the C interface.
enum class FailureKind : std::uint32_t {
  kNone = 0,
  kPeerLost = 1,
  kTimeout = 2,
  kMisuse = 3,
  kAborted = 4,
  kClosed = 5,
};

// Also part of the C interface.
enum class Status : std::int32_t { kPending = 0, kDone = 1, kFailed = 2, kInterrupted = 3 };

// Safe to use from several threads.
class Communicator {
 public:
  Communicator(Segment segment, int rank, const Timing& timing);
  ~Communicator() { leave(FailureKind::kClosed, "closed"); }

  // Before all ranks are there.
  void join(std::uint64_t nonce) { liveness_.start(nonce); }
  std::uint64_t nonce_of(int rank) const;
  // Once all ranks are there. Returns whether waits spin.
  bool start();

  // The number of the operation, from 1 on; 0 if the communicator is broken.
  std::uint64_t submit(const Request& request);
  // Sums tensors in place, small neighbours as one operation. The number of the last one that was
  // taken; 0 if the communicator is broken.
  std::uint64_t submit_sums(std::uint64_t code, const std::vector<Part>& parts);
  // Never blocks.
  Status poll(std::uint64_t number);
  // kInterrupted: a signal came; wait again. Longer than `timeout_ns` breaks the communicator;
  // negative: until the deadline of the operation.
  Status wait(std::uint64_t number, std::int64_t timeout_ns);

  // Both at once, for a caller that does not return in between. `number` becomes that of the operation,
  // 0 if the communicator is broken; kInterrupted: wait for it.
  Status call(const Request& request, std::uint64_t& number);
  // What all `call`s took.
  const std::atomic<std::int64_t>& called_ns() const { return called_ns_; }

  // Operations below this number are finished; their tensors are not touched any more.
  const std::atomic<std::uint64_t>& oldest() const { return oldest_; }

  // Fails what is pending, from any thread, and tells the other ranks.
  void leave(FailureKind kind, const std::string& text);

  FailureKind failure(std::string& text) const;

 private:
  std::uint64_t enqueue(Operation operation);
  bool progress();
  void retire();
  // Looks for a reason why the operation cannot finish any more: a lost rank, the deadline.
  void judge(std::uint64_t number, std::int64_t now_ns);
  void tend();
  std::uint32_t awaited_events() const;
  RankSet missing(const Operation& operation) const;
  bool departed(int rank) const;
  void fail_lost(int rank);
  void fail_late(const Operation& operation, std::int64_t waited_ns);
  void fail(FailureKind kind, int blamed, const std::string& text);

  Operation* pending(std::uint64_t number);
  Status status_of(std::uint64_t number);
  bool broken() const { return failure_ != FailureKind::kNone; }

  Segment segment_;
  const int rank_;
  Timing timing_;
  mutable std::mutex mutex_;  // for all that follows
  NumberedBuffers collectives_;
  std::vector<OutgoingRing> outgoing_;  // by rank; its own is never used
  std::vector<IncomingRing> incoming_;
  std::deque<Operation> operations_;  // unfinished ones, and finished ones behind them
  int messages_pending_ = 0;
  std::atomic<std::uint64_t> oldest_{1};
  std::atomic<std::int64_t> called_ns_{0};
  FailureKind failure_ = FailureKind::kNone;
  std::string failure_text_;
  Liveness liveness_;  // last: its thread uses all of the above
};

}  // namespace polychip
