// What lies in the segment the ranks of a group share, and where.
//
//   header | control of each rank | counters of each pair | buffers of each rank | ring of each pair
//
// The segment begins as zeros. Whatever one rank writes often has cache lines of its own.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace polychip {

constexpr std::uint64_t kLineBytes = 64;
constexpr int kRanksMax = 64;
// Numbered buffers of a rank: as many pieces of collectives can be under way at once.
constexpr std::uint64_t kDepth = 8;
// Twice as many, so that what a piece was is still there to compare when its buffer is used again.
constexpr std::uint64_t kPublications = 2 * kDepth;
constexpr std::uint32_t kLayoutVersion = 3;

using Counter = std::atomic<std::uint64_t>;
static_assert(Counter::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "processes cannot share an atomic that hides a lock");

// Sizes all ranks must agree on. Also part of the C interface.
struct Geometry {
  std::uint32_t world_size;
  std::uint32_t layout_version;
  std::uint64_t buffer_bytes;  // a multiple of 64 * world_size
  std::uint64_t ring_bytes;    // a multiple of 64
};

// A collective as a rank called it: all ranks must have called the same.
struct Signature {
  std::uint64_t bytes;
  std::uint32_t kind;
  std::uint32_t dtype;
  std::int32_t root;
  std::uint32_t parts;  // a hash of the sizes of messages that travel as one; 0: it is one
};

// Where a rank sleeps; see bell.h.
struct alignas(kLineBytes) Bell {
  std::atomic<std::uint32_t> awaited;
  std::atomic<std::uint32_t> rings;
};

enum class Presence : std::uint32_t { kAbsent = 0, kPresent = 1, kLeft = 2 };

// Whether a rank still takes part. `cause` and `blamed` are written before `presence` says kLeft.
struct alignas(kLineBytes) Attendance {
  std::atomic<Presence> presence;
  std::atomic<std::uint32_t> cause;   // a FailureKind
  std::atomic<std::int32_t> blamed;   // the rank it blames, or -1
};

// Who a rank is; written once, before its nonce travels.
struct alignas(kLineBytes) Identity {
  Counter nonce;
  std::uint64_t pid_namespace;
  std::uint64_t started;  // of the process, in clock ticks since boot; 0: unknown
  std::int32_t pid;
  cpu_set_t cores;
};

// Says that the input of a piece is in a rank's buffer, and of which collective it is; on one line,
// because who waits for the number reads the signature next.
struct alignas(kLineBytes) Publication {
  Counter published;  // the number of the piece, plus one
  Signature signature;
};

// What one rank writes and the others read. The counters hold the number of the last piece, plus one.
struct RankControl {
  Publication publications[kPublications];
  alignas(kLineBytes) Counter reduced;    // this rank summed its slice
  alignas(kLineBytes) Counter completed;  // this rank reads no buffer of it any more
  alignas(kLineBytes) Counter beat;
  Bell bell;
  Attendance attendance;
  Identity identity;
};

// Bytes that went into a ring and came out of it, since the beginning.
struct RingCounters {
  alignas(kLineBytes) Counter written;
  alignas(kLineBytes) Counter read;
};

// A view of a mapped segment; owns nothing.
class Segment {
 public:
  Segment(void* address, const Geometry& geometry);

  static std::uint64_t bytes(const Geometry& geometry);

  // The first rank writes the sizes it laid the segment out for; the others compare theirs.
  void stamp();
  bool stamped_alike() const;

  const Geometry& geometry() const { return geometry_; }
  int world_size() const { return static_cast<int>(geometry_.world_size); }
  RankControl& control(int rank) const { return controls_[rank]; }
  // The buffer of `rank` for the piece of that number.
  char* buffer(int rank, std::uint64_t number) const;
  RingCounters& ring_counters(int writer, int reader) const;
  char* ring(int writer, int reader) const;

 private:
  std::uint64_t pair(int writer, int reader) const;

  Geometry geometry_;
  Geometry* header_;
  RankControl* controls_;
  RingCounters* counters_;
  char* buffers_;
  char* rings_;
};

}  // namespace polychip
