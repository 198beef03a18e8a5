#include "layout.h"

namespace polychip {
namespace {

constexpr std::uint64_t kPageBytes = 4096;

std::uint64_t rounded_up(std::uint64_t bytes, std::uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Offsets of the parts from the start of the segment.
struct Parts {
  explicit Parts(const Geometry& geometry) {
    const std::uint64_t ranks = geometry.world_size;
    const std::uint64_t pairs = ranks * (ranks - 1);
    controls = rounded_up(sizeof(Geometry), kLineBytes);
    counters = controls + ranks * sizeof(RankControl);
    buffers = rounded_up(counters + pairs * sizeof(RingCounters), kPageBytes);
    rings = buffers + ranks * kDepth * geometry.buffer_bytes;
    end = rounded_up(rings + pairs * geometry.ring_bytes, kPageBytes);
  }

  std::uint64_t controls, counters, buffers, rings, end;
};

}  // namespace

Segment::Segment(void* address, const Geometry& geometry) : geometry_(geometry) {
  const Parts parts(geometry);
  char* const start = static_cast<char*>(address);
  header_ = reinterpret_cast<Geometry*>(start);
  controls_ = reinterpret_cast<RankControl*>(start + parts.controls);
  counters_ = reinterpret_cast<RingCounters*>(start + parts.counters);
  buffers_ = start + parts.buffers;
  rings_ = start + parts.rings;
}

std::uint64_t Segment::bytes(const Geometry& geometry) { return Parts(geometry).end; }

void Segment::stamp() { *header_ = geometry_; }

bool Segment::stamped_alike() const {
  return header_->world_size == geometry_.world_size &&
         header_->layout_version == geometry_.layout_version &&
         header_->buffer_bytes == geometry_.buffer_bytes &&
         header_->ring_bytes == geometry_.ring_bytes;
}

char* Segment::buffer(int rank, std::uint64_t number) const {
  const std::uint64_t place = static_cast<std::uint64_t>(rank) * kDepth + number % kDepth;
  return buffers_ + place * geometry_.buffer_bytes;
}

RingCounters& Segment::ring_counters(int writer, int reader) const {
  return counters_[pair(writer, reader)];
}

char* Segment::ring(int writer, int reader) const {
  return rings_ + pair(writer, reader) * geometry_.ring_bytes;
}

std::uint64_t Segment::pair(int writer, int reader) const {
  const int place = reader < writer ? reader : reader - 1;  // nobody writes to itself
  return static_cast<std::uint64_t>(writer) * (geometry_.world_size - 1) + place;
}

}  // namespace polychip
