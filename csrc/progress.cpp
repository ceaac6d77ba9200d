// The progress thread of the engine.
#include <sys/epoll.h>

#include <algorithm>

#include "engine.h"

namespace tl {

void Engine::run() {
  ::pthread_setname_np(::pthread_self(), "tensorlink");
  int64_t due = 0;
  while (!closed()) {
    int64_t now = now_ns();
    if (now >= due) due = on_tick(now);
    epoll_event events[64];
    int64_t wait = due <= now ? 0 : std::min<int64_t>((due - now) / 1'000'000 + 1, 1000);
    int n = ::epoll_wait(epoll_.get(), events, 64, static_cast<int>(wait));
    for (int i = 0; i < n; ++i) {
      int fd = events[i].data.fd;
      if (fd == wake_fd_.get()) {
        uint64_t value;
        [[maybe_unused]] ssize_t got = ::read(fd, &value, sizeof value);
        due = 0;
      } else {
        on_event(fd, events[i].events);
      }
    }
    if (n > 0) due = 0;  // what has happened may give a port something to do
  }
}

int64_t Engine::on_tick(int64_t now) {
  beat(now);
  if (now - last_trim_ > kIdleTrim / 3) {
    last_trim_ = now;
    arena_->trim(now - kIdleTrim);
  }
  for (uint32_t segment : arena_->take_dropped())
    for (auto& connection : connections()) connection->forget_segment(segment);
  bool restless = claims_.restless();
  if (restless) sweep();
  int64_t due = std::min(heartbeat_.tick(now), now + (restless ? kTick : 1'000'000'000));
  for (Port* port : ports_) due = std::min(due, port->on_tick(now));
  return due;
}

void Engine::on_event(int fd, uint32_t events) {
  for (Port* port : ports_)
    if (port->on_event(fd, events)) return;
  Member member;
  {
    std::lock_guard lock(list_mutex_);
    auto it = by_fd_.find(fd);
    if (it == by_fd_.end()) return;  // the event was for what had this number before
    member = it->second;
  }
  member.port->on_connection(member.connection, fd, events);
}

}  // namespace tl
