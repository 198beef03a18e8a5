#include "numbered_buffers.h"

#include <algorithm>
#include <cstring>

#include "bell.h"

namespace polychip {
namespace {

// From this size on a sum is divided among the ranks. Below, the second wait costs more.
constexpr std::uint64_t kTwoStepsFromBytes = 128 << 10;

// Up to here a message costs more than its bytes. One piece, and summed in one step.
constexpr std::uint64_t kPackedBytesMax = 64 << 10;
static_assert(kPackedBytesMax < kTwoStepsFromBytes);

// Copying this much takes so long that whoever sleeps is woken first.
constexpr std::uint64_t kAnnouncedBytes = 32 << 10;

// FNV-1a of the sizes; never 0.
std::uint32_t hash_of(const std::vector<Part>& parts) {
  std::uint32_t hash = 2166136261;
  for (const Part& part : parts) hash = (hash ^ static_cast<std::uint32_t>(part.bytes)) * 16777619;
  return hash | 1;
}

void copy(char* target, const char* source, std::uint64_t bytes) {
  // An empty tensor may have no address.
  if (bytes != 0) std::memcpy(target, source, bytes);
}

std::string described(const Signature& signature) {
  std::string text = name_of(static_cast<Kind>(signature.kind));
  text += " of " + std::to_string(signature.bytes) + " bytes";
  if (signature.root >= 0) text += " from rank " + std::to_string(signature.root);
  return text;
}

}  // namespace

NumberedBuffers::NumberedBuffers(Segment segment, int rank)
    : segment_(segment), rank_(rank), own_(segment.control(rank)) {}

std::uint64_t NumberedBuffers::packed_bytes_max() const {
  return std::min(kPackedBytesMax, segment_.geometry().buffer_bytes);
}

void NumberedBuffers::submit(Operation& operation) {
  const bool scatters = operation.kind == Kind::kReduceScatter;
  const std::uint64_t buffer_bytes = segment_.geometry().buffer_bytes;
  Collective collective{};
  collective.operation = &operation;
  collective.signature = {operation.bytes, static_cast<std::uint32_t>(operation.kind),
                          operation.dtype, operation.peer,
                          operation.parts.empty() ? 0 : hash_of(operation.parts)};
  // A buffer holds every rank's part of what is scattered.
  collective.piece_bytes = scatters ? buffer_bytes / segment_.geometry().world_size : buffer_bytes;
  const std::uint64_t last = collective.piece_bytes - 1;
  // An empty message is a piece too: its operation is compared like any other.
  collective.pieces = std::max<std::uint64_t>(1, (operation.bytes + last) / collective.piece_bytes);
  collectives_.push_back(collective);
  ++submitted_count_;
}

bool NumberedBuffers::advance() {
  const std::uint64_t before = publishing_.number + reducing_.number + completing_.number;
  while (publish_next()) {
  }
  while (reduce_next()) {
  }
  while (complete_next()) {
  }
  announce();
  return publishing_.number + reducing_.number + completing_.number != before;
}

RankSet NumberedBuffers::missing() const {
  if (at_end(completing_)) return 0;
  if (completing_.number == publishing_.number) {
    return publishing_.number < kDepth ? 0 : unmet(need_to_publish(publishing_.number));
  }
  if (completing_.number == reducing_.number) return unmet(need_to_reduce(reducing_.number));
  return unmet(need_to_complete(piece_at(completing_)));
}

std::uint32_t NumberedBuffers::awaited_events() const {
  if (at_end(completing_)) return 0;
  return at_end(publishing_) ? kPublished : kPublished | kCompleted;
}

bool NumberedBuffers::publish_next() {
  if (at_end(publishing_)) return false;
  const std::uint64_t number = publishing_.number;
  if (!may_publish(number)) return false;
  const Piece piece = piece_at(publishing_);
  copy_in(piece);
  Publication& publication = this->publication(rank_, number);
  publication.signature = piece.collective->signature;
  // Release: who sees the number also sees buffer and signature.
  publication.published.store(number + 1, std::memory_order_release);
  move_on(publishing_);
  done(kPublished, piece.bytes);
  return true;
}

bool NumberedBuffers::reduce_next() {
  if (reducing_.number == publishing_.number) return false;
  const Piece piece = piece_at(reducing_);
  if (in_two_steps(piece)) {
    if (!met(need_to_reduce(piece.number))) return false;
    for (int rank = 0; rank < segment_.world_size(); ++rank) compare(rank, piece.number);
    sum_slice(piece);
    // Release: who sees the number also sees the summed slice.
    own_.reduced.store(piece.number + 1, std::memory_order_release);
    done(kPublished, piece.bytes);
  }
  move_on(reducing_);
  return true;
}

bool NumberedBuffers::complete_next() {
  if (completing_.number == reducing_.number) return false;
  const Piece piece = piece_at(completing_);
  const Need need = need_to_complete(piece);
  if (!met(need)) return false;
  if (need.only_rank >= 0) {
    compare(need.only_rank, piece.number);
  } else {
    for (int rank = 0; rank < segment_.world_size(); ++rank) compare(rank, piece.number);
  }
  copy_out(piece);
  // Release: what this rank read it read before; the buffers may be overwritten from here on.
  own_.completed.store(piece.number + 1, std::memory_order_release);
  const bool last = completing_.piece + 1 == piece.collective->pieces;
  const std::uint64_t bytes = piece.bytes;
  move_on(completing_);
  if (last) {
    collectives_.front().operation->finished = true;
    collectives_.pop_front();
    ++finished_count_;
  }
  done(kCompleted, bytes);
  return true;
}

bool NumberedBuffers::at_end(const Cursor& cursor) const {
  return cursor.collective == submitted_count_;
}

NumberedBuffers::Piece NumberedBuffers::piece_at(const Cursor& cursor) const {
  const Collective& collective = collectives_[cursor.collective - finished_count_];
  const std::uint64_t start = cursor.piece * collective.piece_bytes;
  const std::uint64_t bytes = std::min(collective.piece_bytes, collective.operation->bytes - start);
  return {&collective, cursor.number, start, bytes};
}

void NumberedBuffers::move_on(Cursor& cursor) const {
  ++cursor.number;
  ++cursor.piece;
  if (cursor.piece == collectives_[cursor.collective - finished_count_].pieces) {
    ++cursor.collective;
    cursor.piece = 0;
  }
}

bool NumberedBuffers::in_two_steps(const Piece& piece) const {
  return piece.collective->operation->kind == Kind::kAllReduce &&
         piece.bytes >= kTwoStepsFromBytes;
}

// The buffer is free once nobody reads the piece that was there before.
bool NumberedBuffers::may_publish(std::uint64_t number) const {
  if (number < kDepth) return true;
  if (!met(need_to_publish(number))) return false;
  compare_readers_of(number - kDepth);
  return true;
}

// For pieces after the first kDepth ones, which find their buffers free.
NumberedBuffers::Need NumberedBuffers::need_to_publish(std::uint64_t number) const {
  return {Step::kComplete, number - kDepth, -1};
}

NumberedBuffers::Need NumberedBuffers::need_to_reduce(std::uint64_t number) const {
  return {Step::kPublish, number, -1};
}

NumberedBuffers::Need NumberedBuffers::need_to_complete(const Piece& piece) const {
  const Operation& operation = *piece.collective->operation;
  if (in_two_steps(piece)) return {Step::kReduce, piece.number, -1};
  const int root = operation.kind == Kind::kBroadcast ? operation.peer : -1;
  return {Step::kPublish, piece.number, root};
}

RankSet NumberedBuffers::unmet(const Need& need) const {
  RankSet ranks = 0;
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    if (need.only_rank >= 0 && rank != need.only_rank) continue;
    if (!did(rank, need.step, need.number)) ranks |= rank_bit(rank);
  }
  return ranks;
}

