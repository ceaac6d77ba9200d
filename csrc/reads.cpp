#include "reads.h"

#include <poll.h>

#include <algorithm>

#include "crc32c.h"
#include "doorbell.h"
#include "point.h"

namespace tl {

namespace {

constexpr uint64_t kSlice = 1u << 20;  // between two looks at the stop flag and the clock
constexpr size_t kReceiveParts = 1024;     // of one recvmsg
constexpr size_t kMaxIdle = 4;
constexpr int kMaxHops = 16;
constexpr uint64_t kGather = 2u << 20;  // bytes that are worth a wake-up
constexpr int64_t kGatherNs = 5'000'000;
constexpr int64_t kStall = 1'000'000'000;
constexpr int64_t kLook = 50'000'000;  // what keeps coming must not keep a signal waiting

// The next bytes of a list of sinks, as recvmsg wants them.
class Cursor {
 public:
  Cursor(const std::vector<Sink>& sinks, uint64_t skip) : sinks_(sinks) { advance(skip); }

  size_t parts(iovec* parts, char* nowhere, size_t nowhere_size) const {
    size_t count = 0;
    uint64_t total = 0;
    uint64_t offset = offset_;
    for (size_t i = at_; i < sinks_.size() && count < kReceiveParts && total < kSlice; ++i, offset = 0) {
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

// Lets a reader sleep until there is more than the one segment that would wake it, but for no longer than kGatherNs: bytes may be slow.
class Gathering {
 public:
  explicit Gathering(int socket) : socket_(socket) {}
  ~Gathering() { mark(1); }

  // Sleeps until a part of the `left` bytes are there that is worth it, or time is up. False: for the second time in a row nothing
  // came, so whoever waits on is woken by the first byte.
  bool wait(uint64_t left) {
    waited_ = !waited_;
    mark(waited_ ? static_cast<int>(std::clamp<uint64_t>(left / 4, 1, kGather)) : 1);
    if (!waited_) return false;
    pollfd poll{socket_, POLLIN, 0};
    timespec time{0, kGatherNs};
    ::ppoll(&poll, 1, &time, nullptr);
    return true;
  }
  void got() { waited_ = false; }

 private:
  void mark(int nbytes) {
    if (nbytes != mark_) ::setsockopt(socket_, SOL_SOCKET, SO_RCVLOWAT, &nbytes, sizeof nbytes);
    mark_ = nbytes;
  }

  const int socket_;
  int mark_ = 1;
  bool waited_ = false;
};

}  // namespace

uint32_t checksum(ReadRequest request, std::string_view rest) {
  request.crc = 0;
  return crc32c(crc32c(0, &request, sizeof request), rest.data(), rest.size());
}

uint32_t checksum(ReadReply reply) {
  reply.crc = 0;
  return crc32c(0, &reply, sizeof reply);
}

std::string encode(ReadRequest request, const std::vector<Extent>& extents, const std::string& more) {
  std::string rest;
  append_extents(rest, extents);
  rest += more;
  request.count = static_cast<uint16_t>(extents.size());
  request.crc = checksum(request, rest);
  return std::string(reinterpret_cast<const char*>(&request), sizeof request) + rest;
}

bool take_request(std::string& in, ReadRequest& request, std::string& text) {
  if (in.size() < sizeof request) return false;
  std::memcpy(&request, in.data(), sizeof request);
  if (request.magic != ReadRequest::kMagic) throw Error(Fault::corrupt, "a request cannot be read");
  const size_t words_size = request.count * kExtentSize;
  size_t size = sizeof request + words_size + (request.kind == ReadRequest::pull ? sizeof(RelayOffer) + words_size : 0);
  if (in.size() < size) return false;
  text = in.substr(sizeof request, size - sizeof request);
  in.erase(0, size);
  if (request.crc != checksum(request, text)) throw Error(Fault::corrupt, "a request changed on its way");
  return true;
}

Descriptor parse_offer(const ReadRequest& request, std::string_view text, const Digest& secret, uint64_t& failed) {
  RelayOffer offer;
  std::memcpy(&offer, text.data(), sizeof offer);
  Descriptor relay;
  relay.claim = offer.claim;
  relay.key = masked(offer.masked_key, secret, offer.claim);
  relay.extents = read_extents(text.data() + sizeof offer, request.count);
  failed = offer.failed;
  return relay;
}

std::string encode(const RedirectTarget& target, const Digest& secret) {
  const std::string &name = target.peer.name, &host = target.contact.at.host;
  Redirect head{target.id, target.depth, target.claim.claim, masked(target.claim.key, secret, 2 * target.id + 1),
                masked(target.contact.key, secret, 2 * target.id), target.peer.incarnation, target.contact.at.port,
                static_cast<uint16_t>(name.size()), static_cast<uint16_t>(host.size()),
                static_cast<uint16_t>(target.claim.extents.size()), 0, 0};
  std::string body(reinterpret_cast<const char*>(&head), sizeof head);
  body += name + host;
  append_extents(body, target.claim.extents);
  head.crc = crc32c(0, body.data(), body.size());
  std::memcpy(body.data(), &head, sizeof head);
  return body;
}

RedirectTarget parse_redirect(std::string body, const Digest& secret) {
  Redirect head;
  if (body.size() < sizeof head) throw Error(Fault::corrupt, "a redirect cannot be read");
  std::memcpy(&head, body.data(), sizeof head);
  uint32_t crc = head.crc;
  head.crc = 0;
  std::memcpy(body.data(), &head, sizeof head);
  if (crc != crc32c(0, body.data(), body.size())) throw Error(Fault::lost, "the answer changed on its way");
  if (body.size() != sizeof head + head.name_size + head.host_size + head.count * kExtentSize || !head.id) throw Error(Fault::corrupt, "a redirect cannot be read");
  const char* at = body.data() + sizeof head;
  RedirectTarget target{head.id, head.depth, {std::string(at, head.name_size), head.incarnation}, {}, {}};
  target.contact = {{std::string(at + head.name_size, head.host_size), head.port}, masked(head.masked_contact_key, secret, 2 * head.id)};
  target.claim.claim = head.claim;
  target.claim.key = masked(head.masked_key, secret, 2 * head.id + 1);
  target.claim.extents = read_extents(at + head.name_size + head.host_size, head.count);
  return target;
}

void Relay::advance(uint64_t done) const {
  for (const Extent& extent : descriptor.extents) {
    if (done <= extent.nbytes) {
      if (filling->advance(extent.offset - descriptor.extents.front().offset + done)) advanced();
      return;
    }
    done -= extent.nbytes;
  }
}

void Relay::fail() const {
  filling->failed = true;
  advanced();
}

Reads::Reads(Contact contact, Greeting greeting, std::shared_ptr<const Tls> tls, Counters& counters, const Outbound& outbound, std::shared_ptr<Flight> flight)
    : contact_(std::move(contact)), greeting_([&] {
        greeting.role = Role::reads;
        return std::move(greeting);
      }()),
      tls_(std::move(tls)),
      counters_(counters),
      outbound_(outbound),
      flight_(std::move(flight)) {}

void Reads::read(const Descriptor& claim, const std::vector<Extent>& extents, const std::vector<Sink>& sinks, const Patience& waiter,
                 const Relay* relay) {
  Patience patience = waiter;
  patience.look = [&] {
    check(waiter);
    if (waiter.look) waiter.look();
  };
  const ReadRequest request{ReadRequest::kMagic, relay ? ReadRequest::pull : ReadRequest::read, 0, claim.claim, claim.key, 0, 0, 0, 0};
  Activity activity(flight_);
  Work work{sinks, relay, activity};
  for (const Sink& sink : sinks) work.total += sink.nbytes;
  Doing beginning = doing("stream");
  beginning.total = work.total;
  activity.begin(beginning);
  uint64_t failed = 0;
  for (int failures = 0, hops = 0;;) {
    check(patience);
    StreamPtr stream;
    const uint64_t before = work.done;
    bool fresh = true;
    try {
      stream = open(patience);
      fresh = !stream->used;
      Target target;
      attempt(*stream, request, extents, work, failed, target, patience);
      give_back(std::move(stream));
      if (!target.id || follow(target, work, patience)) {
        counters_.bytes_read.fetch_add(work.done, std::memory_order_relaxed);
        return;
      }
      failed = target.id;
      if (++hops > kMaxHops) throw Error(Fault::transport, "no other reader passes it on");
    } catch (const Error& error) {
      if (stream) give_up(*stream);
      check(patience);
      if (error.fault != Fault::lost) throw;
      if (!stream && error.code == ECONNREFUSED) throw Error(Fault::lost, greeting_.to.name + " has gone: " + error.what());
      if (work.done > before) failures = 0;
      if (fresh && ++failures > kRetries) throw Error(Fault::transport, "the path broke " + std::to_string(failures) + " times in a row: " + error.what());
      if (fresh || work.done > before) {  // else it had ended while it was idle
        counters_.retries.fetch_add(1, std::memory_order_relaxed);
        retried(error.what());
      }
      activity->change(doing("stream"));
    } catch (...) {
      if (stream) give_up(*stream);
      throw;
    }
  }
}

// The rest of a read from another reader. False: it failed, and the owner must say what else to do.
bool Reads::follow(const Target& target, Work& work, const Patience& waiter) {
  Greeting greeting = greeting_;
  greeting.to = target.peer;
  Reads hop(target.contact, greeting, tls_, counters_, outbound_, flight_);
  work.activity->change(hop.doing("stream"));
  Patience patience = waiter;  // whoever stands nearer to the fault notices it first
  patience.stall_ns = kStall + static_cast<int64_t>(target.depth) * kStall / 2;
  patience.deadline_ns = std::min(waiter.deadline_ns, now_ns() + kStall);
  StreamPtr stream;
  try {
    stream = hop.open(patience);
    patience.deadline_ns = waiter.deadline_ns;
    ReadRequest request{ReadRequest::kMagic, ReadRequest::read, 0, target.claim.claim, target.claim.key, 0, 0, 0, 0};
    Target no_further;
    hop.attempt(*stream, request, target.claim.extents, work, 0, no_further, patience);
    if (no_further.id == 0) return true;
  } catch (const Error& error) {
    check(waiter);
    if (now_ns() >= waiter.deadline_ns) throw Error(Fault::timeout, "the deadline passed");
    if (error.fault != Fault::stale) {  // else it has a newer version by now
      counters_.retries.fetch_add(1, std::memory_order_relaxed);
      hop.retried(error.what());
    }
  }
  if (stream) hop.give_up(*stream);
  return false;
}

void Reads::attempt(Stream& stream, ReadRequest request, const std::vector<Extent>& extents, Work& work, uint64_t failed, Target& target,
                    const Patience& patience) {
  Stop::Guard guard(patience.stop, stream.socket.get());
  if (!flush(stream)) throw Error(Fault::lost, "the stream is full");
  request.skip = work.done;
  std::string more;
  if (request.kind == ReadRequest::pull) {
    const Descriptor& own = work.relay->descriptor;
    RelayOffer offer{own.claim, masked(own.key, stream.secret, own.claim), failed};
    more.assign(reinterpret_cast<const char*>(&offer), sizeof offer);
    append_extents(more, own.extents);
  }
  std::string text = encode(request, extents, more);
  send_all(stream.socket, text.data(), text.size(), patience);
  work.activity->change(doing("answer"));
  ReadReply reply;
  receive_all(stream.socket, &reply, sizeof reply, patience);
  if (reply.magic != ReadReply::kMagic || reply.crc != checksum(reply)) throw Error(Fault::lost, "the answer changed on its way");
  stream.unconfirmed.clear();
  if (reply.status == ReadReply::stale) throw Error(Fault::stale, "the handle was released, has expired or never existed");
  if (reply.status == ReadReply::redirect) {
    target = receive_redirect(stream, reply.nbytes, patience);
    return;
  }
  if (reply.status != ReadReply::ok) throw Error(Fault::corrupt, "a descriptor names memory outside its claim");
  if (reply.nbytes != work.total - work.done) throw Error(Fault::corrupt, "the peer sends another number of bytes than were asked for");
  work.activity->change(doing("bytes"));
  receive(stream, work, patience);
}

void Reads::receive(Stream& stream, Work& work, const Patience& patience) {
  iovec parts[kReceiveParts];
  char nowhere[4096];
  Gathering gathering(stream.socket.get());
  int64_t looked = now_ns();
  for (Cursor cursor(work.sinks, work.done); work.done < work.total;) {
    if (patience.stopped()) throw Error(Fault::cancelled, "cancelled");
    int64_t now = now_ns();
    if (now >= patience.deadline_ns) throw Error(Fault::timeout, "the deadline passed");
    if (now - looked >= kLook && patience.look) looked = now, patience.look();
    size_t n = receive_some(stream.socket, parts, cursor.parts(parts, nowhere, sizeof nowhere));
    if (n == 0) {
      if (gathering.wait(work.relay ? 1 : work.total - work.done)) continue;  // a relay passes on at once what there is
      Patience wait = patience;
      if (patience.stall_ns) wait.deadline_ns = std::min(patience.deadline_ns, now + patience.stall_ns);
      await_readable(stream.socket, wait);
      continue;
    }
    gathering.got();
    cursor.advance(n);
    work.done += n;
    point("read", "part");
    work.activity->moved(work.done, now);
    if (work.relay) work.relay->advance(work.done);
  }
}

Reads::Target Reads::receive_redirect(Stream& stream, uint64_t nbytes, const Patience& patience) {
  constexpr uint64_t kMost = sizeof(Redirect) + 2 * 65536 + 24 * 65536;
  if (nbytes < sizeof(Redirect) || nbytes > kMost) throw Error(Fault::corrupt, "a redirect of an impossible size");
  std::string body(nbytes, '\0');
  receive_all(stream.socket, body.data(), body.size(), patience);
  return parse_redirect(std::move(body), stream.secret);
}

void Reads::retried(const std::string& why) const {
  Doing event = doing("");
  event.note = why;
  flight_->note(event, "retry", true);
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
    Session session = greet(contact_, greeting_, tls_.get(), patience);
    stream->socket = std::move(session.socket);
    stream->secret = session.secret;
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
  point("read", "acknowledge");
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
    size_t n = send_some(stream.socket, &part, 1);
    const TlsSession* tls = stream.socket.tls();
    if (n == 0 && !(tls && tls->stuck())) return false;
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
