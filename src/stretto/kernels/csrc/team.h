// Threads of one pass: shares of each phase's items, and a barrier after each phase.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace stretto {

constexpr int kMaxThreads = 256;

// Every thread of the team calls the same phases in the same order. Which thread computes an item
// never changes its result: each starts on a share of its own, and then takes what others have
// left, so that a thread that was descheduled holds nobody up for more than one item.
class Team {
 public:
  explicit Team(int size) : size_(size) {}

  int size() const { return size_; }

  // Runs `work(i)` for 0 <= i < n over all threads; returns when all are done.
  template <class Work>
  void each(int me, int64_t n, Work work) {
    for (int k = 0; k < size_; ++k) {
      const int whose = (me + k) % size_;
      const int64_t first = n * whose / size_, last = n * (whose + 1) / size_;
      while (true) {
        const int64_t i = first + taken_[whose].count.fetch_add(1, std::memory_order_relaxed);
        if (i >= last) break;
        work(i);
      }
    }
    wait();
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> count{0};
  };

  void wait() {
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size_)) {
      for (int k = 0; k < size_; ++k) taken_[k].count.store(0, std::memory_order_relaxed);
      arrived_.store(0, std::memory_order_relaxed);
      generation_.fetch_add(1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) {
      _mm_pause();
      if (spins > kSpins) sched_yield();  // on busy cores the others may wait for this one
    }
  }

  static constexpr int kSpins = 2000;
  const int size_;
  Counter taken_[kMaxThreads];
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
};

}  // namespace stretto
