// TCP sockets: addresses, dialling, and reads and writes that end at a deadline or when they are stopped.
#pragma once
#include <sys/socket.h>
#include <sys/uio.h>

#include <functional>
#include <string>

#include "memory.h"
#include "stop.h"
#include "tls.h"

namespace tl {

// `host` is a numeric IPv4 or IPv6 address (with a %scope where it is link-local).
struct Address {
  std::string host;
  uint16_t port = 0;
  std::string text() const { return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port); }
};

// How long a thread waits for the other side.
struct Patience {
  int64_t deadline_ns;
  Stop* stop = nullptr;              // ends the wait at once
  std::function<void()> look = {};   // called every few hundredths of a second and after a signal; throws to end the wait
  int64_t stall_ns = 0;              // reads: the longest time without a byte; 0: any
  bool stopped() const { return stop && stop->flag; }
};

// A connected stream, bare or inside TLS.
class Socket {
 public:
  Socket() = default;
  explicit Socket(Fd fd) : fd_(std::move(fd)) {}
  Socket(Socket&&) = default;
  Socket& operator=(Socket&& other) noexcept {
    tls_ = std::move(other.tls_);  // first: it uses the descriptor that it has
    fd_ = std::move(other.fd_);
    return *this;
  }
  int get() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  // From now on nothing passes but by TLS, once its handshake is over.
  void secure(const Tls& tls, bool accepting) { tls_ = tls.session(get(), accepting); }
  TlsSession* tls() const { return tls_.get(); }

 private:
  Fd fd_;
  std::unique_ptr<TlsSession> tls_;
};

// Listens on `host` at a free port, or at the first free one of `first`..`last`. Throws Fault::transport.
Fd listen_on(const std::string& host, uint16_t first, uint16_t last, uint16_t& port);

// The next connection, set up as all of ours; none: nobody waits.
Socket accept_from(int listener);

// A connected, non-blocking socket, set up as all of ours. Throws Fault::lost: nobody listens there; timeout, cancelled.
Socket dial(const Address& to, const Patience& patience);

// No delay, and an error within a few seconds from a host that has vanished.
void set_up_stream(int socket);

// The numeric address of the other end.
std::string far_end(int socket);

// Until the socket is readable (or writable). Throws Fault::timeout, cancelled.
void await_readable(const Socket& socket, const Patience& patience);
void await_writable(const Socket& socket, const Patience& patience);

// The handshake of TLS. Throws Fault::refused, lost, timeout, cancelled.
void shake_hands(const Socket& socket, const Patience& patience);

// All of it, on a non-blocking socket. Throws Fault::lost: the stream has ended; timeout, cancelled.
void send_all(const Socket& socket, const void* data, size_t nbytes, const Patience& patience);
void receive_all(const Socket& socket, void* data, size_t nbytes, const Patience& patience);

// One non-blocking read or write: bytes, 0: nothing now, until the descriptor is readable or writable. What was offered to send_some
// and not sent must come first the next time. Throws Fault::lost: the stream has ended; refused: TLS, and that is about certificates.
size_t receive_some(const Socket& socket, void* data, size_t nbytes);
size_t receive_some(const Socket& socket, const iovec* parts, size_t count);
size_t send_some(const Socket& socket, const iovec* parts, size_t count);
// What TLS has taken from the descriptor and not given yet: the descriptor doesn't tell of that. 0: nothing.
size_t receive_held(const Socket& socket, void* data, size_t nbytes);

}  // namespace tl
