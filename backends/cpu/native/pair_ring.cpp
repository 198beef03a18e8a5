#include "pair_ring.h"

#include <algorithm>
#include <cstring>

#include "bell.h"

namespace polychip {
namespace {

constexpr std::uint64_t kHeadBytes = sizeof(MessageHead);

}  // namespace

OutgoingRing::OutgoingRing(const Segment& segment, int rank, int peer)
    : counters_(segment.ring_counters(rank, peer)),
      bytes_(segment.ring(rank, peer)),
      size_(segment.geometry().ring_bytes),
      reader_bell_(segment.control(peer).bell) {}

bool OutgoingRing::advance() {
  bool moved = false;
  while (!messages_.empty()) {
    Operation& message = *messages_.front();
    const MessageHead head{message.bytes, message.dtype, 0};
    const std::uint64_t end = kHeadBytes + message.bytes;
    const bool in_head = put_bytes_ < kHeadBytes;
    const bool put_any =
        in_head ? put(reinterpret_cast<const char*>(&head), put_bytes_, kHeadBytes - put_bytes_)
                : put(message.input, put_bytes_ - kHeadBytes, end - put_bytes_);
    moved |= put_any;
    if (put_bytes_ == end) {
      message.finished = true;
      messages_.pop_front();
      put_bytes_ = 0;
    } else if (!put_any) {
      break;
    }
  }
  return moved;
}

// Copies as many of `bytes` bytes as fit without going round the end. False if none fit.
bool OutgoingRing::put(const char* source, std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t written = counters_.written.load(std::memory_order_relaxed);  // our own
  // Acquire: the reader took what it counts before we overwrite it.
  const std::uint64_t held = written - counters_.read.load(std::memory_order_acquire);
  const std::uint64_t place = written % size_;
  const std::uint64_t part = std::min({bytes, size_ - held, size_ - place});
  if (part == 0) return false;
  std::memcpy(bytes_ + place, source + offset, part);
  // Release: who sees the count also sees the bytes.
  counters_.written.store(written + part, std::memory_order_release);
  put_bytes_ += part;
  fence_before_ringing();
  ring_if_awaited(reader_bell_, kRing);
  return true;
}

IncomingRing::IncomingRing(const Segment& segment, int rank, int peer)
    : peer_(peer),
      counters_(segment.ring_counters(peer, rank)),
      bytes_(segment.ring(peer, rank)),
      size_(segment.geometry().ring_bytes),
      writer_bell_(segment.control(peer).bell) {}

bool IncomingRing::advance() {
  bool moved = false;
  while (!messages_.empty()) {
    Operation& message = *messages_.front();
    const std::uint64_t end = kHeadBytes + message.bytes;
    const bool in_head = taken_bytes_ < kHeadBytes;
    const bool took_any =
        in_head ? take(reinterpret_cast<char*>(&head_), taken_bytes_, kHeadBytes - taken_bytes_)
                : take(message.output, taken_bytes_ - kHeadBytes, end - taken_bytes_);
    moved |= took_any;
    if (in_head && taken_bytes_ == kHeadBytes) compare(message);
    if (taken_bytes_ == end) {
      message.finished = true;
      messages_.pop_front();
      taken_bytes_ = 0;
    } else if (!took_any) {
      break;
    }
  }
  return moved;
}

// Copies as many of `bytes` bytes as are there without going round the end. False if none are.
bool IncomingRing::take(char* target, std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t read = counters_.read.load(std::memory_order_relaxed);  // our own
  // Acquire: pairs with the writer's release.
  const std::uint64_t held = counters_.written.load(std::memory_order_acquire) - read;
  const std::uint64_t place = read % size_;
  const std::uint64_t part = std::min({bytes, held, size_ - place});
  if (part == 0) return false;
  std::memcpy(target + offset, bytes_ + place, part);
  // Release: we have read these bytes; the writer may overwrite them.
  counters_.read.store(read + part, std::memory_order_release);
  taken_bytes_ += part;
  fence_before_ringing();
  ring_if_awaited(writer_bell_, kRing);
  return true;
}

void IncomingRing::compare(const Operation& operation) const {
  if (head_.bytes == operation.bytes && head_.dtype == operation.dtype) return;
  const bool only_dtype = head_.bytes == operation.bytes;
  const std::string sender = "rank " + std::to_string(peer_);
  throw Misuse{peer_, "this rank receives " + std::to_string(operation.bytes) + " bytes from " +
                          sender + ", which sent " + std::to_string(head_.bytes) +
                          (only_dtype ? " of another dtype" : "")};
}

}  // namespace polychip
