#include "read_server.h"

#include <sys/epoll.h>

#include <algorithm>

#include "engine.h"
#include "point.h"

namespace tl {

namespace {
constexpr uint64_t kTurn = 2u << 20;          // bytes before the next stream's turn
constexpr size_t kAnswerParts = 256;
constexpr size_t kMaxIn = 256 + 48 * 65536;   // the largest request
constexpr uint64_t kLeast = 64u << 10;        // under a rate: bytes that are worth a turn
constexpr double kBurstS = 0.02;
constexpr uint64_t kRelayFrom = 256u << 10;   // fewer bytes aren't worth another connection
}  // namespace

void ReadServer::adopt(Socket socket, const Greeting& greeting, const Digest& secret) {
  int fd = socket.get();
  Stream& stream = streams_[fd];
  stream.socket = std::move(socket);
  stream.peer = greeting.from;
  stream.contact = greeting.contact;
  stream.secret = secret;
  engine_.watch_fd(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
}

bool ReadServer::on_event(int fd, uint32_t) {
  auto it = streams_.find(fd);
  if (it == streams_.end()) return false;
  if (!it->second.ready) ready_.push_back(fd);
  it->second.ready = true;
  return true;
}

void ReadServer::avoid(const Identity& peer) {
  std::lock_guard lock(avoided_mutex_);
  avoided_.push_back(peer);
}

int64_t ReadServer::on_tick(int64_t now) {
  int64_t due = INT64_MAX;
  {
    std::lock_guard lock(avoided_mutex_);
    for (const Identity& peer : avoided_) chains_.avoid(peer);
    avoided_.clear();
  }
  ready_.insert(ready_.end(), awaiting_.begin(), awaiting_.end());
  awaiting_.clear();
  for (size_t turns = ready_.size(); turns > 0; --turns) {
    int fd = ready_.front();
    ready_.pop_front();
    auto it = streams_.find(fd);
    if (it == streams_.end()) continue;
    Stream& stream = it->second;
    uint64_t budget = allowance(stream.peer.name, now), sent = 0;
    if (!stream.busy) budget = std::max(budget, kLeast);  // its request must be heard; what it costs is owed
    Turn turn = Turn::more;
    if (budget == 0) {
      due = std::min(due, now + static_cast<int64_t>(1e9 * kLeast / static_cast<double>(limit_.load())));
    } else {
      turn = serve(stream, budget, sent);
      if (limit_) buckets_[stream.peer.name].bytes -= static_cast<double>(sent);
      if (turn == Turn::more) due = now;
    }
    if (turn == Turn::ended) {
      drop(fd);
    } else if (turn == Turn::more) {
      ready_.push_back(fd);
    } else if (turn == Turn::awaiting) {
      awaiting_.push_back(fd);  // whoever fills it nudges this thread
    } else {
      stream.ready = false;
    }
  }
  return due;
}

// Bytes that may go to a peer now; 0: too few to be worth it yet.
uint64_t ReadServer::allowance(const std::string& peer, int64_t now) {
  uint64_t limit = limit_;
  if (!limit) return kTurn;
  Bucket& bucket = buckets_[peer];
  double rate = static_cast<double>(limit), most = std::max(rate * kBurstS, static_cast<double>(2 * kLeast));
  if (bucket.since == 0) bucket = {most, now};
  bucket.bytes = std::min(most, bucket.bytes + rate * static_cast<double>(now - bucket.since) / 1e9);
  bucket.since = now;
  return bucket.bytes < kLeast ? 0 : std::min<uint64_t>(kTurn, static_cast<uint64_t>(bucket.bytes));
}

ReadServer::Turn ReadServer::serve(Stream& stream, uint64_t budget, uint64_t& sent) {
  try {
    while (sent < budget) {
      if (!stream.busy && !take_request(stream)) {
        char bytes[16384];
        size_t n = receive_some(stream.socket, bytes, sizeof bytes);
        if (n == 0) return Turn::idle;
        if (stream.in.size() + n > kMaxIn) return Turn::ended;
        stream.in.append(bytes, n);
        continue;
      }
      if (!stream.busy) continue;  // that was an acknowledgement
      iovec parts[kAnswerParts];
      uint64_t total = 0;
      size_t count = next_parts(stream, budget - sent, parts, total);
      if (count == 0) return stream.filling->failed ? Turn::ended : Turn::awaiting;
      size_t n = send_some(stream.socket, parts, count);
      if (n == 0 && total > 0) return Turn::blocked;
      sent += n;
      point("served", "part");
      sent_.fetch_add(n, std::memory_order_relaxed);
      if (stream.operation) {
        uint64_t head = stream.at == 0 ? std::min<uint64_t>(n, stream.head.size() - stream.offset) : 0;
        stream.operation->moved(stream.taken += n - head, now_ns());
      }
      for (stream.offset += n; stream.at <= stream.spans.size(); ++stream.at) {
        uint64_t size = stream.at == 0 ? stream.head.size() : stream.spans[stream.at - 1].nbytes;
        if (stream.offset < size) break;
        stream.offset -= size;
      }
      if (stream.at > stream.spans.size()) done(stream);
    }
    return Turn::more;
  } catch (const Error&) {
    return Turn::ended;
  }
}

// The next bytes of the answer, `most` of them, or as many as are there. None: the rest is still being filled.
size_t ReadServer::next_parts(Stream& stream, uint64_t most, iovec* parts, uint64_t& total) {
  size_t count = 0;
  uint64_t offset = stream.offset;
  for (size_t i = stream.at; i <= stream.spans.size() && count < kAnswerParts && total < most; ++i, offset = 0) {
    Span span = i == 0 ? Span{stream.head.data(), stream.head.size(), 0} : stream.spans[i - 1];
    uint64_t there = span.nbytes;
    if (i > 0 && stream.filling && span.nbytes) {
      uint64_t valid = stream.filling->look(span.at + offset);
      there = valid > span.at + offset ? std::min(there, valid - span.at) : offset;
    }
    uint64_t size = std::min(there - offset, most - total);
    if (size == 0 && offset < span.nbytes) break;
    parts[count++] = {const_cast<char*>(span.data + offset), size};
    total += size;
    if (offset + size < span.nbytes) break;
  }
  return count;
}

// The next request, if all of it is here. Throws Fault::corrupt.
bool ReadServer::take_request(Stream& stream) {
  ReadRequest request;
  std::string text;
  if (!tl::take_request(stream.in, request, text)) return false;
  if (request.kind == ReadRequest::read || request.kind == ReadRequest::pull) {
    answer(stream, request, text);
  } else if (request.kind == ReadRequest::acknowledge) {
    engine_.acknowledged(request.claim, request.key, stream.peer, request.token);
  } else {
    throw Error(Fault::corrupt, "a request of an unknown kind");
  }
  return true;
}

void ReadServer::answer(Stream& stream, const ReadRequest& request, std::string_view text) {
  ReadReply reply{ReadReply::kMagic, ReadReply::ok, 0, 0, 0, 0};
  std::string body;
  try {
    std::vector<Extent> extents = read_extents(text.data(), request.count);
    engine_.claims().lend(request.claim, request.key, extents, stream.spans, stream.blocks, stream.filling);
    for (const Span& span : stream.spans) reply.nbytes += span.nbytes;
    if (request.skip > reply.nbytes) throw Error(Fault::corrupt, "more is to be skipped than there is");
    reply.nbytes -= request.skip;
    if (request.kind == ReadRequest::pull && reply.nbytes >= kRelayFrom) body = redirect(stream, request, text.substr(request.count * kExtentSize));
    uint64_t skip = request.skip;
    for (Span& span : stream.spans) {
      uint64_t n = std::min(skip, span.nbytes);
      span = {span.data + n, span.nbytes - n, span.at + n};
      skip -= n;
    }
  } catch (const Error& error) {
    stream.spans.clear();
    stream.blocks.clear();
    reply.status = error.fault == Fault::stale ? ReadReply::stale : ReadReply::corrupt;
    reply.nbytes = 0;
  }
  if (!body.empty()) {
    stream.spans.clear();
    stream.blocks.clear();
    stream.filling.reset();
    reply.status = ReadReply::redirect;
    reply.nbytes = body.size();
  }
  reply.crc = checksum(reply);
  stream.head.assign(reinterpret_cast<const char*>(&reply), sizeof reply);
  stream.head += body;
  stream.at = 0, stream.offset = 0, stream.busy = true;
  if (body.empty() && reply.nbytes >= Flight::kLarge) {
    Doing doing{"serve", "taking", stream.peer.name, stream.peer.incarnation, "tcp", {}, request.skip + reply.nbytes};
    stream.operation = std::make_unique<Operation>(engine_.flight(), doing);
    stream.taken = request.skip;
  }
  ++lent_;
  std::lock_guard lock(borrowers_mutex_);
  borrowers_[stream.socket.get()] = {stream.peer.name, reply.nbytes};
}

// Where else a reader is to read; empty: here.
std::string ReadServer::redirect(Stream& stream, const ReadRequest& request, std::string_view text) {
  uint64_t failed = 0;
  Hop reader{0, stream.peer, stream.contact, parse_offer(request, text, stream.secret, failed)};
  chains_.sweep([&](ClaimId id) { return engine_.claims().stands(id); });
  size_t depth = 0;
  const Hop* hop = chains_.source(request.claim, std::move(reader), failed, depth);
  if (!hop) return {};
  return encode({hop->id, depth, hop->peer, hop->contact, hop->relay}, stream.secret);
}

void ReadServer::done(Stream& stream) {
  if (!stream.busy) return;
  stream.busy = false;
  if (stream.operation) stream.operation->end(stream.at > stream.spans.size() ? "" : "broke");
  stream.operation.reset();
  stream.spans.clear();
  stream.blocks.clear();
  stream.filling.reset();
  {
    std::lock_guard lock(borrowers_mutex_);
    borrowers_.erase(stream.socket.get());
  }
  --lent_;
  engine_.made_room();
}

void ReadServer::drop(int fd) {
  auto it = streams_.find(fd);
  done(it->second);
  engine_.unwatch_fd(fd);
  streams_.erase(it);
}

void ReadServer::close() {
  while (!streams_.empty()) drop(streams_.begin()->first);
  ready_.clear();
}

std::map<std::string, std::pair<uint64_t, uint64_t>> ReadServer::borrowers() {
  std::map<std::string, std::pair<uint64_t, uint64_t>> result;
  std::lock_guard lock(borrowers_mutex_);
  for (auto& [fd, who] : borrowers_) {
    auto& [count, nbytes] = result[who.first];
    ++count, nbytes += who.second;
  }
  return result;
}

}  // namespace tl
