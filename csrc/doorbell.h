// How a process is woken: one futex word for all it may wait for. It lies in memory that all its peers may write.
//
// A waiter first polls what it waits for, then sleeps here. Whoever changes something calls ring(), which costs one
// fence and one load while nobody sleeps. The fences pair up (store, fence, load on both sides), so either the ringer
// sees the sleeper or the sleeper sees the change.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace tl {

inline int64_t now_ns() {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct alignas(64) Doorbell {
  std::atomic<uint32_t> sequence;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> watched;  // a progress thread wants to hear of messages too: nobody waits in a thread

  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_relaxed) != 0) wake();
  }
  void wake() {
    sequence.fetch_add(1, std::memory_order_seq_cst);
    ::syscall(SYS_futex, &sequence, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  // Sleeps until a ring or for `nanoseconds`, unless `ready()` holds once the sleeper is registered.
  template <class Ready>
  void sleep(int64_t nanoseconds, Ready ready) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    uint32_t seen = sequence.load(std::memory_order_seq_cst);
    if (!ready() && nanoseconds > 0) {
      timespec t{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
      ::syscall(SYS_futex, &sequence, FUTEX_WAIT, seen, &t, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};

}  // namespace tl
