// Messages from one rank to another: a ring of bytes with one writer and one reader.
//
// A message is a head and its bytes, end to end with the next one. The writer puts in what fits, the
// reader acknowledges by counting what it took, so that messages may be larger than the ring, and
// small ones need no reader yet.
#pragma once

#include <deque>

#include "operation.h"

namespace polychip {

// What a message is, ahead of its bytes; the receiver must expect the same.
struct MessageHead {
  std::uint64_t bytes;
  std::uint32_t dtype;
  std::uint32_t padding;
};

class OutgoingRing {
 public:
  OutgoingRing(const Segment& segment, int rank, int peer);

  // The operation must stay where it is until it is finished.
  void submit(Operation& operation) { messages_.push_back(&operation); }

  // Goes as far as it can without waiting. True if it got anywhere.
  bool advance();

 private:
  bool put(const char* source, std::uint64_t offset, std::uint64_t bytes);

  RingCounters& counters_;
  char* const bytes_;
  const std::uint64_t size_;
  Bell& reader_bell_;
  std::deque<Operation*> messages_;
  std::uint64_t put_bytes_ = 0;  // of the first message, head included
};

class IncomingRing {
 public:
  IncomingRing(const Segment& segment, int rank, int peer);

  // The operation must stay where it is until it is finished.
  void submit(Operation& operation) { messages_.push_back(&operation); }

  // Goes as far as it can without waiting. True if it got anywhere. Throws Misuse.
  bool advance();

 private:
  bool take(char* target, std::uint64_t offset, std::uint64_t bytes);
  void compare(const Operation& operation) const;

  const int peer_;
  RingCounters& counters_;
  const char* const bytes_;
  const std::uint64_t size_;
  Bell& writer_bell_;
  std::deque<Operation*> messages_;
  MessageHead head_{};
  std::uint64_t taken_bytes_ = 0;  // of the first message, head included
};

}  // namespace polychip
