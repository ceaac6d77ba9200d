// Where peers on other hosts connect: a TCP listener that each must show, by handshake.h, that it knows the key.
#pragma once
#include <deque>
#include <map>

#include "port.h"
#include "read_server.h"
#include "tcp_connection.h"
#include "throttle.h"

namespace tl {

class TcpPort : public Port {
 public:
  TcpPort(Engine& engine, Key key);

  // From now on every stream is inside TLS. Before listen() and connect().
  void secure(std::shared_ptr<const Tls> tls) { tls_ = std::move(tls); }
  bool secured() const { return tls_ != nullptr; }
  // Any thread; once. `first`..`last`: the ports to try, 0: any. Returns the port. Throws Fault::transport.
  uint16_t listen(const std::string& host, uint16_t first, uint16_t last);
  // Any thread. Blocks. Throws Fault::lost, refused, timeout, cancelled.
  std::shared_ptr<Connection> connect(const Contact& to, const Identity& peer, const Patience& patience);
  // What was turned away since the last call, in words; who goes on and on is only counted. Any thread.
  std::vector<std::string> take_refusals();
  ReadServer& server() { return server_; }

  void start() override {}
  bool on_event(int fd, uint32_t events) override;
  void on_connection(const std::shared_ptr<Connection>& connection, int fd, uint32_t events) override;
  int64_t on_tick(int64_t now) override;
  void close() override;

 private:
  struct Pending {  // accepted, and the handshake isn't over
    Socket socket;
    Nonce nonce;
    std::string in, from;
    int64_t deadline_ns;
    bool challenged = false;
    std::string late_answer = {};  // its greeting was wrong, as many before it from there: what it hears when time is up
  };
  static constexpr int64_t kHandshakeTimeout = 5'000'000'000;
  static constexpr size_t kMaxPending = 256, kMaxRefusals = 4096;
  static constexpr size_t kMaxLanes = 64, kMaxReads = 1024;  // of one peer
  static constexpr int64_t kUnattended = 2'000'000, kReport = 50'000'000, kFull = 250'000'000;

  void accept_all();
  bool challenge_it(Pending& pending);
  void on_hello(int fd);
  void welcome(Pending pending, const Heard& heard);
  void hold(Pending pending, std::string answer);
  std::string too_many(const Greeting& greeting);
  // False: it is one of too many from there, so the answer is to wait.
  bool refuse(const std::string& from, const std::string& why);
  std::shared_ptr<TcpConnection> make(Socket socket, bool dialled, const Identity& peer, const Contact& contact, uint64_t received);
  void add(const std::shared_ptr<TcpConnection>& connection);

  Engine& engine_;
  Contact contact_;  // ours
  std::shared_ptr<const Tls> tls_;
  Fd listener_;
  std::atomic<int> listener_number_{-1};
  std::shared_ptr<Home> home_;
  ReadServer server_;
  std::map<int, Pending> pending_;
  std::deque<int> order_;                          // of pending_, the oldest first
  int64_t report_due_ = 0, accept_due_ = 0;
  std::mutex refusals_mutex_;
  std::vector<std::string> refusals_;
  Throttle throttle_;
};

}  // namespace tl
