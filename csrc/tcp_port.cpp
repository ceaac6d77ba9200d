#include "tcp_port.h"

#include <sys/epoll.h>

#include <algorithm>

#include "engine.h"
#include "hmac.h"
#include "point.h"

namespace tl {

namespace {

void say_last(const Socket& socket, const std::string& text) {
  iovec part{const_cast<char*>(text.data()), text.size()};
  try {
    send_some(socket, &part, 1);
  } catch (const Error&) {  // it has gone
  }
}

}  // namespace

TcpPort::TcpPort(Engine& engine, Key key) : engine_(engine), home_(std::make_shared<Home>()), server_(engine) {
  contact_.key = key;
  home_->engine = &engine;
}

uint16_t TcpPort::listen(const std::string& host, uint16_t first, uint16_t last) {
  uint16_t port = 0;
  listener_ = listen_on(host, first, last, port);
  contact_.at = {host, port};
  listener_number_ = listener_.get();
  engine_.watch_fd(listener_.get(), EPOLLIN);
  return port;
}

void TcpPort::close() {
  {
    std::lock_guard lock(home_->mutex);
    home_->engine = nullptr;
  }
  listener_number_ = -1;
  listener_.reset();
  pending_.clear();
  server_.close();
}

// ----- accepting

bool TcpPort::on_event(int fd, uint32_t events) {
  if (fd == listener_number_) return accept_all(), true;
  if (pending_.count(fd)) return on_hello(fd), true;
  return server_.on_event(fd, events);
}

void TcpPort::accept_all() {
  constexpr int kMost = 64;  // then others have their turn
  for (int i = 0; i < kMost; ++i) {
    Socket socket = accept_from(listener_.get());
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE) {  // it would be told again and again of who waits
        accept_due_ = now_ns() + kFull;
        engine_.rewatch_fd(listener_.get(), 0);
      }
      return;
    }
    while (pending_.size() >= kMaxPending && !order_.empty()) {  // whoever greets at once is never the oldest
      auto oldest = pending_.find(order_.front());
      order_.pop_front();
      if (oldest == pending_.end()) continue;
      if (oldest->second.late_answer.empty()) refuse(oldest->second.from, "it said nothing while others came");
      pending_.erase(oldest);
    }
    int fd = socket.get();
    Pending pending{std::move(socket), {}, {}, far_end(fd), now_ns() + kHandshakeTimeout};
    random_bytes(pending.nonce.data(), pending.nonce.size());
    try {
      if (tls_) pending.socket.secure(*tls_, true);
      if (!tls_ && !challenge_it(pending)) continue;
    } catch (const Error&) {
      continue;
    }
    engine_.watch_fd(fd, EPOLLIN);
    pending_[fd] = std::move(pending);
    order_.push_back(fd);
  }
}

// False: not yet, or with no TLS, not at all.
bool TcpPort::challenge_it(Pending& pending) {
  if (tls_) {
    auto needs = pending.socket.tls()->handshake();
    engine_.rewatch_fd(pending.socket.get(), needs == TlsSession::Needs::writable ? EPOLLOUT : EPOLLIN);
    if (needs != TlsSession::Needs::nothing) return false;
  }
  std::string text = challenge(pending.nonce);
  iovec part{text.data(), text.size()};
  pending.challenged = send_some(pending.socket, &part, 1) == text.size();
  return pending.challenged;
}

void TcpPort::on_hello(int fd) {
  Pending& pending = pending_[fd];
  if (!pending.late_answer.empty()) return;
  std::string why;
  try {
    if (!pending.challenged && !challenge_it(pending)) return;
    size_t size = hello_size(pending.in);
    for (;;) {
      char bytes[4096];
      size_t n = receive_some(pending.socket, bytes, std::min(sizeof bytes, size - pending.in.size()));
      if (n == 0) return;
      pending.in.append(bytes, n);
      if (pending.in.size() < size) continue;
      size_t more = hello_size(pending.in);
      if (more == size) break;
      size = more;
    }
    Heard heard = hear(pending.in, pending.nonce, contact_.key);
    Pending taken = std::move(pending);
    pending_.erase(fd);
    engine_.unwatch_fd(fd);
    return welcome(std::move(taken), heard);
  } catch (const Error& error) {
    why = error.fault == Fault::lost ? "it left before it had shown that it knows the key" : error.what();
  }
  refuse(pending.from, why);
  pending_.erase(fd);
}

void TcpPort::welcome(Pending pending, const Heard& heard) {
  point("handshake", "heard");
  const Greeting& greeting = heard.greeting;
  std::string refusal;
  bool full = false;
  if (!heard.knows_key) {
    refusal = "the key is wrong";
    if (!refuse(pending.from, "it doesn't know the key")) {
      std::string text = answer(heard, pending.nonce, contact_.key, refusal, 0);
      return hold(std::move(pending), std::move(text));
    }
  } else if (greeting.to.name != engine_.name() || greeting.to.incarnation != engine_.incarnation()) {
    refusal = "restarted";
  }
  if (refusal.empty() && greeting.role != Role::lane && greeting.role != Role::reads) refusal = "the peer speaks another version of the protocol";
  if (refusal.empty()) full = !(refusal = too_many(greeting)).empty();
  uint64_t received = refusal.empty() ? engine_.inbox().received(engine_.inbox().source(greeting.from.name), greeting.from.incarnation) : full;
  std::string text = answer(heard, pending.nonce, contact_.key, refusal, received);
  iovec part{text.data(), text.size()};
  try {
    if (send_some(pending.socket, &part, 1) != text.size() || !refusal.empty()) return;
    if (greeting.role == Role::reads) return server_.adopt(std::move(pending.socket), greeting, heard.secret);
    auto connection = make(std::move(pending.socket), false, greeting.from, greeting.contact, 0);
    add(connection);
    engine_.each_published([&](const std::string& name, const Notice& notice) { connection->published(name, notice); });
    engine_.ring();
  } catch (const Error&) {  // it has gone, or has restarted since
  }
}

