// Heartbeats to the coordinator, from the progress thread: a busy interpreter costs nobody a lease.
//
// A stream socket, unix or TCP. Each beat is the 16 bytes of the lease key; each answer is one byte, 0: extended,
// 1: the coordinator doesn't know this lease, so the peer must join again.
//
// Over TCP a host that vanished takes beats into nowhere for minutes, so a stream without answers counts as broken after
// the time of a lease. Not so on one host: there a dead coordinator is known at once, and one that was only stopped would
// take the closed stream for the death of this process.
#pragma once
#include <atomic>
#include <mutex>
#include <string>

#include "notes.h"

namespace tl {

class Heartbeat {
 public:
  enum class State { idle, connecting, beating, rejected, unreachable };

  // `address`: unix:PATH, IP:PORT or [IP]:PORT. May be called again after the peer has joined again.
  void configure(std::string address, Key key, int64_t interval_ns);
  void stop();
  // Does what is due and returns when to be called next (monotonic ns). Never blocks. Progress thread only.
  int64_t tick(int64_t now);
  State state() const { return state_.load(std::memory_order_acquire); }

 private:
  enum class Sent { yes, later, no };

  bool connect(int64_t now);
  Sent beat();
  bool read_answers(int64_t now);
  bool silent(int64_t now) const;

  std::mutex mutex_;
  std::string address_;
  Key key_{};
  int64_t interval_ns_ = 0, due_ns_ = 0, heard_ns_ = 0;
  bool tcp_ = false;
  Fd socket_;
  std::atomic<State> state_{State::idle};
};

}  // namespace tl
