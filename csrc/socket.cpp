#include "socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>

#include <algorithm>

#include "doorbell.h"

namespace tl {

namespace {

struct Resolved {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Resolved resolve(const std::string& host, uint16_t port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
    throw Error(Fault::transport, "'" + host + "' is no numeric IP address of this host's kind");
  Resolved result;
  std::memcpy(&result.storage, found->ai_addr, found->ai_addrlen);
  result.size = found->ai_addrlen;
  ::freeaddrinfo(found);
  return result;
}

// Runs in a forked child, where nothing but system calls is safe.
void leave_sockets() {
  int nowhere = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int fd = 0; nowhere >= 0 && fd < kMostFds; ++fd)
    if (closed_by_fork[fd].exchange(false, std::memory_order_relaxed)) ::dup3(nowhere, fd, O_CLOEXEC);
  ::close(nowhere);
}

Fd ours(int fd) {
  static const int once = ::pthread_atfork(nullptr, nullptr, leave_sockets);
  static_cast<void>(once);
  Fd socket(fd);
  socket.close_by_fork();
  return socket;
}

Fd stream_socket(int family) {
  Fd socket = ours(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_errno("cannot make a socket");
  return socket;
}

void option(int socket, int level, int name, int value) { ::setsockopt(socket, level, name, &value, sizeof value); }

void await(int socket, short events, const Patience& patience) {
  constexpr int64_t kLook = 50'000'000;
  for (;;) {
    if (patience.stopped()) throw Error(Fault::cancelled, "cancelled");
    int64_t left = patience.deadline_ns - now_ns();
    if (left <= 0) throw Error(Fault::timeout, "the deadline passed");
    pollfd poll{socket, events, 0};
    int64_t slice = patience.look ? std::min(left, kLook) : left;
    timespec time{slice / 1'000'000'000, slice % 1'000'000'000};
    int n = ::ppoll(&poll, 1, &time, nullptr);
    if (n > 0) return;
    if (n < 0 && errno != EINTR) throw_errno("cannot wait for a socket");
    if (patience.look) patience.look();
  }
}

[[noreturn]] void throw_ended(int code) {
  throw Error(Fault::lost, code ? std::string("the stream broke: ") + std::strerror(code) : "the other side closed the stream", code);
}

}  // namespace

Fd listen_on(const std::string& host, uint16_t first, uint16_t last, uint16_t& port) {
  for (uint32_t candidate = first; candidate <= std::max(first, last); ++candidate) {
    Resolved address = resolve(host, static_cast<uint16_t>(candidate));
    Fd socket = stream_socket(address.get()->sa_family);
    option(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (address.get()->sa_family == AF_INET6) option(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
    if (::bind(socket.get(), address.get(), address.size) != 0) {
      if (errno == EADDRINUSE && first != 0) continue;
      throw_errno("cannot listen on " + host);
    }
    if (::listen(socket.get(), 1024) != 0) {
      if (errno == EADDRINUSE && first != 0) continue;
      throw_errno("cannot listen on " + host);
    }
    socklen_t size = sizeof address.storage;
    ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address.storage), &size);
    port = ntohs(address.get()->sa_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(address.get())->sin6_port
                                                      : reinterpret_cast<const sockaddr_in*>(address.get())->sin_port);
    return socket;
  }
  throw Error(Fault::transport, "every port from " + std::to_string(first) + " to " + std::to_string(last) + " of " + host + " is taken");
}

Socket accept_from(int listener) {
  Socket socket(ours(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)));
  if (socket) set_up_stream(socket.get());
  return socket;
}

void set_up_stream(int socket) {
  constexpr int kVanishedMs = 4000;
  option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 1);
  option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
  option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, kVanishedMs);
}

Socket dial(const Address& to, const Patience& patience) {
  Resolved address = resolve(to.host, to.port);
  Socket socket(stream_socket(address.get()->sa_family));
  set_up_stream(socket.get());
  Stop::Guard guard(patience.stop, socket.get());
  int code = 0;
  if (::connect(socket.get(), address.get(), address.size) != 0) {
    if (errno == EINPROGRESS) {
      await_writable(socket, patience);
      socklen_t size = sizeof code;
      ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &code, &size);
    } else {
      code = errno;
    }
  }
  if (patience.stopped()) throw Error(Fault::cancelled, "cancelled");
  if (code) throw Error(Fault::lost, "cannot connect to " + to.text() + ": " + std::strerror(code), code);
  return socket;
}

std::string far_end(int socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&storage), &size) != 0 ||
      ::getnameinfo(reinterpret_cast<sockaddr*>(&storage), size, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "somebody";
  return Address{host, static_cast<uint16_t>(std::stoi(port))}.text();
}

void await_readable(const Socket& socket, const Patience& patience) { await(socket.get(), POLLIN, patience); }
void await_writable(const Socket& socket, const Patience& patience) { await(socket.get(), POLLOUT, patience); }

void shake_hands(const Socket& socket, const Patience& patience) {
  for (;;) {
    switch (socket.tls()->handshake()) {
      case TlsSession::Needs::nothing: return;
      case TlsSession::Needs::readable: await_readable(socket, patience); break;
      case TlsSession::Needs::writable: await_writable(socket, patience); break;
    }
  }
}

size_t receive_some(const Socket& socket, const iovec* parts, size_t count) {
  if (socket.tls()) return socket.tls()->receive(parts, count, false);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = count;
  for (;;) {
    ssize_t n = ::recvmsg(socket.get(), &message, MSG_DONTWAIT);
    if (n > 0) return static_cast<size_t>(n);
    if (n == 0) throw_ended(0);
    if (errno == EAGAIN) return 0;
    if (errno != EINTR) throw_ended(errno);
  }
}

size_t receive_some(const Socket& socket, void* data, size_t nbytes) {
  if (socket.tls()) {
    iovec part{data, nbytes};
    return socket.tls()->receive(&part, 1, false);
  }
  for (;;) {
    ssize_t n = ::recv(socket.get(), data, nbytes, MSG_DONTWAIT);
    if (n > 0) return static_cast<size_t>(n);
    if (n == 0) throw_ended(0);
    if (errno == EAGAIN) return 0;
    if (errno != EINTR) throw_ended(errno);
  }
}

size_t receive_held(const Socket& socket, void* data, size_t nbytes) {
  iovec part{data, nbytes};
  return socket.tls() ? socket.tls()->receive(&part, 1, true) : 0;
}

size_t send_some(const Socket& socket, const iovec* parts, size_t count) {
  if (socket.tls()) return socket.tls()->send(parts, count);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = count;
  for (;;) {
    ssize_t n = ::sendmsg(socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) return static_cast<size_t>(n);
    if (errno == EAGAIN || errno == ENOBUFS) return 0;
    if (errno != EINTR) throw_ended(errno);
  }
}

void send_all(const Socket& socket, const void* data, size_t nbytes, const Patience& patience) {
  const char* from = static_cast<const char*>(data);
  while (nbytes > 0) {
    iovec part{const_cast<char*>(from), nbytes};
    size_t n = send_some(socket, &part, 1);
    if (n == 0) await_writable(socket, patience);
    from += n, nbytes -= n;
  }
}

void receive_all(const Socket& socket, void* data, size_t nbytes, const Patience& patience) {
  char* to = static_cast<char*>(data);
  while (nbytes > 0) {
    size_t n = receive_some(socket, to, nbytes);
    if (n == 0) await_readable(socket, patience);
    to += n, nbytes -= n;
  }
}

}  // namespace tl
