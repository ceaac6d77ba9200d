#include "read_server.h"

#include <sys/epoll.h>

#include <algorithm>

#include "engine.h"

namespace tl {

namespace {
constexpr uint64_t kTurn = 2u << 20;          // bytes before the next stream's turn
constexpr size_t kMaxParts = 256;
constexpr size_t kMaxIn = 64 + 24 * 65536;    // the largest request
constexpr uint64_t kLeast = 64u << 10;        // under a rate: bytes that are worth a turn
constexpr double kBurstS = 0.02;
}  // namespace

void ReadServer::adopt(Fd socket, const Identity& peer) {
  int fd = socket.get();
  Stream& stream = streams_[fd];
  stream.socket = std::move(socket);
  stream.peer = peer;
  engine_.watch_fd(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
}

bool ReadServer::on_event(int fd, uint32_t) {
  auto it = streams_.find(fd);
  if (it == streams_.end()) return false;
  if (!it->second.ready) ready_.push_back(fd);
  it->second.ready = true;
  return true;
}

int64_t ReadServer::on_tick(int64_t now) {
  int64_t due = INT64_MAX;
  for (size_t turns = ready_.size(); turns > 0; --turns) {
    int fd = ready_.front();
    ready_.pop_front();
    auto it = streams_.find(fd);
    if (it == streams_.end()) continue;
    Stream& stream = it->second;
    uint64_t budget = stream.busy ? allowance(stream.peer.name, now) : kTurn, sent = 0;
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
  bucket.bytes = std::min(most, bucket.bytes + rate * static_cast<double>(now - bucket.since) / 1e9);
  bucket.since = now;
  return bucket.bytes < kLeast ? 0 : std::min<uint64_t>(kTurn, static_cast<uint64_t>(bucket.bytes));
}

ReadServer::Turn ReadServer::serve(Stream& stream, uint64_t budget, uint64_t& sent) {
  try {
    while (sent < budget) {
      if (!stream.busy && !take_request(stream)) {
        char bytes[16384];
        size_t n = receive_some(stream.socket.get(), bytes, sizeof bytes);
        if (n == 0) return Turn::idle;
        if (stream.in.size() + n > kMaxIn) return Turn::ended;
        stream.in.append(bytes, n);
        continue;
      }
      if (!stream.busy) continue;  // that was an acknowledgement
      iovec parts[kMaxParts];
      size_t count = 0;
      uint64_t total = 0, offset = stream.offset;
      for (size_t i = stream.at; i <= stream.spans.size() && count < kMaxParts && total < budget - sent; ++i, offset = 0) {
        const char* data = i == 0 ? stream.head.data() : stream.spans[i - 1].data;
        uint64_t size = (i == 0 ? stream.head.size() : stream.spans[i - 1].nbytes) - offset;
        size = std::min(size, budget - sent - total);
        parts[count++] = {const_cast<char*>(data + offset), size};
        total += size;
      }
      size_t n = send_some(stream.socket.get(), parts, count);
      if (n == 0 && total > 0) return Turn::blocked;
      sent += n;
      sent_.fetch_add(n, std::memory_order_relaxed);
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

// The next request, if all of it is here. Throws Fault::corrupt.
bool ReadServer::take_request(Stream& stream) {
  ReadRequest request;
  if (stream.in.size() < sizeof request) return false;
  std::memcpy(&request, stream.in.data(), sizeof request);
  if (request.magic != ReadRequest::kMagic) throw Error(Fault::corrupt, "a request cannot be read");
  size_t size = sizeof request + size_t{request.count} * 24;
  if (stream.in.size() < size) return false;
  const char* words = stream.in.data() + sizeof request;
  if (request.crc != checksum(request, words)) throw Error(Fault::corrupt, "a request changed on its way");
  std::vector<Extent> extents(request.count);
  for (Extent& extent : extents) {
    uint64_t three[3];
    std::memcpy(three, words, sizeof three);
    words += sizeof three;
    if (three[0] > UINT32_MAX) throw Error(Fault::corrupt, "a request names an impossible extent");
    extent = {static_cast<uint32_t>(three[0]), three[1], three[2]};
  }
  stream.in.erase(0, size);
  if (request.kind == ReadRequest::read) {
    answer(stream, request, extents);
  } else if (request.kind == ReadRequest::acknowledge) {
    engine_.acknowledged(request.claim, request.key, stream.peer, request.token);
  } else {
    throw Error(Fault::corrupt, "a request of an unknown kind");
  }
  return true;
}

void ReadServer::answer(Stream& stream, const ReadRequest& request, const std::vector<Extent>& extents) {
  ReadReply reply{ReadReply::kMagic, ReadReply::ok, 0, 0, 0, 0};
  try {
    engine_.claims().lend(request.claim, request.key, extents, stream.spans, stream.blocks);
    for (const Span& span : stream.spans) reply.nbytes += span.nbytes;
    if (request.skip > reply.nbytes) throw Error(Fault::corrupt, "more is to be skipped than there is");
    reply.nbytes -= request.skip;
    uint64_t skip = request.skip;
    for (Span& span : stream.spans) {
      uint64_t n = std::min(skip, span.nbytes);
      span = {span.data + n, span.nbytes - n};
      skip -= n;
    }
  } catch (const Error& error) {
    stream.spans.clear();
    stream.blocks.clear();
    reply.status = error.fault == Fault::stale ? ReadReply::stale : ReadReply::corrupt;
    reply.nbytes = 0;
  }
  reply.crc = checksum(reply);
  stream.head.assign(reinterpret_cast<const char*>(&reply), sizeof reply);
  stream.at = 0, stream.offset = 0, stream.busy = true;
  ++lent_;
  std::lock_guard lock(borrowers_mutex_);
  borrowers_[stream.socket.get()] = {stream.peer.name, reply.nbytes};
}

void ReadServer::done(Stream& stream) {
  if (!stream.busy) return;
  stream.busy = false;
  stream.spans.clear();
  stream.blocks.clear();
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
