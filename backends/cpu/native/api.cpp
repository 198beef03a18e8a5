// The C interface that backends/cpu/shared_memory_library.py calls.
//
// Every pointer to a communicator comes from `polychip_open` and is good until `polychip_free`.
#include <cstring>
#include <string>
#include <vector>

#include "communicator.h"

#define POLYCHIP_EXPORT extern "C" __attribute__((visibility("default")))

using polychip::Communicator;
using polychip::Geometry;
using polychip::Segment;

// Changes with the layout of the segment or with this interface.
POLYCHIP_EXPORT std::uint32_t polychip_layout_version() noexcept {
  return polychip::kLayoutVersion;
}

POLYCHIP_EXPORT std::uint64_t polychip_segment_bytes(const Geometry* geometry) noexcept {
  return Segment::bytes(*geometry);
}

// The rank's end of the segment mapped at `address`, which must stay mapped. Null if the segment was
// laid out for other sizes. first: this rank made the segment.
POLYCHIP_EXPORT Communicator* polychip_open(void* address, const Geometry* geometry,
                                            const polychip::Timing* timing, std::int32_t rank,
                                            bool first) noexcept {
  Segment segment(address, *geometry);
  if (first) segment.stamp();
  if (!segment.stamped_alike()) return nullptr;
  return new Communicator(segment, rank, *timing);
}

POLYCHIP_EXPORT void polychip_join(Communicator* communicator, std::uint64_t nonce) noexcept {
  communicator->join(nonce);
}

POLYCHIP_EXPORT std::uint64_t polychip_nonce(Communicator* communicator,
                                             std::int32_t rank) noexcept {
  return communicator->nonce_of(rank);
}

POLYCHIP_EXPORT bool polychip_start(Communicator* communicator) noexcept {
  return communicator->start();
}

// The arguments are those of a Request. The number of the operation; 0 if the communicator is broken.
POLYCHIP_EXPORT std::uint64_t polychip_submit(Communicator* communicator, std::uint64_t code,
                                              const void* input, void* output,
                                              std::uint64_t bytes) noexcept {
  return communicator->submit(
      {code, static_cast<const char*>(input), static_cast<char*>(output), bytes});
}

// tensors: the addresses of `count` tensors, then the bytes of each. The number of the last operation, with
// which all are done; 0 if the communicator is broken.
POLYCHIP_EXPORT std::uint64_t polychip_submit_sums(Communicator* communicator, std::uint64_t code,
                                                   const char* tensors,
                                                   std::uint64_t count) noexcept {
  std::vector<std::uint64_t> words(2 * count);
  std::memcpy(words.data(), tensors, words.size() * sizeof(std::uint64_t));
  std::vector<polychip::Part> parts(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    parts[i] = {reinterpret_cast<char*>(words[i]), words[count + i]};
  }
  return communicator->submit_sums(code, parts);
}

POLYCHIP_EXPORT std::int32_t polychip_poll(Communicator* communicator,
                                           std::uint64_t number) noexcept {
  return static_cast<std::int32_t>(communicator->poll(number));
}

POLYCHIP_EXPORT std::int32_t polychip_wait(Communicator* communicator, std::uint64_t number,
                                           std::int64_t timeout_ns) noexcept {
  return static_cast<std::int32_t>(communicator->wait(number, timeout_ns));
}

// An operation that native code asks for again and again; its owner keeps it.
struct RepeatedCall {
  Communicator* communicator;
  polychip::Request request;
  std::uint64_t number;  // of the last one asked for; 0 if the communicator was broken
};

// Such code gets the address of this function. Not 0: the operation failed, or a signal ended the wait.
POLYCHIP_EXPORT std::int32_t polychip_call(void* context) noexcept {
  auto* const call = static_cast<RepeatedCall*>(context);
  return call->communicator->call(call->request, call->number) == polychip::Status::kDone ? 0 : 1;
}

// Where the nanoseconds stand that such calls took.
POLYCHIP_EXPORT const void* polychip_called_ns(Communicator* communicator) noexcept {
  return &communicator->called_ns();
}

// Where the number of the oldest unfinished operation stands.
POLYCHIP_EXPORT const void* polychip_oldest(Communicator* communicator) noexcept {
  return &communicator->oldest();
}

// Writes the reason, ended by a zero, into `text`. Returns a FailureKind.
POLYCHIP_EXPORT std::uint32_t polychip_failure(Communicator* communicator, char* text,
                                               std::uint64_t text_bytes) noexcept {
  std::string reason;
  const polychip::FailureKind kind = communicator->failure(reason);
  std::strncpy(text, reason.c_str(), text_bytes - 1);
  text[text_bytes - 1] = '\0';
  return static_cast<std::uint32_t>(kind);
}

POLYCHIP_EXPORT void polychip_abort(Communicator* communicator) noexcept {
  communicator->leave(polychip::FailureKind::kAborted, "aborted");
}

POLYCHIP_EXPORT void polychip_leave(Communicator* communicator) noexcept {
  communicator->leave(polychip::FailureKind::kClosed, "closed meanwhile");
}

POLYCHIP_EXPORT void polychip_free(Communicator* communicator) noexcept { delete communicator; }
