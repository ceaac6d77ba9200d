// One connection between two processes of a host, and the views that its reader holds.
//
// Each side makes one segment for the other: the ring of its messages and the table of the other's holds. Over the
// socket it also gets the other's doorbell, and, read-only, its control segment: generations and board.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "board.h"
#include "doorbell.h"
#include "holds.h"
#include "inbox.h"
#include "notes.h"
#include "ring.h"
#include "segments.h"

namespace tl {

struct Control {  // made by each process once; its peers may only read it
  Generation generations[kSlots];
  Board board;
};

struct Half {  // made by each side of a connection; both write it
  static constexpr uint64_t kRing = 1u << 20;
  HoldTableHeader holds;
  alignas(64) char ring[Ring::bytes_for(kRing)];
};

struct Identity {
  std::string name;
  uint64_t incarnation = 0;
};

// Numbers the messages to one incarnation of a peer, over all connections to it.
struct Outbound {
  std::mutex mutex;
  uint64_t last = 0;
};

struct Counters {
  std::atomic<uint64_t> messages_sent{0}, messages_received{0}, bytes_sent{0}, bytes_received{0}, bytes_read{0};
};

class Lease;

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // Bytes of messages that the peer's application has not taken yet. Beyond the first an object is offered from the pool;
  // beyond the second the sender waits: so what a peer must buffer is bounded.
  static constexpr uint64_t kEagerCredit = 4u << 20, kCredit = 8u << 20;

  struct Parts {  // what the two sides exchange
    Fd socket, my_half_fd;
    Map my_half, their_half, their_doorbell, their_control;
  };
  Connection(uint64_t serial, Identity peer, int pid, Parts parts, std::shared_ptr<Outbound> outbound);

  const uint64_t serial;
  const Identity peer;
  const int pid;
  Counters counters;

  // ----- sending (any thread)
  struct Outgoing {
    std::string_view tag, meta, descriptor;
    uint64_t payload_size = 0;
    void (*copy)(const void* source, char* payload) = nullptr;
    const void* source = nullptr;
  };
  static uint64_t frame_size(const Outgoing& message);
  static bool fits(const Outgoing& message) { return frame_size(message) <= Half::kRing / 8; }
  static void write_frame(char* frame, const Outgoing& message, uint64_t sequence);
  // False: no room or credit now; the peer will ring when there is. Throws Fault::lost.
  bool try_send(const Outgoing& message);

  // ----- receiving; the caller serialises poll()
  bool has_frames() { return !rx_.empty(); }
  const char* front(uint64_t& n) { return rx_.front(n); }
  void pop(uint64_t n);
  void credit(uint64_t frame_size);
  // Counts a frame that has arrived. Throws Fault::corrupt when the peer has overdrawn its credit.
  void account(uint64_t frame_size);
  // The peer writes nonsense: from now on nothing it writes counts. Its socket tells it and the progress thread.
  void distrust();
  int producer_cpu() const { return rx_.header().producer_cpu.load(std::memory_order_relaxed); }

  // ----- reading the peer's pool (any thread)
  // Takes a hold; Fault::stale when the claim has ended. The lease ends it.
  std::shared_ptr<Lease> hold(ClaimId id, std::vector<Extent> extents);
  void acknowledge(ClaimId id);
  void add_segment(uint32_t id, Fd fd);
  void no_segment(uint32_t id);
  void forget_segment(uint32_t id);
  bool refused_segment(uint32_t id);
  const Board& board() const { return control_->board; }
  uint32_t holds_count();

  // ----- as the owner
  HoldsOfReader& holds_of_peer() { return holds_of_peer_; }
  // Sends a segment's descriptor once, ahead of the first handle that needs it: it then outlives us.
  // False: there is no such segment.
  bool announce(Arena& arena, uint32_t segment);

  void keep_pidfd(Fd pidfd) { pidfd_ = std::move(pidfd); }
  int pidfd() const { return pidfd_.get(); }
  int socket() const { return parts_.socket.get(); }
  bool note(NoteKind kind, uint64_t a = 0, uint64_t b = 0) { return send_note(socket(), kind, a, b); }
  void ring_peer();
  bool up() const { return up_.load(std::memory_order_acquire); }
  void set_up(bool up) { up_.store(up, std::memory_order_release); }
  bool gone() const { return gone_.load(std::memory_order_acquire); }
  void set_gone() { up_ = false, gone_ = true; }
  // No new holds are meant to come: tells the peer, by the end of our side of the socket, once none is left.
  void finish();

 private:
  friend class Lease;
  char* reserve(uint64_t n);
  void end_hold(uint32_t entry);
  void tell_owner();

  Parts parts_;
  Fd pidfd_;
  std::shared_ptr<Outbound> outbound_;
  Ring tx_, rx_;
  HoldsOfReader holds_of_peer_;
  HoldsOfMine holds_;
  Doorbell* doorbell_;
  const Control* control_;
  Segments segments_;
  uint64_t sent_ = 0;            // bytes of frames; under outbound_->mutex
  uint64_t kicked_at_ = ~uint64_t{0};  // where the ring's read index stood at our last kick; under outbound_->mutex
  uint64_t received_ = 0;        // the same of the peer's; its poll() is serialised
  std::atomic<uint64_t> taken_{0};  // what credit() was told: the shared counter can be written by the peer
  std::mutex hold_mutex_;        // holds_, refused_
  std::vector<uint32_t> refused_;
  std::mutex announce_mutex_;
  std::unordered_set<uint32_t> announced_;
  std::atomic<bool> up_{true}, gone_{false}, finishing_{false};
  std::atomic<uint32_t> leases_{0};
};

// A hold and the memory it keeps readable. The last view that drops it ends it: on any thread, without the GIL, after
// the endpoint was closed, at interpreter exit; in a forked child it does nothing, since the hold is the parent's.
class Lease {
 public:
  Lease(std::shared_ptr<Connection> connection, std::vector<Extent> extents, uint32_t entry);
  ~Lease();
  Lease(const Lease&) = delete;

  size_t size() const { return extents_.size(); }
  const Extent& extent(size_t i) const { return extents_[i]; }
  bool ready();  // all segments are known here
  uint32_t missing() const { return missing_; }
  const char* shared(size_t i);
  char* writable(size_t i);  // copy-on-write, this lease's own

 private:
  std::shared_ptr<Connection> connection_;
  std::vector<Extent> extents_;
  std::vector<uint32_t> used_;
  std::vector<Lent> lent_;
  std::mutex mutex_;
  uint32_t entry_;
  uint32_t missing_ = 0;
  pid_t pid_;
};

}  // namespace tl