void TcpPort::hold(Pending pending, std::string answer) {
  int fd = pending.socket.get();
  pending.late_answer = std::move(answer);
  pending.deadline_ns = now_ns() + Throttle::kDelay;
  pending_[fd] = std::move(pending);
  order_.push_back(fd);
}

// Why a peer gets no further stream; empty: it does.
std::string TcpPort::too_many(const Greeting& greeting) {
  const std::string& name = greeting.from.name;
  size_t most = greeting.role == Role::lane ? kMaxLanes : kMaxReads, there = 0;
  if (greeting.role == Role::reads) {
    there = server_.streams_of(name);
  } else {
    for (auto& connection : engine_.connections()) there += !connection->pid && connection->peer.name == name;
  }
  if (there < most) return {};
  return engine_.name() + " has " + std::to_string(there) + " streams of " + name +
         ", the most that one peer may have: read with fewer threads at a time";
}

bool TcpPort::refuse(const std::string& from, const std::string& why) {
  std::lock_guard lock(refusals_mutex_);
  if (throttle_.failed(from.substr(0, from.rfind(':')), now_ns())) return false;
  if (refusals_.size() < kMaxRefusals) refusals_.push_back(from + ": " + why);
  return true;
}

std::vector<std::string> TcpPort::take_refusals() {
  std::lock_guard lock(refusals_mutex_);
  for (auto& [origin, count] : throttle_.untold(now_ns())) refusals_.push_back(origin + ": " + std::to_string(count) + " more in a short time");
  return std::exchange(refusals_, {});
}

// ----- connections

std::shared_ptr<TcpConnection> TcpPort::make(Socket socket, bool dialled, const Identity& peer, const Contact& contact, uint64_t received) {
  TcpConnection::Parts parts;
  parts.socket = std::move(socket);
  parts.dialled = dialled;
  parts.greeting = {Role::reads, {engine_.name(), engine_.incarnation()}, peer, contact_};
  parts.contact = contact;
  parts.received = received;
  parts.tls = tls_;
  parts.home = home_;
  parts.flight = engine_.flight();
  return std::make_shared<TcpConnection>(engine_.next_serial(), peer, std::move(parts), engine_.outbound(peer));
}

void TcpPort::add(const std::shared_ptr<TcpConnection>& connection) {
  engine_.add(connection, *this, {{connection->socket(), connection->events()}});
}

std::shared_ptr<Connection> TcpPort::connect(const Contact& to, const Identity& peer, const Patience& patience) {
  Activity activity(engine_.flight(), {"connect", "handshake", peer.name, peer.incarnation, "tcp", to.at.text()});
  Session session = greet(to, {Role::lane, {engine_.name(), engine_.incarnation()}, peer, contact_}, tls_.get(), patience);
  auto connection = make(std::move(session.socket), true, peer, to, session.received);
  add(connection);
  if (tls_) engine_.take(*connection);  // what came with the welcome: TLS may have it already, and then the descriptor won't tell
  return connection;
}

void TcpPort::on_connection(const std::shared_ptr<Connection>& any, int, uint32_t events) {
  auto connection = std::static_pointer_cast<TcpConnection>(any);
  if (events & EPOLLOUT) connection->on_writable();
  bool over = events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
  if (events & EPOLLIN) engine_.take(*connection);
  if (over || !connection->up()) engine_.lose_lane(connection);
}

int64_t TcpPort::on_tick(int64_t now) {
  for (auto it = pending_.begin(); it != pending_.end();) {
    Pending& pending = it->second;
    bool late = pending.deadline_ns < now;
    if (late && pending.late_answer.empty()) refuse(pending.from, "it said nothing for too long");
    if (late && !pending.late_answer.empty()) say_last(pending.socket, pending.late_answer);
    it = late ? pending_.erase(it) : std::next(it);
  }
  while (!order_.empty() && !pending_.count(order_.front())) order_.pop_front();
  int64_t due = server_.on_tick(now);
  if (accept_due_ && accept_due_ <= now && listener_) accept_due_ = 0, engine_.rewatch_fd(listener_.get(), EPOLLIN);
  if (accept_due_) due = std::min(due, accept_due_);
  if (home_->unattended && !engine_.polled_since(now - kUnattended)) {
    home_->unattended = false;
    for (auto& connection : engine_.connections()) connection->attend(true);
  }
  if (home_->unattended) due = std::min(due, now + kUnattended);
  if (now >= report_due_) {
    report_due_ = now + kReport;
    for (auto& connection : engine_.connections()) connection->report();
  }
  return std::min({due, pending_.empty() ? INT64_MAX : now + kHandshakeTimeout / 10});
}

}  // namespace tl
