// Whether the processes of the other ranks live: a beating counter, and the process table.
//
// A thread of its own beats, because the one that computes may do so for seconds. How long another
// rank stands still is counted in own beats, not in time: when the whole machine was frozen, all
// ranks stood still alike.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "layout.h"

namespace polychip {

enum class Life : std::uint8_t { kLives, kStandsStill, kEnded };

class Liveness {
 public:
  // on_beat: called by the beating thread after every beat.
  Liveness(Segment segment, int rank, std::int64_t beat_ns, std::uint32_t still_beats,
           std::function<void()> on_beat);
  ~Liveness() { stop(); }

  // Writes who this rank is into the segment. From here on it beats.
  void start(std::uint64_t nonce);
  // From here on the other ranks, which all have started, are expected to beat.
  void watch() { watching_.store(true, std::memory_order_release); }
  // No beat any more; waits for the thread.
  void stop();

  // As of the last beat.
  Life of(int rank) const { return lives_[rank].load(std::memory_order_relaxed); }
  // The cores the ranks may run on together.
  int cores_of_all() const;

 private:
  struct Observed {
    std::uint64_t beat = 0;
    std::uint32_t beats_without = 0;
  };

  void run();
  void observe();
  Life judged(int rank, std::uint32_t beats_without) const;
  bool ended(int rank) const;

  Segment segment_;
  const int rank_;
  const std::int64_t beat_ns_;
  const std::uint32_t still_beats_;
  const std::function<void()> on_beat_;
  Observed observed_[kRanksMax];
  std::atomic<Life> lives_[kRanksMax];
  std::atomic<bool> watching_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::mutex stopping_mutex_;  // two threads may stop it
  std::thread thread_;
};

}  // namespace polychip
