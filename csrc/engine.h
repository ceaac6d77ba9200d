// The engine of one endpoint: pool, claims, connections, inbox, and the progress thread that serves them.
//
// Threads. Any thread may send, wait, hold and release. The progress thread serves the ports, through which peers connect, beats
// the heart and notices that a peer has gone; it never takes the interpreter's lock, so a busy interpreter stalls no
// peer. Messages are taken from the connections by whoever waits for one (a hop through another thread would cost
// two wake-ups), and by the progress thread when it is asked to.
#pragma once
#include <functional>
#include <map>
#include <thread>

#include "arena.h"
#include "claims.h"
#include "connection.h"
#include "flight.h"
#include "heartbeat.h"
#include "inbox.h"
#include "port.h"
#include "shm_port.h"
#include "tcp_port.h"

namespace tl {

class Engine {
 public:
  // Listens on the unix socket `path`; whoever connects must show `key`. `flight`: the file of the flight recorder, or none.
  Engine(std::string name, std::string path, Key key, uint64_t pool_bytes, const std::string& flight = {});
  ~Engine();

  // Starts the progress thread under an incarnation.
  void start(uint64_t incarnation);
  // Says goodbye, ends the thread, ends all claims. Views that are still held stay readable. Idempotent.
  void close();
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  bool forked() const { return ::getpid() != pid_; }
  const std::shared_ptr<Flight>& flight() const { return flight_; }

  ShmPort& shm() { return *shm_; }
  TcpPort& tcp() { return *tcp_; }
  std::vector<std::shared_ptr<Connection>> connections();
  // A connection to a peer, of those the one that brought something last; or none.
  std::shared_ptr<Connection> connection(const std::string& peer);
  void disconnect(const std::shared_ptr<Connection>& connection);
  // The peer's lease ran out (down), or it is back: what it holds stays pinned either way.
  void set_peer(const Identity& peer, bool up);
  // Others took this process for lost: see Inbox::lapse.
  void lapse();
  // No reader is sent to it any more.
  void avoid(const Identity& peer) { tcp_->server().avoid(peer); }

  // ----- for ports
  // From now on it is used, and the port hears of its descriptors. Throws Fault::refused: a later incarnation is known.
  void add(const std::shared_ptr<Connection>& connection, Port& port, const std::vector<Watched>& fds);
  // The peer's process has ended, or it said goodbye. `gone`: and nobody can use its mappings any more.
  void lose(const std::shared_ptr<Connection>& connection, bool gone);
  // The stream of a connection has ended. Unless one side said goodbye, that doesn't mean that the peer has gone.
  void lose_lane(const std::shared_ptr<TcpConnection>& connection);
  // Peers whose streams ended without a word, since the last call, and where they listened: they may have gone.
  struct Suspect {
    Identity peer;
    Address at;
  };
  std::vector<Suspect> take_suspects();
  void watch_fd(int fd, uint32_t events);
  void rewatch_fd(int fd, uint32_t events);
  void unwatch_fd(int fd);
  std::shared_ptr<Outbound> outbound(const Identity& peer);
  uint64_t next_serial() { return serials_.fetch_add(1, std::memory_order_relaxed) + 1; }
  void ring();  // wakes the threads of this process that wait
  const Fd& control_fd() const { return control_fd_; }
  const Fd& doorbell_fd() const { return doorbell_fd_; }

  // ----- memory
  std::shared_ptr<Arena> arena() { return arena_; }
  ClaimId claim(Claim claim);
  bool release(ClaimId id);
  // Drains acknowledgements and frees what nobody holds. Cheap when there is nothing to do.
  void sweep();
  // Whether readers may free something.
  bool restless() { return claims_.restless() || tcp_->server().lending(); }
  void made_room() {
    if (room_waiters_ > 0) ring();
  }
  // A reader on another host has finished a read of a claim that counts them.
  void acknowledged(ClaimId id, const Key& key, const Identity& reader, uint64_t token);
  // Whether everything that is stored gets a checksum.
  bool verifies() const { return verifies_; }
  void verify(bool on) { verifies_ = on; }
  // While one exists, readers tell this process of every hold that ends.
  struct RoomWaiter {
    explicit RoomWaiter(Engine& engine);
    ~RoomWaiter();
    Engine& engine;
  };
  Claims& claims() { return claims_; }
  // Publishes a version on the board. False: the board is full or the name too long.
  bool publish(const std::string& name, uint64_t version, const std::string& descriptor);
  bool published(const std::string& name, Notice& notice);
  void each_published(const std::function<void(const std::string&, const Notice&)>& visit);

  // ----- messages
  Inbox& inbox() { return inbox_; }
  // Takes what has come over the connections that are polled into the inbox. False when another thread is at it; `insist`
  // waits for that one.
  bool pump(bool insist = false);
  // The same for one connection, from the progress thread, which mustn't contend with those who poll the others.
  void take(Connection& connection) { drain(connection); }
  // Whether threads that wait have looked for messages since then, and none of them sleeps.
  bool polled_since(int64_t when) const { return polled_at_ >= when && doorbell_->sleepers == 0; }
  void deliver(const std::string& source, uint64_t incarnation, const char* frame, uint64_t n);

