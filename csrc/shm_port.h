// Where processes of this host connect: a unix socket, over which both sides hand each other their shared memory.
#pragma once
#include <map>

#include "port.h"
#include "shm_connection.h"
#include "stop.h"

namespace tl {

class Engine;

class ShmPort : public Port {
 public:
  // Listens on the unix socket `path`; whoever connects must show `key`.
  ShmPort(Engine& engine, std::string path, Key key);

  // Any thread. Blocks until the deadline. Throws Fault::lost, refused, timeout, cancelled.
  std::shared_ptr<Connection> connect(const std::string& path, Key key, const Identity& peer, int64_t deadline_ns, const Stop* stop);

  void start() override;
  bool on_event(int fd, uint32_t events) override;
  void on_connection(const std::shared_ptr<Connection>& connection, int fd, uint32_t events) override;
  int64_t on_tick(int64_t now) override;
  void close() override;

 private:
  struct Pending {  // accepted, hasn't said hello
    Fd socket;
    int64_t deadline_ns;
  };
  static constexpr int64_t kHelloTimeout = 5'000'000'000;
  static constexpr size_t kMaxPending = 256;

  void accept_all();
  void on_hello(int fd);
  void welcome(Fd socket, Note& hello);
  void on_note(const std::shared_ptr<ShmConnection>& connection, Note& note);
  std::shared_ptr<ShmConnection> make(Note& note, Fd socket, Fd half_fd, Map half, Identity peer);
  void add(const std::shared_ptr<ShmConnection>& connection);

  Engine& engine_;
  const std::string path_;
  const Key key_;
  Fd listener_;
  std::map<int, Pending> pending_;
};

}  // namespace tl
