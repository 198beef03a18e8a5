// Collectives of all ranks, in numbered buffers.
//
// Collectives are cut into pieces no larger than a buffer; all ranks number them alike. Piece p of a
// rank goes to its buffer p % kDepth:
//
//   step       needs of everyone         does                                says
//   publish    completed p - kDepth      copies in                           published = p + 1
//   reduce     published p               sums its slice, in its own buffer   reduced = p + 1
//   complete   published (or reduced) p  sums (or copies) into the output    completed = p + 1
//
// Only large sums take the middle step: each rank then adds a part, not everything. Each step has
// its own cursor, so that later pieces are copied in while earlier ones wait. Who sleeps is woken
// after a run of steps, not after each: a full fence costs as much as a small message.
//
// A broadcast is a piece that only the root fills and only the others wait for. It may leave its
// root behind by kDepth pieces, no more: the completed counters are its acknowledgement.
#pragma once

#include <deque>

#include "operation.h"

namespace polychip {

class NumberedBuffers {
 public:
  NumberedBuffers(Segment segment, int rank);

  // Most bytes of sums that travel as one.
  std::uint64_t packed_bytes_max() const;

  // The operation must stay where it is until it is finished.
  void submit(Operation& operation);

  // Goes as far as it can without waiting. True if it got anywhere. Throws Misuse.
  bool advance();

  // The ranks that the oldest collective waits for.
  RankSet missing() const;

  // What could let it go on; see bell.h.
  std::uint32_t awaited_events() const;

 private:
  struct Collective {
    Operation* operation;
    Signature signature;
    std::uint64_t piece_bytes;
    std::uint64_t pieces;
  };

  // The next piece of one of the three steps.
  struct Cursor {
    std::uint64_t collective = 0;  // counted from the first ever submitted
    std::uint64_t piece = 0;       // within it
    std::uint64_t number = 0;      // counted from the first ever
  };

  // Bytes [start, start + bytes) of each rank's part of the message.
  struct Piece {
    const Collective* collective;
    std::uint64_t number;
    std::uint64_t start;
    std::uint64_t bytes;
  };

  enum class Step { kPublish, kReduce, kComplete };

  // Every rank (or one rank) must have done this step of that piece.
  struct Need {
    Step step;
    std::uint64_t number;
    int only_rank;  // -1: everyone
  };

  bool publish_next();
  bool reduce_next();
  bool complete_next();

  bool at_end(const Cursor& cursor) const;
  Piece piece_at(const Cursor& cursor) const;
  void move_on(Cursor& cursor) const;
  bool in_two_steps(const Piece& piece) const;

  bool may_publish(std::uint64_t number) const;
  Need need_to_publish(std::uint64_t number) const;
  Need need_to_reduce(std::uint64_t number) const;
  Need need_to_complete(const Piece& piece) const;
  RankSet unmet(const Need& need) const;
  bool met(const Need& need) const { return unmet(need) == 0; }
  bool did(int rank, Step step, std::uint64_t number) const;

  void copy_in(const Piece& piece) const;
  void copy_parts_in(const Operation& operation, char* buffer) const;
  void sum_slice(const Piece& piece) const;
  void copy_out(const Piece& piece) const;
  void sum_parts(const Piece& piece) const;
  void sum_from(const Piece& piece, std::uint64_t offset, std::uint64_t bytes, char* target) const;

  std::uint64_t slice_start(std::uint64_t bytes, int rank) const;
  std::uint64_t part_stride(const Piece& piece) const;
  Publication& publication(int rank, std::uint64_t number) const;
  void compare(int rank, std::uint64_t number) const;
  void compare_readers_of(std::uint64_t number) const;
  void done(std::uint32_t event, std::uint64_t bytes);
  void announce();

  Segment segment_;
  int rank_;
  RankControl& own_;
  std::deque<Collective> collectives_;
  std::uint64_t finished_count_ = 0;  // collectives no longer in the queue
  std::uint64_t submitted_count_ = 0;
  Cursor publishing_, reducing_, completing_;
  std::uint32_t unannounced_ = 0;  // events
  std::uint64_t unannounced_bytes_ = 0;
};

}  // namespace polychip
