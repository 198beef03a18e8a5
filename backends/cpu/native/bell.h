// How a rank sleeps until another one has done something, without a lost wake-up.
//
//   sleeper                               waker
//   awaited |= what                       counter = n          (what the sleeper is waiting for)
//   ---- full fence ----                  ---- full fence ----
//   counter reached?  -> do not sleep     awaited & what?  -> rings += 1, wake
//   sleep while rings is as it was
//
// Each side writes before the fence what the other reads after it, so at least one of them sees the
// other. A waker makes a system call only for a rank that says it sleeps.
#pragma once

#include "layout.h"

namespace polychip {

// What a rank may sleep for; bits.
enum Event : std::uint32_t {
  kPublished = 1,  // a piece was published, or a slice of it summed
  kCompleted = 2,  // a piece was completed: a buffer may be free
  kRing = 4,       // a ring was written or read
};

// Says what this rank is about to sleep for. Returns what `sleep` must be given; look at what is
// awaited between the two.
std::uint32_t listen(Bell& bell, std::uint32_t events);

// Sleeps until the bell rings, at most `limit_ns`. False if a signal ended it.
bool sleep(Bell& bell, std::uint32_t heard, std::int64_t limit_ns);

// To be called once between a write and the `ring_if_awaited` that announce it.
void fence_before_ringing();

// Wakes the rank that sleeps there if it sleeps for one of `events`.
void ring_if_awaited(Bell& bell, std::uint32_t events);

// Wakes whoever sleeps there.
void ring(Bell& bell);

}  // namespace polychip
