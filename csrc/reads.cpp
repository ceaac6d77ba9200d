#include "reads.h"

#include <algorithm>

#include "crc32c.h"
#include "doorbell.h"

namespace tl {

namespace {

constexpr uint64_t kSlice = 1u << 20;  // between two looks at the stop flag and the clock
constexpr size_t kMaxParts = 1024;     // of one recvmsg
constexpr size_t kMaxIdle = 4;

// The next bytes of a list of sinks, as recvmsg wants them.
class Cursor {
 public:
  Cursor(const std::vector<Sink>& sinks, uint64_t skip) : sinks_(sinks) { advance(skip); }

  size_t parts(iovec* parts, char* nowhere, size_t nowhere_size) const {
    size_t count = 0;
    uint64_t total = 0;
    uint64_t offset = offset_;
    for (size_t i = at_; i < sinks_.size() && count < kMaxParts && total < kSlice; ++i, offset = 0) {
      uint64_t n = std::min(sinks_[i].nbytes - offset, kSlice - total);
      if (!sinks_[i].to) n = std::min<uint64_t>(n, nowhere_size);
      parts[count++] = {sinks_[i].to ? sinks_[i].to + offset : nowhere, n};
      total += n;
      if (n < sinks_[i].nbytes - offset) break;
    }
    return count;
  }
  void advance(uint64_t n) {
    while (at_ < sinks_.size()) {
      uint64_t left = sinks_[at_].nbytes - offset_;
      if (n < left) {
        offset_ += n;
        return;
      }
      n -= left, offset_ = 0, ++at_;
    }
  }

 private:
  const std::vector<Sink>& sinks_;
  size_t at_ = 0;
  uint64_t offset_ = 0;
};

std::string encode(ReadRequest request, const std::vector<Extent>& extents) {
  std::string words;
  for (const Extent& extent : extents) {
    uint64_t three[3] = {extent.segment, extent.offset, extent.nbytes};
    words.append(reinterpret_cast<const char*>(three), sizeof three);
  }
  request.count = static_cast<uint16_t>(extents.size());
  request.crc = checksum(request, words.data());
  return std::string(reinterpret_cast<const char*>(&request), sizeof request) + words;
}

}  // namespace

uint32_t checksum(ReadRequest request, const char* extents) {
  request.crc = 0;
  return crc32c(crc32c(0, &request, sizeof request), extents, request.count * 24);
}

uint32_t checksum(ReadReply reply) {
  reply.crc = 0;
  return crc32c(0, &reply, sizeof reply);
}

Reads::Reads(Contact contact, Greeting greeting, Counters& counters, const Outbound& outbound)
    : contact_(std::move(contact)), greeting_([&] {
        greeting.role = Role::reads;
        return std::move(greeting);
      }()),
      counters_(counters),
      outbound_(outbound) {}

void Reads::read(const Descriptor& claim, const std::vector<Extent>& extents, const std::vector<Sink>& sinks, const Patience& waiter) {
  Patience patience = waiter;
  patience.look = [&] {
    check(waiter);
    if (waiter.look) waiter.look();
  };
  ReadRequest request{ReadRequest::kMagic, ReadRequest::read, 0, claim.claim, claim.key, 0, 0, 0, 0};
  uint64_t done = 0;
  for (int failures = 0;;) {
    check(patience);
    StreamPtr stream;
    const uint64_t before = done;
    bool fresh = true;
    try {
      stream = open(patience);
      fresh = !stream->used;
      attempt(*stream, request, extents, sinks, done, patience);
      give_back(std::move(stream));
      counters_.bytes_read.fetch_add(done, std::memory_order_relaxed);
      return;
    } catch (const Error& error) {
      if (stream) give_up(*stream);
      check(patience);
      if (error.fault != Fault::lost) throw;
      if (!stream && error.code == ECONNREFUSED) throw Error(Fault::lost, greeting_.to.name + " has gone: " + error.what());
      if (done > before) failures = 0;
      if (fresh && ++failures > kRetries) throw Error(Fault::transport, "the path broke " + std::to_string(failures) + " times in a row: " + error.what());
      if (fresh || done > before) counters_.retries.fetch_add(1, std::memory_order_relaxed);  // else it had ended while it was idle
    } catch (...) {
      if (stream) give_up(*stream);
      throw;
    }
  }
}

void Reads::attempt(Stream& stream, ReadRequest request, const std::vector<Extent>& extents, const std::vector<Sink>& sinks, uint64_t& done,
                    const Patience& patience) {
  const int fd = stream.socket.get();
  Stop::Guard guard(patience.stop, fd);
  if (!flush(stream)) throw Error(Fault::lost, "the stream is full");
  request.skip = done;
  std::string text = encode(request, extents);
  send_all(fd, text.data(), text.size(), patience);
  ReadReply reply;
  receive_all(fd, &reply, sizeof reply, patience);
  if (reply.magic != ReadReply::kMagic || reply.crc != checksum(reply)) throw Error(Fault::lost, "the answer changed on its way");
  stream.unconfirmed.clear();
  if (reply.status == ReadReply::stale) throw Error(Fault::stale, "the handle was released, has expired or never existed");
  if (reply.status != ReadReply::ok) throw Error(Fault::corrupt, "a descriptor names memory outside its claim");
  uint64_t total = 0;
  for (const Sink& sink : sinks) total += sink.nbytes;
  if (reply.nbytes != total - done) throw Error(Fault::corrupt, "the peer sends another number of bytes than were asked for");
  iovec parts[kMaxParts];
  char nowhere[4096];
  for (Cursor cursor(sinks, done); done < total;) {
    if (patience.stopped()) throw Error(Fault::cancelled, "cancelled");
    if (now_ns() >= patience.deadline_ns) throw Error(Fault::timeout, "the deadline passed");
    size_t n = receive_some(fd, parts, cursor.parts(parts, nowhere, sizeof nowhere));
    if (n == 0) await_readable(fd, patience);
    cursor.advance(n);
    done += n;
  }
}

// A cancel or a close shows as the end of a stream: this tells them apart.
void Reads::check(const Patience& patience) const {
  if (patience.stopped()) throw Error(Fault::cancelled, "cancelled");
  if (closed_) throw Error(Fault::closed, "the connection was closed");
  if (outbound_.down) throw Error(Fault::lost, greeting_.to.name + " has gone");
}

Reads::StreamPtr Reads::open(const Patience& patience) {
  StreamPtr stream;
  {
    std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      stream = std::move(idle_.back());
      idle_.pop_back();
      active_.insert(stream->socket.get());
      return stream;
    }
  }
  if (contact_.at.host.empty()) throw Error(Fault::refused, greeting_.to.name + " serves no reads from other hosts");
  stream = std::make_unique<Stream>();
  try {
    stream->socket = greet(contact_, greeting_, patience).socket;
  } catch (const Error& error) {
    if (error.fault == Fault::refused && std::string_view(error.what()) == "restarted")
      throw Error(Fault::lost, greeting_.to.name + " has restarted", ECONNREFUSED);
    throw;
  }
  std::lock_guard lock(mutex_);
  active_.insert(stream->socket.get());
  if (closed_) ::shutdown(stream->socket.get(), SHUT_RDWR);
  return stream;
}

