#include "heartbeat.h"

#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <limits>

namespace tl {

constexpr int kSilentBeats = 5;  // the time of a lease

void Heartbeat::configure(std::string address, Key key, int64_t interval_ns) {
  std::lock_guard lock(mutex_);
  // The same lease again: its stream stays, since the coordinator takes the end of one for the end of its peer.
  if (socket_ && state_ != State::rejected && address == address_ && key == key_) return;
  address_ = std::move(address);
  key_ = key;
  interval_ns_ = interval_ns;
  due_ns_ = 0;
  socket_.reset();
  state_ = State::connecting;
}

void Heartbeat::stop() {
  std::lock_guard lock(mutex_);
  socket_.reset();
  state_ = State::idle;
}

int64_t Heartbeat::tick(int64_t now) {
  std::lock_guard lock(mutex_);
  State state = state_;
  if (state == State::idle || state == State::rejected) return std::numeric_limits<int64_t>::max();
  if (now < due_ns_) return due_ns_;
  due_ns_ = now + interval_ns_;
  if (socket_ && (!read_answers(now) || silent(now))) {
    socket_.reset();
    if (state_ != State::rejected) state_ = State::unreachable;
  }
  if (state_ == State::rejected) return std::numeric_limits<int64_t>::max();
  Sent sent = socket_ || connect(now) ? beat() : Sent::no;
  if (sent == Sent::yes && !tcp_) state_ = State::beating;  // over TCP only an answer shows it
  if (sent == Sent::later) due_ns_ -= interval_ns_ * 3 / 4;
  if (sent == Sent::no) {
    socket_.reset();
    state_ = State::unreachable;
  }
  return due_ns_;
}

bool Heartbeat::silent(int64_t now) const { return tcp_ && now - heard_ns_ > kSilentBeats * interval_ns_; }

bool Heartbeat::connect(int64_t now) {
  heard_ns_ = now;
  tcp_ = address_.rfind("unix:", 0) != 0;
  if (!tcp_) {
    sockaddr_un address = unix_address(address_.substr(5));
    socket_ = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    return socket_ && ::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  size_t colon = address_.rfind(':');
  if (colon == std::string::npos) return false;
  std::string host = address_.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;  // a name was resolved before: a look-up could block
  if (::getaddrinfo(host.c_str(), address_.c_str() + colon + 1, &hints, &found) != 0) return false;
  socket_ = Fd(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  bool started = socket_ && (::connect(socket_.get(), found->ai_addr, found->ai_addrlen) == 0 || errno == EINPROGRESS);
  ::freeaddrinfo(found);
  return started;
}

Heartbeat::Sent Heartbeat::beat() {
  ssize_t n = ::send(socket_.get(), key_.data(), key_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  // A TCP connection that still opens, or a full buffer.
  if (n < 0 && (errno == EAGAIN || errno == ENOTCONN || errno == EINPROGRESS)) return Sent::later;
  return n == static_cast<ssize_t>(key_.size()) ? Sent::yes : Sent::no;
}

bool Heartbeat::read_answers(int64_t now) {
  uint8_t answers[64];
  for (;;) {
    ssize_t n = ::recv(socket_.get(), answers, sizeof answers, MSG_DONTWAIT);
    if (n == 0) return false;
    if (n < 0) return errno == EAGAIN || errno == EINTR || errno == ENOTCONN;
    heard_ns_ = now;
    if (std::find(answers, answers + n, uint8_t{1}) != answers + n) {
      state_ = State::rejected;
      return false;
    }
    state_ = State::beating;
  }
}

}  // namespace tl
