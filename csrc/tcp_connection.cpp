#include "tcp_connection.h"

#include <sys/epoll.h>

#include <algorithm>

#include "engine.h"
#include "point.h"

namespace tl {

namespace {
constexpr size_t kMaxWritten = 256;              // records that wait for a peer which doesn't read
constexpr uint64_t kReportBytes = 512u << 10, kReportMessages = 64;
constexpr uint64_t kReceiveBudget = 1u << 20;    // a peer that writes as fast as we read must not keep us from the others
constexpr size_t kSendParts = 64;
}  // namespace

TcpConnection::TcpConnection(uint64_t serial, Identity peer, Parts parts, std::shared_ptr<Outbound> outbound)
    : Connection(serial, peer, 0, std::move(outbound)),
      socket_(std::move(parts.socket)),
      dialled_(parts.dialled),
      home_(std::move(parts.home)),
      reads_(std::move(parts.contact), std::move(parts.greeting), std::move(parts.tls), counters, *outbound_, std::move(parts.flight)),
      reader_(kMaxFrame + 4096) {
  if (!dialled_) return;
  std::lock_guard lock(outbound_->mutex);
  outbound_->lane = serial;
  auto& kept = outbound_->kept;
  while (!kept.empty() && kept.front().sequence <= parts.received) kept.pop_front();
  for (const Outbound::Kept& kept : outbound_->kept) sent_ += kept.record.size() - sizeof(RecordHead);
  flush_messages();
}

// ----- sending messages

bool TcpConnection::try_send(const Outgoing& message) {
  std::lock_guard lock(outbound_->mutex);
  if (!up() || outbound_->lane != serial) throw Error(Fault::lost, "the lane to " + peer.name + " has ended");
  uint64_t n = frame_size(message);
  if (sent_ - taken_by_peer_ + n > (message.payload_size ? kEagerCredit : kCredit)) return false;
  std::string record = make_record(RecordKind::message, n);
  write_frame(record.data() + sizeof(RecordHead), message, ++outbound_->last);
  seal(record);
  sent_ += n;
  outbound_->kept.push_back({outbound_->last, std::move(record)});
  if (at_ + 1 == outbound_->kept.size()) flush_messages();
  point("message", "sent");
  counters.messages_sent.fetch_add(1, std::memory_order_relaxed);
  counters.bytes_sent.fetch_add(message.payload_size, std::memory_order_relaxed);
  return true;
}

void TcpConnection::flush_messages() {
  auto& kept = outbound_->kept;
  try {
    while (at_ < kept.size()) {
      iovec parts[kSendParts];
      size_t count = 0;
      for (size_t i = at_; i < kept.size() && count < kSendParts; ++i) parts[count++] = {kept[i].record.data(), kept[i].record.size()};
      parts[0].iov_base = static_cast<char*>(parts[0].iov_base) + offset_;
      parts[0].iov_len -= offset_;
      size_t n = send_some(socket_, parts, count);
      if (n == 0) return block(true);  // on_writable() goes on
      for (offset_ += n; at_ < kept.size() && offset_ >= kept[at_].record.size(); ++at_) offset_ -= kept[at_].record.size();
    }
    block(false);
  } catch (const Error&) {  // what is kept goes over the next lane
    broke();
  }
}

bool TcpConnection::owes() const {
  std::lock_guard lock(outbound_->mutex);
  return !outbound_->kept.empty();
}

void TcpConnection::on_ack(uint64_t sequence, uint64_t taken) {
  if (outbound_->lane != serial) return;
  auto& kept = outbound_->kept;
  for (; at_ > 0 && kept.front().sequence <= sequence; --at_) kept.pop_front();  // never one that wasn't sent
  taken_by_peer_ = std::max(taken_by_peer_, std::min(taken, sent_));
}

void TcpConnection::on_writable() {
  if (dialled_) {
    std::lock_guard lock(outbound_->mutex);
    if (up() && outbound_->lane == serial) flush_messages();
  }
  std::lock_guard lock(write_mutex_);
  flush_written();
}

// ----- records beside messages

void TcpConnection::write(std::string record) {
  std::lock_guard lock(write_mutex_);
  if (written_.size() >= kMaxWritten) return broke();
  written_.push_back(std::move(record));
  if (written_.size() == 1) flush_written();
}

void TcpConnection::flush_written() {
  try {
    while (!written_.empty()) {
      std::string& record = written_.front();
      iovec part{record.data() + written_offset_, record.size() - written_offset_};
      size_t n = send_some(socket_, &part, 1);
      if (n == 0) return block(true);
      written_offset_ += n;
      if (written_offset_ < record.size()) continue;
      written_offset_ = 0;
      written_.pop_front();
    }
    if (!dialled_) block(false);
  } catch (const Error&) {
    written_.clear();
    broke();
  }
}

void TcpConnection::broke() {
  set_up(false);
  ::shutdown(socket(), SHUT_RDWR);  // the progress thread is told by the socket
}

void TcpConnection::distrust() { broke(); }

// ----- what the progress thread hears of

uint32_t TcpConnection::events() const {
  return EPOLLRDHUP | (attended_ ? static_cast<uint32_t>(EPOLLIN) : 0u) | (blocked_ ? static_cast<uint32_t>(EPOLLOUT) : 0u);
}

void TcpConnection::attend(bool on) {
  if (attended_ == on || attended_.exchange(on) == on) return;
  arm();
  if (on) return;
  home_->unattended = true;
  std::lock_guard lock(home_->mutex);
  if (home_->engine) home_->engine->nudge();  // it sees to it that this ends with the polling
}

void TcpConnection::block(bool on) {
  if (blocked_.exchange(on) != on) arm();
}

void TcpConnection::arm() {
  std::lock_guard order(arm_mutex_);
  std::lock_guard lock(home_->mutex);
  if (home_->engine) home_->engine->rewatch_fd(socket(), events());
}

void TcpConnection::ring() {
  std::lock_guard lock(home_->mutex);
  if (home_->engine) home_->engine->ring();
}

// ----- receiving

void TcpConnection::receive(const Intake& intake) {
  for (uint64_t budget = kReceiveBudget;;) {
    char* room = reader_.room();
    size_t size = reader_.room_size();
    size_t n = budget > 0 ? receive_some(socket_, room, size) : receive_held(socket_, room, size);
    if (n == 0) return;
    reader_.arrived(n);
    RecordKind kind;
    std::string_view body;
    while (reader_.next(kind, body)) on_record(kind, body, intake);
    if (n < size) return;  // most likely that was all
    budget -= std::min<uint64_t>(budget, n);
  }
}

void TcpConnection::on_record(RecordKind kind, std::string_view body, const Intake& intake) {
  uint64_t words[2] = {};
  if (kind != RecordKind::message) std::memcpy(words, body.data(), std::min(body.size(), sizeof words));
  if (kind == RecordKind::bye) {
    ended_ = true;
    peer_closed_ = words[0] != 0;
    set_up(false);
    return;
  }
  if (dialled_ && kind == RecordKind::ack) {
    {
      std::lock_guard lock(outbound_->mutex);
      on_ack(words[0], words[1]);
    }
    return ring();  // somebody may wait for credit
  }
  if (dialled_ && kind == RecordKind::notice) {
    Notice told;
    std::string name = parse_notice(body, told);
    {
      std::lock_guard lock(notice_mutex_);
      if (notices_.size() >= Board::kSlots && !notices_.count(name)) throw Error(Fault::corrupt, "a peer publishes under too many names");
      notices_[name] = std::move(told);
    }
    return ring();
  }
  if (dialled_ || kind != RecordKind::message) throw Error(Fault::corrupt, "a record of an unknown kind");
  arrived_ += body.size();
  if (arrived_ - taken_ > 2 * kCredit) throw Error(Fault::corrupt, "a peer sends more than it has credit for");
  auto message = Message::parse(body.data(), body.size());
  last_ = message->sequence;
  if (!intake(std::move(message))) credit(body.size());  // it came before: nobody will consume it
  point("message", "taken");
}

void TcpConnection::credit(uint64_t frame_size) {
  uint64_t taken = taken_ += frame_size;
  if (taken - reported_taken_ >= kReportBytes || last_ - reported_last_ >= kReportMessages) report();
}

void TcpConnection::report() {
  uint64_t taken = taken_, last = last_;
  if (dialled_ || !up() || (taken == reported_taken_ && last == reported_last_)) return;
  reported_taken_ = taken, reported_last_ = last;
  write(make_record(RecordKind::ack, {last, taken}));
}

// ----- versions

bool TcpConnection::notice(const std::string& name, Notice& notice) const {
  std::lock_guard lock(notice_mutex_);
  auto it = notices_.find(name);
  if (it == notices_.end()) return false;
  notice = it->second;
  return true;
}

void TcpConnection::published(const std::string& name, const Notice& notice) {
  if (!dialled_ && up()) write(make_record(RecordKind::notice, {notice.version, name.size()}, name + notice.descriptor));
}

// ----- the end

void TcpConnection::say_goodbye(bool whole) {
  std::lock_guard lock(outbound_->mutex);
  ended_ = true;
  if (!up() || (dialled_ && outbound_->lane == serial && at_ < outbound_->kept.size())) return;  // not in the middle of a message
  write(make_record(RecordKind::bye, {uint64_t{whole}}));
}

void TcpConnection::finish() {
  set_up(false);
  reads_.close();
  ::shutdown(socket(), SHUT_WR);
}

}  // namespace tl
