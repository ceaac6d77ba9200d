// A connection between two processes of a host, through shared memory, and the views that its reader holds.
//
// Each side makes one segment for the other: the ring of its messages and the table of the other's holds. Over the
// socket it also gets the other's doorbell, and, read-only, its control segment: generations and board.
#pragma once
#include <unordered_set>
#include <vector>

#include "connection.h"
#include "doorbell.h"
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

class Lease;

class ShmConnection : public Connection {
 public:
  struct Parts {  // what the two sides exchange
    Fd socket, my_half_fd;
    Map my_half, their_half, their_doorbell, their_control;
  };
  ShmConnection(uint64_t serial, Identity peer, int pid, Parts parts, std::shared_ptr<Outbound> outbound);
  std::shared_ptr<ShmConnection> shared() { return std::static_pointer_cast<ShmConnection>(shared_from_this()); }

  bool try_send(const Outgoing& message) override;
  bool announce(Arena& arena, uint32_t segment) override;
  void receive(const Intake& intake) override;
  void credit(uint64_t frame_size) override;
  int producer_cpu() const override { return rx_.header().producer_cpu.load(std::memory_order_relaxed); }
  bool notice(const std::string& name, Notice& notice) const override;
  void published(const std::string&, const Notice&) override { ring_peer(); }  // it is on our board already
  void acknowledge(const Descriptor& descriptor) override;
  uint32_t holds_count() override;
  void visit_holds(const std::function<void(ClaimId)>& visit) override { holds_of_peer_.scan(visit); }
  void want_news(bool wanted) override { holds_of_peer_.want_news(wanted); }
  void drain_acks(const std::function<void(ClaimId)>& visit) override { holds_of_peer_.drain_acks(visit); }
  int socket() const override { return parts_.socket.get(); }
  void distrust() override;
  void say_goodbye(bool whole) override { note(NoteKind::bye, whole ? kNoMoreWrites : 0); }
  void forget_segment(uint32_t id) override { note(NoteKind::forget, id); }  // one of ours
  void finish() override;

  // ----- reading the peer's pool (any thread)
  // Takes a hold; Fault::stale when the claim has ended. The lease ends it.
  std::shared_ptr<Lease> hold(ClaimId id, std::vector<Extent> extents);
  void add_segment(uint32_t id, Fd fd);
  void no_segment(uint32_t id);
  void drop_segment(uint32_t id) { segments_.forget(id); }
  bool refused_segment(uint32_t id);

  void keep_pidfd(Fd pidfd) { pidfd_ = std::move(pidfd); }
  bool note(NoteKind kind, uint64_t a = 0, uint64_t b = 0) { return send_note(socket(), kind, a, b); }

 private:
  friend class Lease;
  char* reserve(uint64_t n);
  void account(uint64_t frame_size);
  void pop(uint64_t n);
  void ring_peer();
  void end_hold(uint32_t entry);
  void tell_owner();

  Parts parts_;
  Fd pidfd_;
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
  std::atomic<bool> finishing_{false};
  std::atomic<uint32_t> leases_{0};
};

// A hold and the memory it keeps readable. The last view that drops it ends it: on any thread, without the GIL, after
// the endpoint was closed, at interpreter exit; in a forked child it does nothing, since the hold is the parent's.
class Lease {
 public:
  Lease(std::shared_ptr<ShmConnection> connection, std::vector<Extent> extents, uint32_t entry);
  ~Lease();
  Lease(const Lease&) = delete;

  size_t size() const { return extents_.size(); }
  const Extent& extent(size_t i) const { return extents_[i]; }
  bool ready();  // all segments are known here
  uint32_t missing() const { return missing_; }
  const char* shared(size_t i);
  char* writable(size_t i);  // copy-on-write, this lease's own

 private:
  std::shared_ptr<ShmConnection> connection_;
  std::vector<Extent> extents_;
  std::vector<uint32_t> used_;
  std::vector<Lent> lent_;
  std::mutex mutex_;
  uint32_t entry_;
  uint32_t missing_ = 0;
  pid_t pid_;
};

}  // namespace tl
