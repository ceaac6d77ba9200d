// Heartbeats to the coordinator, from the progress thread: a busy interpreter costs nobody a lease.
//
// A stream socket, unix or TCP. Each beat is the 16 bytes of the lease key; each answer is one byte, 0: extended,
// 1: the coordinator doesn't know this lease, so the peer must join again.
#pragma once
#include <atomic>
#include <mutex>
#include <string>

#include "notes.h"

namespace tl {

class Heartbeat {
 public:
  enum class State { idle, connecting, beating, rejected, unreachable };

  // `address`: unix:PATH or HOST:PORT. May be called again after the peer has joined again.
  void configure(std::string address, Key key, int64_t interval_ns);
  void stop();
  // Does what is due and returns when to be called next (monotonic ns). Never blocks. Progress thread only.
  int64_t tick(int64_t now);
  State state() const { return state_.load(std::memory_order_acquire); }

 private:
  bool connect();
  bool beat();
  bool read_answers();

  std::mutex mutex_;
  std::string address_;
  Key key_{};
  int64_t interval_ns_ = 0, due_ns_ = 0;
  Fd socket_;
  std::atomic<State> state_{State::idle};
};

}  // namespace tl
