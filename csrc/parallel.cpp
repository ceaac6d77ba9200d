#include "parallel.h"

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace tl {

namespace {

constexpr int max_helpers = 7;  // memory bandwidth is spent well before

class Pool {
 public:
  // False: busy with another caller's work.
  bool run(size_t count, const std::function<void(size_t)>& work, int helpers) {
    std::unique_lock<std::mutex> only(caller_, std::try_to_lock);
    if (!only) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start(helpers);
      work_ = &work;
      count_ = count;
      next_.store(0, std::memory_order_relaxed);
      invited_ = std::min<size_t>(static_cast<size_t>(started_), count - 1);
    }
    wake_.notify_all();
    drain(work, count);
    std::unique_lock<std::mutex> lock(mutex_);
    invited_ = 0;  // who hasn't come by now needn't
    idle_.wait(lock, [this] { return active_ == 0; });
    work_ = nullptr;
    return true;
  }

 private:
  void start(int helpers) {
    for (; started_ < helpers; ++started_) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;  // no more threads to be had: those that exist do the work
      }
    }
  }

  void drain(const std::function<void(size_t)>& work, size_t count) {
    for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
  }

  [[noreturn]] void serve() {
#if defined(__linux__)
    ::pthread_setname_np(::pthread_self(), "tensorlink-copy");
#endif
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return invited_ > 0; });
      --invited_;
      ++active_;
      const auto* work = work_;
      const size_t count = count_;
      lock.unlock();
      drain(*work, count);
      lock.lock();
      if (--active_ == 0) idle_.notify_one();
    }
  }

  std::mutex caller_;  // held by whoever has the pool
  std::mutex mutex_;   // guards what follows
  std::condition_variable wake_, idle_;
  const std::function<void(size_t)>* work_ = nullptr;
  size_t count_ = 0, invited_ = 0;
  int started_ = 0, active_ = 0;
  std::atomic<size_t> next_{0};
};

// Never destroyed: helpers may run until the process ends. A forked child forgets its parent's, whose threads it lacks
// and whose locks may be held for ever.
std::atomic<Pool*> current{nullptr};

Pool& pool() {
  static const int once = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr, std::memory_order_relaxed); });
  (void)once;
  Pool* existing = current.load(std::memory_order_acquire);
  if (existing) return *existing;
  auto* made = new Pool;
  if (current.compare_exchange_strong(existing, made, std::memory_order_acq_rel)) return *made;
  delete made;
  return *existing;
}

}  // namespace

int available_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void parallel_for(size_t count, const std::function<void(size_t)>& work) {
  const int helpers = std::min(available_cores() - 1, max_helpers);
  if (count > 1 && helpers > 0 && pool().run(count, work, helpers)) return;
  for (size_t i = 0; i < count; ++i) work(i);
}

}  // namespace tl