void Reads::give_back(StreamPtr stream) {
  std::lock_guard lock(mutex_);
  active_.erase(stream->socket.get());
  stream->used = true;
  if (!closed_ && idle_.size() < kMaxIdle) idle_.push_back(std::move(stream));
}

// Ends a stream: from now on nothing lands, and the owner stops sending.
void Reads::give_up(Stream& stream) {
  std::lock_guard lock(mutex_);
  active_.erase(stream.socket.get());
  ::shutdown(stream.socket.get(), SHUT_RDWR);
  acks_.insert(acks_.end(), stream.unconfirmed.begin(), stream.unconfirmed.end());
}

void Reads::acknowledge(const Descriptor& claim) {
  std::unique_lock lock(mutex_);
  acks_.push_back({ReadRequest::kMagic, ReadRequest::acknowledge, 0, claim.claim, claim.key, 0, ++token_, 0, 0});
  if (idle_.empty()) return;
  StreamPtr stream = std::move(idle_.back());
  idle_.pop_back();
  lock.unlock();
  try {
    flush(*stream);
    give_back(std::move(stream));
  } catch (const Error&) {
    give_up(*stream);
  }
}

// Sends the acknowledgements that wait; they are repeated on another stream unless something is heard on this one after
// them. False: there is no room now.
bool Reads::flush(Stream& stream) {
  std::lock_guard lock(mutex_);
  while (!acks_.empty()) {
    std::string text = encode(acks_.front(), {});
    iovec part{text.data(), text.size()};
    size_t n = send_some(stream.socket.get(), &part, 1);
    if (n == 0) return false;
    if (n < text.size()) throw Error(Fault::lost, "the stream is full");
    stream.unconfirmed.push_back(acks_.front());
    acks_.pop_front();
  }
  return true;
}

void Reads::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  idle_.clear();
  for (int fd : active_) ::shutdown(fd, SHUT_RDWR);
}

}  // namespace tl
