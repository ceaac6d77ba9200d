// One way in for peers: a listener, whoever has not introduced himself there yet, and what the connections it made need
// of the progress thread. All methods run on that thread unless said.
#pragma once
#include <cstdint>
#include <memory>

namespace tl {

class Connection;

struct Watched {  // a descriptor, and the epoll events that are wanted of it
  int fd;
  uint32_t events;
};

class Port {
 public:
  virtual ~Port() = default;
  // Before the progress thread starts.
  virtual void start() = 0;
  // Something happened on a descriptor that belongs to no connection. False: it isn't one of this port's.
  virtual bool on_event(int fd, uint32_t events) = 0;
  // The same for one that was registered with a connection.
  virtual void on_connection(const std::shared_ptr<Connection>& connection, int fd, uint32_t events) = 0;
  // Does what is due and returns when to be called next (monotonic ns).
  virtual int64_t on_tick(int64_t now) = 0;
  // After the progress thread has ended.
  virtual void close() = 0;
};

}  // namespace tl
