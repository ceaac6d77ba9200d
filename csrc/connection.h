// One connection to one incarnation of a peer, whatever carries it: messages both ways, and the versions it publishes.
#pragma once
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include <unistd.h>

#include "board.h"
#include "holds.h"
#include "inbox.h"

namespace tl {

class Arena;
struct Descriptor;

struct Identity {
  std::string name;
  uint64_t incarnation = 0;
  bool operator==(const Identity& other) const { return name == other.name && incarnation == other.incarnation; }
};

// What goes to one incarnation of a peer, over all connections to it, one after the other or at once.
struct Outbound {
  struct Kept {
    uint64_t sequence;
    std::string record;
  };
  explicit Outbound(uint64_t serial) : serial(serial) {}
  const uint64_t serial;  // names the receiver in claims that are meant for it alone
  std::mutex mutex;
  uint64_t last = 0;      // number of the last message
  std::deque<Kept> kept;  // records that went over a stream and that the peer has not acknowledged
  uint64_t lane = 0;      // serial of the connection that sends them; one before it may still end
  std::atomic<bool> down{false};  // it is known that the peer has gone: nothing is worth another try
};

struct Counters {
  std::atomic<uint64_t> messages_sent{0}, messages_received{0}, bytes_sent{0}, bytes_received{0}, bytes_read{0};
  std::atomic<uint64_t> retries{0};
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // Bytes of messages that the peer's application has not taken yet. Beyond the first an object is offered from the pool;
  // beyond the second the sender waits: so what a peer must buffer is bounded.
  static constexpr uint64_t kEagerCredit = 4u << 20, kCredit = 8u << 20;
  static constexpr uint64_t kMaxFrame = 128u << 10;

  Connection(uint64_t serial, Identity peer, int pid, std::shared_ptr<Outbound> outbound)
      : serial(serial), peer(std::move(peer)), pid(pid), outbound_(std::move(outbound)) {}
  virtual ~Connection() = default;
  Connection(const Connection&) = delete;

  const uint64_t serial;
  const Identity peer;
  const int pid;  // 0: on another host
  const char* carrier() const { return pid == 0 ? "tcp" : pid == ::getpid() ? "local" : "shm"; }  // as the transports are called
  Counters counters;

  // ----- sending (any thread)
  struct Outgoing {
    std::string_view tag, meta, descriptor;
    uint64_t payload_size = 0;
    void (*copy)(const void* source, char* payload) = nullptr;
    const void* source = nullptr;
  };
  static uint64_t frame_size(const Outgoing& message);
  static bool fits(const Outgoing& message) { return frame_size(message) <= kMaxFrame; }
  static void write_frame(char* frame, const Outgoing& message, uint64_t sequence);
  // False: no room or credit now; whoever waits is woken when there is. Throws Fault::lost.
  virtual bool try_send(const Outgoing& message) = 0;
  // Hands over, ahead of the first offer that names it, what the peer needs to read a segment of our pool.
  // False: there is no such segment.
  virtual bool announce(Arena&, uint32_t) { return true; }

  // Whether messages were sent of which it isn't known that they arrived, and no memory of ours outlives us for them.
  virtual bool owes() const { return false; }

  // ----- receiving
  std::mutex intake_mutex;  // who holds it may call receive(); taken last
  // Gives every message that has arrived to `intake`, which returns false for one that came before.
  // Throws Fault::corrupt: the peer writes nonsense.
  using Intake = std::function<bool(std::unique_ptr<Message>)>;
  virtual void receive(const Intake& intake) = 0;
  // The application has taken a message of that size.
  virtual void credit(uint64_t frame_size) = 0;
  // Tells the sender what was received and taken, as far as it doesn't know. Called now and then.
  virtual void report() {}
  // When it last brought a message, as far as those know who asked before; 0: never. Somebody asks each second, so that messages
  // themselves need no look at the clock.
  int64_t heard(int64_t now) {
    uint64_t count = counters.messages_received.load(std::memory_order_relaxed);
    if (counted_.exchange(count, std::memory_order_relaxed) != count) heard_.store(now, std::memory_order_relaxed);
    return heard_.load(std::memory_order_relaxed);
  }
  // Where the peer last wrote from, if it is a processor of ours: else -1.
  virtual int producer_cpu() const { return -1; }
  // Whether messages come here, so that whoever waits for one must look.
  virtual bool polled() const { return true; }
  // Whether the progress thread hears of what arrives. While a thread polls it would only get in its way: each message would
  // wake it, for nothing. Cheap when nothing changes.
  virtual void attend(bool) {}

  // ----- versions
  // What the peer published last under a name.
  virtual bool notice(const std::string& name, Notice& notice) const = 0;
  // We published something.
  virtual void published(const std::string& name, const Notice& notice) = 0;

  // ----- reading the peer's pool (any thread)
  // One read of a claim that counts them has succeeded.
  virtual void acknowledge(const Descriptor& descriptor) = 0;
  virtual uint32_t holds_count() { return 0; }

  // ----- as the owner
  virtual void visit_holds(const std::function<void(ClaimId)>&) {}
  virtual void want_news(bool) {}
  virtual void drain_acks(const std::function<void(ClaimId)>&) {}
  virtual void forget_segment(uint32_t) {}

  // ----- life
  virtual int socket() const = 0;
  // From now on nothing that the peer writes counts.
  virtual void distrust() = 0;
  // Tells the peer that this connection ends. `whole`: our engine has closed, so its memory will never change again.
  virtual void say_goodbye(bool whole) = 0;
  // Our engine has closed.
  virtual void close_streams() {}
  // No new reads are meant to come.
  virtual void finish() {}
  // Serial of the claims that end with the peer.
  uint64_t reader() const { return outbound_->serial; }
  bool up() const { return up_.load(std::memory_order_acquire); }
  void set_up(bool up) { up_.store(up && !over_, std::memory_order_release); }
  // It has ended, and will never be up again; what is held over it stays.
  void set_over() { over_ = true, up_ = false; }
  bool gone() const { return gone_.load(std::memory_order_acquire); }
  void set_gone() { set_over(), gone_ = true; }

 protected:
  std::shared_ptr<Outbound> outbound_;

 private:
  std::atomic<bool> up_{true}, over_{false}, gone_{false};
  std::atomic<uint64_t> counted_{0};
  std::atomic<int64_t> heard_{0};
};

}  // namespace tl