// Acquire: pairs with the release of the rank that said so.
bool NumberedBuffers::did(int rank, Step step, std::uint64_t number) const {
  const RankControl& control = segment_.control(rank);
  switch (step) {
    case Step::kPublish: {
      // Never a later number: that one waits until this rank completed what it asks for.
      const Counter& published = publication(rank, number).published;
      return published.load(std::memory_order_acquire) == number + 1;
    }
    case Step::kReduce: return control.reduced.load(std::memory_order_acquire) > number;
    case Step::kComplete: return control.completed.load(std::memory_order_acquire) > number;
  }
  return false;
}

void NumberedBuffers::copy_in(const Piece& piece) const {
  const Operation& operation = *piece.collective->operation;
  char* const buffer = segment_.buffer(rank_, piece.number);
  switch (operation.kind) {
    case Kind::kReduceScatter:
      for (int rank = 0; rank < segment_.world_size(); ++rank) {
        copy(buffer + rank * part_stride(piece),
             operation.input + rank * operation.bytes + piece.start, piece.bytes);
      }
      return;
    case Kind::kBroadcast:
      if (operation.peer == rank_) copy(buffer, operation.input + piece.start, piece.bytes);
      return;
    default:
      if (operation.parts.empty()) return copy(buffer, operation.input + piece.start, piece.bytes);
      copy_parts_in(operation, buffer);
  }
}

