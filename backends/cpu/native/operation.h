// An operation of a communicator, from its submission until it is finished.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "layout.h"
#include "sums.h"

namespace polychip {

// Also part of the C interface.
enum class Kind : std::uint32_t {
  kAllReduce = 1,
  kAllGather = 2,
  kReduceScatter = 3,
  kBroadcast = 4,
  kSend = 5,
  kReceive = 6,
};

inline const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce: return "all_reduce";
    case Kind::kAllGather: return "all_gather";
    case Kind::kReduceScatter: return "reduce_scatter";
    case Kind::kBroadcast: return "broadcast";
    case Kind::kSend: return "send";
    case Kind::kReceive: return "receive";
  }
  return "an unknown operation";
}

// An operation as it is asked for.
//
// code: what is the same for every operation of a kind, dtype and peer, in one number, because the
// caller pays for each one. From the lowest bit: kind 8, sum type 8, peer + 1 16, dtype 32.
struct Request {
  std::uint64_t code;
  const char* input;
  char* output;
  std::uint64_t bytes;
};

inline std::uint64_t rounded_up_to_line(std::uint64_t bytes) {
  return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

// A tensor that is summed in place.
struct Part {
  char* data;
  std::uint64_t bytes;
};

// Each of several parts that travel as one begins on a line.
inline std::uint64_t packed_bytes(const Part& part) { return rounded_up_to_line(part.bytes); }

// bytes: of one rank's part: of the input of all_gather, of the output of reduce_scatter.
// peer: the root of a broadcast, the other rank of send and receive, else -1.
// parts: of sums that travel as one, which then have neither input nor output; else empty.
struct Operation {
  Operation(const Request& request, std::int64_t now_ns)
      : kind(static_cast<Kind>(request.code & 0xFF)),
        input(request.input),
        output(request.output),
        bytes(request.bytes),
        sum_type(static_cast<SumType>(request.code >> 8 & 0xFF)),
        dtype(static_cast<std::uint32_t>(request.code >> 32)),
        peer(static_cast<int>(request.code >> 16 & 0xFFFF) - 1),
        submitted_ns(now_ns) {}

  // code: of a sum.
  Operation(std::uint64_t code, std::vector<Part> packed, std::int64_t now_ns)
      : Operation({code, nullptr, nullptr, 0}, now_ns) {
    parts = std::move(packed);
    for (const Part& part : parts) bytes += packed_bytes(part);
  }

  Kind kind;
  const char* input;
  char* output;
  std::uint64_t bytes;
  SumType sum_type;
  std::uint32_t dtype;
  int peer;
  std::int64_t submitted_ns;
  std::vector<Part> parts;
  bool finished = false;
};

// Ranks as bits.
using RankSet = std::uint64_t;
static_assert(kRanksMax <= 64, "a RankSet has a bit for every rank");

inline RankSet rank_bit(int rank) { return RankSet{1} << rank; }

// Thrown where a rank sees that another one called a different operation.
struct Misuse {
  int rank;
  std::string text;
};

}  // namespace polychip