  // Whether peers on other hosts haven't got yet what was sent to them.
  bool owes();
  // Whether messages to a peer were kept, and no lane to it works.
  bool undelivered(const Identity& peer);

  // ----- waiting: until ready() holds, or the deadline. The caller has polled before and holds no lock. `sleepy()` is called before
  // it sleeps.
  template <class Ready, class Sleepy>
  bool wait(Ready ready, int64_t deadline_ns, Sleepy sleepy) {
    if (spin(ready, deadline_ns)) return true;
    sleepy();
    for (bool done = false;;) {
      int64_t left = deadline_ns - now_ns();
      // Where another thread is pumping, it may have passed the ring that our message is in: look again, don't sleep.
      // ready() may take what it finds, so once it has held it isn't asked again.
      doorbell_->sleep(left, [&] { return attend(), !pump() || (done = ready()) || closed(); });
      if (done) return true;
      pump();
      if (ready()) return true;
      if (closed() || left <= 0) return false;
    }
  }
  template <class Ready>
  bool wait(Ready ready, int64_t deadline_ns) {
    return wait(ready, deadline_ns, [] {});
  }
  // Asks the progress thread to take messages while nobody waits in a thread, and to write to the event descriptor.
  void watch(bool on);
  int event_fd() const { return event_fd_.get(); }

  // A message as bytes for another carrier than the ring, numbered like all others to that peer.
  std::string frame(const Identity& peer, const Connection::Outgoing& message);
  void nudge();  // makes the progress thread look for what is due

  Heartbeat& heartbeat() { return heartbeat_; }
  const std::string& name() const { return name_; }
  uint64_t incarnation() const { return incarnation_; }

 private:
  struct Member {
    std::shared_ptr<Connection> connection;
    Port* port = nullptr;
  };
  static constexpr int64_t kSpin = 30'000;
  static constexpr int64_t kTick = 50'000'000;
  static constexpr int64_t kIdleTrim = 30'000'000'000;

  // Spins only if the one we wait for runs on another processor: on the same one it needs ours.
  template <class Ready>
  bool spin(Ready ready, int64_t deadline_ns) {
    int64_t end = std::min(now_ns() + kSpin, deadline_ns);
    do {
      for (int i = 0; i < 64; ++i) {
        if ((pump(), ready())) return true;
        cpu_relax();
      }
      if (closed() || shares_cpu()) return false;
    } while (now_ns() < end);
    return false;
  }
  bool shares_cpu();
  void attend();  // this thread will sleep

  void run();
  int64_t on_tick(int64_t now);
  void beat(int64_t now);
  void on_event(int fd, uint32_t events);
  bool reachable(const Identity& peer);
  void set_peer_locked(const Identity& peer, bool up);
  void await_rest(const Identity& peer);
  void forget_strangers(const Identity& peer);
  void forget_predecessors(const Identity& peer);
  bool drain(Connection& connection);  // whether it brought anything
  void drain_rest(Connection& connection);
  void signal_event();
  void want_news();

  const std::string name_;
  const pid_t pid_;
  uint64_t incarnation_ = 0;

  const std::shared_ptr<Flight> flight_;
  std::shared_ptr<Arena> arena_;
  Fd control_fd_, doorbell_fd_, epoll_, wake_fd_, event_fd_;
  Map control_map_, doorbell_map_;
  Control* control_;
  Doorbell* doorbell_;
  Inbox inbox_;
  Heartbeat heartbeat_;

  std::mutex pump_mutex_;         // one thread polls the connections; taken before list_mutex_
  std::mutex list_mutex_;         // connections_, outbound_, known_
  std::vector<std::shared_ptr<Connection>> connections_;  // changed under both, read under either
  std::map<std::pair<std::string, uint64_t>, std::shared_ptr<Outbound>> outbound_;
  std::map<std::string, uint64_t> newest_;  // highest incarnation seen, by name
  Claims claims_;
  std::mutex board_mutex_;
  std::map<int, Member> by_fd_;   // descriptors of connections; under list_mutex_
  std::unique_ptr<ShmPort> shm_;
  std::unique_ptr<TcpPort> tcp_;
  std::vector<Suspect> suspects_;  // under list_mutex_
  std::atomic<int64_t> polled_at_{0};
  std::atomic<bool> any_stream_{false}, verifies_{false};
  std::vector<Port*> ports_;      // fixed once the thread runs
  std::atomic<uint64_t> serials_{0};
  std::atomic<int> room_waiters_{0}, watchers_{0};
  std::atomic<bool> closed_{false}, started_{false};
  std::atomic<int> last_producer_cpu_{-1};
  std::atomic<uint64_t> seen_completions_{0};
  int64_t last_trim_ = 0, last_listened_ = 0;  // progress thread only
  std::thread thread_;
};

}  // namespace tl
