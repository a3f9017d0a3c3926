// Threads of one pass: shares of each phase's items, and a wait for the phase to be done.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace stretto {

constexpr int kMaxThreads = 256;

// What the threads of a pass share: for every phase, how many items of each thread's share are
// taken, and how many items are done. Lies in memory that the caller has zeroed.
class Team {
 public:
  struct alignas(64) Counter {
    std::atomic<int64_t> count;
  };

  static int64_t bytes(int threads, int64_t phases) {
    return phases * (threads + 1) * static_cast<int64_t>(sizeof(Counter));
  }

  Team(void* zeroed, int threads) : counters_(static_cast<Counter*>(zeroed)), size_(threads) {}

  int size() const { return size_; }
  Counter* phase(int64_t number) const { return counters_ + number * (size_ + 1); }

 private:
  Counter* counters_;
  const int size_;
};

// One thread of a team. Every worker calls the same phases in the same order. Which thread
// computes an item never changes its result: each starts on a share of its own and then takes what
// others have left. A phase ends when its items are done, not when all threads have come: a thread
// that has lost its core to another program holds up at most the one item it was in.
class Worker {
 public:
  Worker(const Team& team, int me) : team_(team), me_(me) {}

  int me() const { return me_; }

  // Runs `work(i)` for 0 <= i < n over all threads; returns when all are done.
  template <class Work>
  void each(int64_t n, Work work) {
    Team::Counter* taken = team_.phase(phase_++);
    std::atomic<int64_t>& done = taken[team_.size()].count;
    int64_t mine = 0;
    for (int k = 0; k < team_.size(); ++k) {
      const int whose = (me_ + k) % team_.size();
      const int64_t first = n * whose / team_.size(), last = n * (whose + 1) / team_.size();
      while (true) {
        const int64_t i = first + taken[whose].count.fetch_add(1, std::memory_order_relaxed);
        if (i >= last) break;
        work(i);
        ++mine;
      }
    }
    if (mine > 0) done.fetch_add(mine, std::memory_order_acq_rel);
    for (int spins = 0; done.load(std::memory_order_acquire) != n; ++spins) {
      _mm_pause();
      if (spins > kSpins) sched_yield();  // on busy cores the others may wait for this one
    }
  }

 private:
  static constexpr int kSpins = 2000;
  const Team& team_;
  const int me_;
  int64_t phase_ = 0;
};

}  // namespace stretto