void NumberedBuffers::copy_parts_in(const Operation& operation, char* buffer) const {
  for (const Part& part : operation.parts) {
    copy(buffer, part.data, part.bytes);
    buffer += packed_bytes(part);
  }
}

// In place: nobody but this rank reads this slice of this rank's input.
void NumberedBuffers::sum_slice(const Piece& piece) const {
  const std::uint64_t start = slice_start(piece.bytes, rank_);
  const std::uint64_t stop = slice_start(piece.bytes, rank_ + 1);
  sum_from(piece, start, stop - start, segment_.buffer(rank_, piece.number) + start);
}

void NumberedBuffers::copy_out(const Piece& piece) const {
  const Operation& operation = *piece.collective->operation;
  char* const target = operation.output + piece.start;
  switch (operation.kind) {
    case Kind::kAllGather:
      for (int rank = 0; rank < segment_.world_size(); ++rank) {
        copy(target + rank * operation.bytes, segment_.buffer(rank, piece.number), piece.bytes);
      }
      return;
    case Kind::kReduceScatter:
      return sum_from(piece, rank_ * part_stride(piece), piece.bytes, target);
    case Kind::kBroadcast:
      if (operation.peer == rank_) return;
      return copy(target, segment_.buffer(operation.peer, piece.number), piece.bytes);
    default:
      break;
  }
  if (!operation.parts.empty()) return sum_parts(piece);
  if (!in_two_steps(piece)) return sum_from(piece, 0, piece.bytes, target);
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    const std::uint64_t start = slice_start(piece.bytes, rank);
    const std::uint64_t stop = slice_start(piece.bytes, rank + 1);
    copy(target + start, segment_.buffer(rank, piece.number) + start, stop - start);
  }
}

void NumberedBuffers::sum_parts(const Piece& piece) const {
  std::uint64_t offset = 0;
  for (const Part& part : piece.collective->operation->parts) {
    sum_from(piece, offset, part.bytes, part.data);
    offset += packed_bytes(part);
  }
}

void NumberedBuffers::sum_from(const Piece& piece, std::uint64_t offset, std::uint64_t bytes,
                               char* target) const {
  const char* inputs[kRanksMax];
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    inputs[rank] = segment_.buffer(rank, piece.number) + offset;
  }
  sum(piece.collective->operation->sum_type, inputs, segment_.world_size(), target, bytes);
}

// Where the slice of `rank` begins, on a line; that of the rank after the last is the end.
std::uint64_t NumberedBuffers::slice_start(std::uint64_t bytes, int rank) const {
  if (rank == segment_.world_size()) return bytes;
  return bytes * rank / segment_.world_size() / kLineBytes * kLineBytes;
}

std::uint64_t NumberedBuffers::part_stride(const Piece& piece) const {
  return rounded_up_to_line(piece.bytes);
}

Publication& NumberedBuffers::publication(int rank, std::uint64_t number) const {
  return segment_.control(rank).publications[number % kPublications];
}

void NumberedBuffers::compare(int rank, std::uint64_t number) const {
  const Signature& mine = publication(rank_, number).signature;
  const Signature& theirs = publication(rank, number).signature;
  if (std::memcmp(&mine, &theirs, sizeof(Signature)) == 0) return;
  const char* difference = "";
  if (described(mine) == described(theirs)) {
    difference = mine.dtype != theirs.dtype ? " of another dtype" : " in other parts";
  }
  throw Misuse{rank, "this rank called " + described(mine) + ", rank " + std::to_string(rank) +
                         " called " + described(theirs) + difference};
}

// The root of a broadcast waited for nobody, so it looks at what the others called only now. They
// completed that piece, and cannot be so far ahead that they overwrote its signature.
void NumberedBuffers::compare_readers_of(std::uint64_t number) const {
  const Signature& mine = publication(rank_, number).signature;
  if (mine.kind != static_cast<std::uint32_t>(Kind::kBroadcast)) return;
  for (int rank = 0; rank < segment_.world_size(); ++rank) compare(rank, number);
}

// A step was done that another rank may sleep for.
void NumberedBuffers::done(std::uint32_t event, std::uint64_t bytes) {
  unannounced_ |= event;
  unannounced_bytes_ += bytes;
  if (unannounced_bytes_ >= kAnnouncedBytes) announce();
}

void NumberedBuffers::announce() {
  if (unannounced_ == 0) return;
  fence_before_ringing();
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    if (rank != rank_) ring_if_awaited(segment_.control(rank).bell, unannounced_);
  }
  unannounced_ = 0;
  unannounced_bytes_ = 0;
}

}  // namespace polychip
