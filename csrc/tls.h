// TLS 1.3 for TCP streams, with certificates on both sides, by the OpenSSL 3 of this host. That is loaded when somebody wants
// it: nothing is linked, and without it all else works.
#pragma once
#include <sys/uio.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "error.h"

struct ssl_st;
struct ssl_ctx_st;
struct bio_st;

namespace tl {

struct OpenSsl;
class TlsSession;

// What this process shows, and whom it believes. Any thread.
class Tls {
 public:
  // Files in PEM; `name`: the DNS name that all certificates carry. Throws Fault::transport: there is no OpenSSL 3 here; refused: a
  // file is no use.
  Tls(const std::string& cert, const std::string& key, const std::string& ca, std::string name);
  ~Tls();
  Tls(const Tls&) = delete;
  // For a connected, non-blocking socket, which outlives it.
  std::unique_ptr<TlsSession> session(int socket, bool accepting) const;

 private:
  const OpenSsl& ssl_;
  const std::string name_;
  ssl_ctx_st* context_;
};

// One stream's. Nothing blocks. Any thread: OpenSSL allows only one at a time, so each call takes a lock.
class TlsSession {
 public:
  TlsSession(const OpenSsl& ssl, ssl_st* session, bio_st* carrier, int socket, bool accepting);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;

  // What it needs to go on: nothing more, or that the socket is readable, or writable. Throws Fault::refused: one side doesn't take
  // the other's certificate, or doesn't speak TLS; lost.
  enum class Needs { nothing, readable, writable };
  Needs handshake();
  // As receive_some. `held`: only of what has left the socket already. 0: nothing whole is held, so the socket tells when to go on.
  size_t receive(const iovec* parts, size_t count, bool held);
  // As send_some. What is encrypted and doesn't fit into the socket doesn't count as sent, so that the caller comes again when
  // it is writable, with the same bytes; they aren't encrypted twice.
  size_t send(const iovec* parts, size_t count);
  // Bytes of the last send() will go out before any others.
  bool stuck() const { return sealed_ > 0; }

 private:
  friend class Tls;
  static const void* carrier();
  static int carry_in(bio_st* carrier, char* to, int nbytes);
  static int carry_out(bio_st* carrier, const char* from, int nbytes);
  bool flush();  // false: the socket takes no more now
  Error failure(int outcome);
  size_t encrypt(const iovec* parts, size_t count, size_t skip);

  const OpenSsl& ssl_;
  std::mutex mutex_;
  ssl_st* const session_;
  const int socket_;
  const bool accepting_;
  bool shaken_ = false, refill_ = true, ended_ = false;
  int code_ = 0;                   // errno of the socket
  std::unique_ptr<char[]> in_;     // from the socket, encrypted
  size_t in_at_ = 0, in_end_ = 0;
  std::string out_;                // for the socket, encrypted
  size_t out_at_ = 0;
  size_t sealed_ = 0;              // bytes that `out_` holds and that the caller will offer again
  std::optional<Error> failed_;    // and is told with the next receive()
};

}  // namespace tl
