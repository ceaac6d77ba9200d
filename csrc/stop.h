// Set by another thread to stop an operation. One that waits on a socket is woken: its stream is shut down and spent.
#pragma once
#include <sys/socket.h>

#include <atomic>
#include <mutex>

namespace tl {

class Stop {
 public:
  std::atomic<bool> flag{false};

  void set() {
    std::lock_guard lock(mutex_);
    flag = true;
    if (socket_ >= 0) ::shutdown(socket_, SHUT_RDWR);
  }

  // While it lives, set() ends what the thread reads from that socket.
  class Guard {
   public:
    Guard(Stop* stop, int socket) : stop_(stop) {
      if (!stop_) return;
      std::lock_guard lock(stop_->mutex_);
      stop_->socket_ = socket;
      if (stop_->flag) ::shutdown(socket, SHUT_RDWR);
    }
    ~Guard() {
      if (!stop_) return;
      std::lock_guard lock(stop_->mutex_);
      stop_->socket_ = -1;
    }
    Guard(const Guard&) = delete;

   private:
    Stop* stop_;
  };

 private:
  std::mutex mutex_;
  int socket_ = -1;
};

}  // namespace tl
