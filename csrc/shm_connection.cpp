#include "shm_connection.h"

#include <algorithm>

#include "descriptor.h"
#include "point.h"

namespace tl {

ShmConnection::ShmConnection(uint64_t serial, Identity peer, int pid, Parts parts, std::shared_ptr<Outbound> outbound)
    : Connection(serial, std::move(peer), pid, std::move(outbound)),
      parts_(std::move(parts)),
      tx_(reinterpret_cast<Half*>(parts_.my_half.data())->ring, Half::kRing),
      rx_(reinterpret_cast<Half*>(parts_.their_half.data())->ring, Half::kRing),
      holds_of_peer_(&reinterpret_cast<Half*>(parts_.my_half.data())->holds),
      holds_(&reinterpret_cast<Half*>(parts_.their_half.data())->holds),
      doorbell_(reinterpret_cast<Doorbell*>(parts_.their_doorbell.data())),
      control_(reinterpret_cast<const Control*>(parts_.their_control.data())) {}

bool ShmConnection::try_send(const Outgoing& message) {
  std::lock_guard lock(outbound_->mutex);
  if (!up()) throw Error(Fault::lost, peer.name + " has gone");
  RingHeader& header = tx_.header();
  uint64_t n = frame_size(message);
  char* frame = nullptr;
  bool credit = false;
  for (bool last = false;; last = true) {
    uint64_t pending = sent_ - header.credited.load(std::memory_order_acquire);
    credit = pending + n <= (message.payload_size ? kEagerCredit : kCredit);
    if (credit) frame = reserve(n);
    if (frame || last) break;
    header.starved.store(1, std::memory_order_seq_cst);  // then look once more: the peer may just have made room
  }
  if (!frame) {
    // The peer may be busy elsewhere: its progress thread takes the messages out of the ring. Asking once is enough
    // until it has taken some, and asking for credit is vain: only the peer's application gives that.
    uint64_t head = header.head.load(std::memory_order_relaxed);
    if (credit && head != kicked_at_ && note(NoteKind::kick)) kicked_at_ = head;
    return false;
  }
  write_frame(frame, message, ++outbound_->last);
  sent_ += n;
  header.producer_cpu.store(::sched_getcpu(), std::memory_order_relaxed);
  tx_.publish();
  point("message", "sent");
  ring_peer();
  counters.messages_sent.fetch_add(1, std::memory_order_relaxed);
  counters.bytes_sent.fetch_add(message.payload_size, std::memory_order_relaxed);
  return true;
}

char* ShmConnection::reserve(uint64_t n) {
  try {
    return tx_.reserve(n);
  } catch (const Error&) {
    distrust();
    throw Error(Fault::lost, peer.name + " wrote nonsense, so its connection was ended");
  }
}

void ShmConnection::distrust() {
  set_up(false);
  ::shutdown(socket(), SHUT_RDWR);
}

void ShmConnection::ring_peer() {
  doorbell_->ring();
  if (doorbell_->watched.load(std::memory_order_relaxed)) note(NoteKind::kick);
}

void ShmConnection::pop(uint64_t n) {
  rx_.pop(n);
  if (rx_.header().starved.exchange(0, std::memory_order_seq_cst)) ring_peer();
}

void ShmConnection::receive(const Intake& intake) {
  uint64_t n;
  // At most what the ring can hold: a peer that writes as fast as we read must not keep us from the others.
  for (uint64_t left = Half::kRing; left > 0; left -= std::min(left, Ring::padded(n))) {
    const char* frame = rx_.front(n);
    if (!frame) return;
    account(n);
    if (!intake(Message::parse(frame, n))) credit(n);  // it came before: nobody will consume it
    point("message", "taken");
    pop(n);
  }
}

// Counts a frame that has arrived. Throws Fault::corrupt when the peer has overdrawn its credit.
void ShmConnection::account(uint64_t frame_size) {
  uint64_t taken = taken_.load(std::memory_order_relaxed);
  received_ += frame_size;
  if (received_ - taken > kCredit) throw Error(Fault::corrupt, "a peer sends more than it has credit for");
}

bool ShmConnection::notice(const std::string& name, Notice& notice) const {
  const BoardSlot* slot = control_->board.find(name);
  for (int i = 0; slot && i < 1000; ++i)
    if (slot->read(notice)) return true;
  return false;
}

void ShmConnection::credit(uint64_t frame_size) {
  RingHeader& header = rx_.header();
  taken_.fetch_add(frame_size, std::memory_order_relaxed);
  header.credited.fetch_add(frame_size, std::memory_order_seq_cst);
  if (header.starved.load(std::memory_order_seq_cst) && header.starved.exchange(0, std::memory_order_seq_cst)) ring_peer();
}

std::shared_ptr<Lease> ShmConnection::hold(ClaimId id, std::vector<Extent> extents) {
  uint32_t entry;
  bool stale;
  {
    std::lock_guard lock(hold_mutex_);
    entry = holds_.take(id, control_->generations, stale);
  }
  if (entry == HoldsOfMine::kNone) {
    if (stale) throw Error(Fault::stale, "the handle was released, has expired or never existed");
    throw Error(Fault::no_room, "this process holds " + std::to_string(HoldTableHeader::kEntries) + " views of " + peer.name + ", the most it can");
  }
  auto lease = std::make_shared<Lease>(shared(), std::move(extents), entry);
  point("hold", "taken");
  // finish() looks in the other order: it sees this lease, or we see that the owner no longer looks at our holds.
  if (finishing_.load(std::memory_order_seq_cst)) throw Error(Fault::lost, "the connection to " + peer.name + " has been closed");
  return lease;
}

void ShmConnection::end_hold(uint32_t entry) {
  {
    std::lock_guard lock(hold_mutex_);
    holds_.clear(entry);
  }
  tell_owner();
}

void ShmConnection::acknowledge(const Descriptor& descriptor) {
  point("read", "acknowledge");
  bool room;
  {
    std::lock_guard lock(hold_mutex_);
    room = holds_.acknowledge(descriptor.claim);
  }
  if (!room) note(NoteKind::ack, descriptor.claim);
  if (descriptor.counted == Descriptor::tell) note(NoteKind::kick);
  tell_owner();
}

void ShmConnection::tell_owner() {
  if (!holds_.owner_waits()) return;
  doorbell_->ring();
  note(NoteKind::kick);
}

uint32_t ShmConnection::holds_count() {
  std::lock_guard lock(hold_mutex_);
  return holds_.count();
}

void ShmConnection::add_segment(uint32_t id, Fd fd) {
  uint64_t nbytes = sealed_size(fd.get());
  segments_.add(id, std::move(fd), nbytes);
}

void ShmConnection::no_segment(uint32_t id) {
  constexpr size_t kMostRefused = 1024;  // each answers a question of ours, and few are open at a time
  std::lock_guard lock(hold_mutex_);
  if (refused_.size() >= kMostRefused) throw Error(Fault::corrupt, "a peer refuses segments that nobody asked for");
  refused_.push_back(id);
}

bool ShmConnection::refused_segment(uint32_t id) {
  std::lock_guard lock(hold_mutex_);
  auto it = std::find(refused_.begin(), refused_.end(), id);
  if (it == refused_.end()) return false;
  refused_.erase(it);
  return true;
}

bool ShmConnection::announce(Arena& arena, uint32_t segment) {
  std::lock_guard lock(announce_mutex_);
  if (announced_.count(segment)) return true;
  uint64_t nbytes = 0;
  Fd fd = arena.share(segment, nbytes);
  if (!fd) return false;
  if (send_note(socket(), NoteKind::segment, segment, nbytes, {}, {fd.get()})) announced_.insert(segment);
  return true;
}

void ShmConnection::finish() {
  finishing_.store(true, std::memory_order_seq_cst);
  if (leases_.load(std::memory_order_seq_cst) == 0) ::shutdown(socket(), SHUT_WR);
}

Lease::Lease(std::shared_ptr<ShmConnection> connection, std::vector<Extent> extents, uint32_t entry)
    : connection_(std::move(connection)), extents_(std::move(extents)), entry_(entry), pid_(::getpid()) {
  connection_->leases_.fetch_add(1, std::memory_order_seq_cst);
}

bool Lease::ready() {
  while (used_.size() < extents_.size()) {
    uint32_t id = extents_[used_.size()].segment;
    if (!connection_->segments_.use(id)) {
      missing_ = id;
      return false;
    }
    used_.push_back(id);
  }
  return true;
}

const char* Lease::shared(size_t i) { return connection_->segments_.shared(extents_[i]); }

char* Lease::writable(size_t i) {
  std::lock_guard lock(mutex_);
  lent_.resize(extents_.size(), Lent{{}, 0, nullptr});
  if (!lent_[i].data) lent_[i] = connection_->segments_.lend(extents_[i]);
  return lent_[i].data;
}

Lease::~Lease() {
  if (::getpid() != pid_) return;
  for (const Lent& lent : lent_)
    if (lent.data) connection_->segments_.give_back(lent);
  for (uint32_t id : used_) connection_->segments_.unuse(id);
  connection_->end_hold(entry_);
  if (connection_->leases_.fetch_sub(1, std::memory_order_seq_cst) == 1 && connection_->finishing_.load(std::memory_order_seq_cst))
    connection_->finish();
}

}  // namespace tl
