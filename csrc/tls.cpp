#include "tls.h"

#include <dlfcn.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>

// The public interface of OpenSSL 3, as its manual pages have it: result, name, parameters.
#define TL_OPENSSL(X)                                                                        \
  X(const void*, TLS_method, (void))                                                         \
  X(ssl_ctx_st*, SSL_CTX_new, (const void*))                                                 \
  X(void, SSL_CTX_free, (ssl_ctx_st*))                                                       \
  X(long, SSL_CTX_ctrl, (ssl_ctx_st*, int, long, void*))                                     \
  X(int, SSL_CTX_set_ciphersuites, (ssl_ctx_st*, const char*))                               \
  X(int, SSL_CTX_set_num_tickets, (ssl_ctx_st*, size_t))                                     \
  X(void, SSL_CTX_set_verify, (ssl_ctx_st*, int, int (*)(int, void*)))                       \
  X(void, SSL_CTX_set_default_passwd_cb, (ssl_ctx_st*, int (*)(char*, int, int, void*)))     \
  X(int, SSL_CTX_use_certificate_chain_file, (ssl_ctx_st*, const char*))                     \
  X(int, SSL_CTX_use_PrivateKey_file, (ssl_ctx_st*, const char*, int))                       \
  X(int, SSL_CTX_check_private_key, (const ssl_ctx_st*))                                     \
  X(int, SSL_CTX_load_verify_file, (ssl_ctx_st*, const char*))                               \
  X(ssl_st*, SSL_new, (ssl_ctx_st*))                                                         \
  X(void, SSL_free, (ssl_st*))                                                               \
  X(void, SSL_set_bio, (ssl_st*, bio_st*, bio_st*))                                          \
  X(void, SSL_set_accept_state, (ssl_st*))                                                   \
  X(void, SSL_set_connect_state, (ssl_st*))                                                  \
  X(int, SSL_set1_host, (ssl_st*, const char*))                                              \
  X(void, SSL_set_hostflags, (ssl_st*, unsigned))                                            \
  X(int, SSL_do_handshake, (ssl_st*))                                                        \
  X(int, SSL_read_ex, (ssl_st*, void*, size_t, size_t*))                                     \
  X(int, SSL_write_ex, (ssl_st*, const void*, size_t, size_t*))                              \
  X(int, SSL_get_error, (const ssl_st*, int))                                                \
  X(long, SSL_get_verify_result, (const ssl_st*))                                            \
  X(const char*, X509_verify_cert_error_string, (long))                                      \
  X(void*, BIO_meth_new, (int, const char*))                                                 \
  X(int, BIO_meth_set_read, (void*, int (*)(bio_st*, char*, int)))                           \
  X(int, BIO_meth_set_write, (void*, int (*)(bio_st*, const char*, int)))                    \
  X(int, BIO_meth_set_ctrl, (void*, long (*)(bio_st*, int, long, void*)))                    \
  X(bio_st*, BIO_new, (const void*))                                                         \
  X(void, BIO_set_init, (bio_st*, int))                                                      \
  X(void, BIO_set_data, (bio_st*, void*))                                                    \
  X(void*, BIO_get_data, (bio_st*))                                                          \
  X(void, BIO_set_flags, (bio_st*, int))                                                     \
  X(void, BIO_clear_flags, (bio_st*, int))                                                   \
  X(void, ERR_clear_error, (void))                                                           \
  X(unsigned long, ERR_get_error, (void))                                                    \
  X(const char*, ERR_reason_error_string, (unsigned long))

namespace tl {

struct OpenSsl {
#define X(result, name, parameters) result(*name) parameters = nullptr;
  TL_OPENSSL(X)
#undef X
};

namespace {

// Its macros.
constexpr int kPem = 1, kWantRead = 2;
constexpr int kSetMinVersion = 123, kSetMode = 33, kSetCacheMode = 44, kTls13 = 0x0304;
constexpr int kPartialWrite = 1, kMovingBuffer = 2, kReleaseBuffers = 16;
constexpr int kVerifyPeer = 1, kVerifyRequired = 2, kNeverTheSubject = 0x20;
constexpr int kFlagRead = 1, kFlagRetry = 8, kControlFlush = 11, kSourceSink = 0x0400;

constexpr size_t kRecord = 16u << 10;  // the largest of TLS
constexpr size_t kBatch = 128u << 10;  // encrypted before it goes to the socket: what stays in cache
constexpr size_t kIn = 64u << 10;
constexpr size_t kMaxOut = 1u << 20;   // only who asks for answers and reads none gets there

const OpenSsl& openssl() {
  static const OpenSsl table = [] {
    void* library = ::dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
    if (!library) throw Error(Fault::transport, std::string("TLS needs OpenSSL 3, and libssl.so.3 isn't here (install libssl3 or openssl-libs): ") + ::dlerror());
    OpenSsl found;
#define X(result, name, parameters)                                            \
  found.name = reinterpret_cast<result(*) parameters>(::dlsym(library, #name)); \
  if (!found.name) throw Error(Fault::transport, "TLS needs OpenSSL 3, and the libssl.so.3 here has no " #name);
    TL_OPENSSL(X)
#undef X
    return found;
  }();
  return table;
}

int reason_of(unsigned long code) { return static_cast<int>(code & 0x7fffff); }

std::string text_of(const OpenSsl& ssl, unsigned long code) {
  const char* text = ssl.ERR_reason_error_string(code);
  return text ? text : "error " + std::to_string(reason_of(code));
}

// Alerts about the certificate that the other side was shown (RFC 8446, 6.2); 1000 of theirs is an alert that came in.
bool refuses_certificate(int reason) {
  constexpr int kAlerts[] = {1042, 1043, 1044, 1045, 1046, 1048, 1049, 1116};
  return std::find(std::begin(kAlerts), std::end(kAlerts), reason) != std::end(kAlerts);
}

bool no_tls(int reason) { return reason == 267 || reason == 156 || reason == 155 || reason == 443; }

int no_password(char*, int, int, void*) { return -1; }

long control(bio_st*, int what, long, void*) { return what == kControlFlush ? 1 : 0; }

}  // namespace

Tls::Tls(const std::string& cert, const std::string& key, const std::string& ca, std::string name)
    : ssl_(openssl()), name_(std::move(name)), context_(ssl_.SSL_CTX_new(ssl_.TLS_method())) {
  if (!context_) throw Error(Fault::transport, "OpenSSL has no memory");
  ssl_.SSL_CTX_ctrl(context_, kSetMinVersion, kTls13, nullptr);
  ssl_.SSL_CTX_ctrl(context_, kSetMode, kPartialWrite | kMovingBuffer | kReleaseBuffers, nullptr);
  ssl_.SSL_CTX_ctrl(context_, kSetCacheMode, 0, nullptr);
  ssl_.SSL_CTX_set_num_tickets(context_, 0);  // nobody resumes a session
  ssl_.SSL_CTX_set_ciphersuites(context_, "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256");
  ssl_.SSL_CTX_set_verify(context_, kVerifyPeer | kVerifyRequired, nullptr);
  ssl_.SSL_CTX_set_default_passwd_cb(context_, no_password);  // rather fail than ask a terminal
  ssl_.ERR_clear_error();
  const char* bad = ssl_.SSL_CTX_use_certificate_chain_file(context_, cert.c_str()) != 1 ? cert.c_str()
                    : ssl_.SSL_CTX_use_PrivateKey_file(context_, key.c_str(), kPem) != 1 ? key.c_str()
                    : ssl_.SSL_CTX_check_private_key(context_) != 1                      ? key.c_str()
                    : ssl_.SSL_CTX_load_verify_file(context_, ca.c_str()) != 1           ? ca.c_str()
                                                                                         : nullptr;
  if (!bad) return;
  std::string why = text_of(ssl_, ssl_.ERR_get_error());
  ssl_.ERR_clear_error();
  ssl_.SSL_CTX_free(context_);
  throw Error(Fault::refused, std::string("cannot use ") + bad + ": " + why);
}

Tls::~Tls() { ssl_.SSL_CTX_free(context_); }

std::unique_ptr<TlsSession> Tls::session(int socket, bool accepting) const {
  ssl_st* session = ssl_.SSL_new(context_);
  bio_st* carrier = ssl_.BIO_new(TlsSession::carrier());
  if (!session || !carrier || ssl_.SSL_set1_host(session, name_.c_str()) != 1) throw Error(Fault::transport, "OpenSSL has no memory");
  ssl_.SSL_set_hostflags(session, kNeverTheSubject);
  ssl_.SSL_set_bio(session, carrier, carrier);
  accepting ? ssl_.SSL_set_accept_state(session) : ssl_.SSL_set_connect_state(session);
  return std::make_unique<TlsSession>(ssl_, session, carrier, socket, accepting);
}

TlsSession::TlsSession(const OpenSsl& ssl, ssl_st* session, bio_st* carrier, int socket, bool accepting)
    : ssl_(ssl), session_(session), socket_(socket), accepting_(accepting), in_(new char[kIn]) {
  ssl_.BIO_set_data(carrier, this);
  ssl_.BIO_set_init(carrier, 1);
}

TlsSession::~TlsSession() { ssl_.SSL_free(session_); }

// ----- between OpenSSL and the socket. OpenSSL would take a system call for each record, and two to read one, and its own writing
// ends a process that doesn't ignore SIGPIPE.

const void* TlsSession::carrier() {
  static const void* const method = [] {
    void* made = openssl().BIO_meth_new(kSourceSink, "tensorlink");
    openssl().BIO_meth_set_read(made, carry_in);
    openssl().BIO_meth_set_write(made, carry_out);
    openssl().BIO_meth_set_ctrl(made, control);
    return made;
  }();
  return method;
}

int TlsSession::carry_in(bio_st* carrier, char* to, int nbytes) {
  auto& self = *static_cast<TlsSession*>(openssl().BIO_get_data(carrier));
  self.ssl_.BIO_clear_flags(carrier, kFlagRead | kFlagRetry);
  while (self.in_at_ == self.in_end_) {
    ssize_t n = self.refill_ ? ::recv(self.socket_, self.in_.get(), kIn, MSG_DONTWAIT) : -1;
    if (n > 0) {
      self.in_at_ = 0, self.in_end_ = static_cast<size_t>(n);
    } else if (n == 0) {
      self.ended_ = true;
      return 0;
    } else if (!self.refill_ || errno == EAGAIN) {
      self.ssl_.BIO_set_flags(carrier, kFlagRead | kFlagRetry);
      return -1;
    } else if (errno != EINTR) {
      self.ended_ = true, self.code_ = errno;
      return -1;
    }
  }
  size_t n = std::min(static_cast<size_t>(nbytes), self.in_end_ - self.in_at_);
  std::memcpy(to, self.in_.get() + self.in_at_, n);
  self.in_at_ += n;
  return static_cast<int>(n);
}

int TlsSession::carry_out(bio_st* carrier, const char* from, int nbytes) {
  auto& self = *static_cast<TlsSession*>(openssl().BIO_get_data(carrier));
  if (self.out_.size() > kMaxOut) return -1;
  self.out_.append(from, static_cast<size_t>(nbytes));
  return nbytes;
}

bool TlsSession::flush() {
  while (out_at_ < out_.size()) {
    ssize_t n = ::send(socket_, out_.data() + out_at_, out_.size() - out_at_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == ENOBUFS)) return false;
    if (n < 0 && errno != EINTR) throw Error(Fault::lost, std::string("the stream broke: ") + std::strerror(errno), errno);
    if (n > 0) out_at_ += static_cast<size_t>(n);
  }
  out_.clear();
  out_at_ = 0;
  return true;
}

// What a call that has failed means. An alert, which tells the other side, is on its way if the socket takes it.
Error TlsSession::failure(int outcome) {
  int what = ssl_.SSL_get_error(session_, outcome);
  unsigned long code = ssl_.ERR_get_error();
  ssl_.ERR_clear_error();
  int reason = reason_of(code);
  try {
    flush();
  } catch (const Error&) {  // it has gone: it won't mind
  }
  if (code_) return Error(Fault::lost, std::string("the stream broke: ") + std::strerror(code_), code_);
  if (ended_ || code == 0 || what == 6) return Error(Fault::lost, "the other side closed the stream");
  if (refuses_certificate(reason)) return Error(Fault::refused, "it refuses the certificate of this process: " + text_of(ssl_, code));
  if (shaken_) return Error(Fault::lost, "the stream broke: " + text_of(ssl_, code));
  if (long verdict = ssl_.SSL_get_verify_result(session_)) return Error(Fault::refused, std::string("its certificate is refused here: ") + ssl_.X509_verify_cert_error_string(verdict));
  if (reason == 199) return Error(Fault::refused, "it shows no certificate");
  if (no_tls(reason)) return Error(Fault::refused, "it doesn't use TLS, and this process takes nothing else");
  // To whoever dials, this may be what a network has changed, and worth another try.
  return Error(accepting_ ? Fault::refused : Fault::lost, "no TLS with it: " + text_of(ssl_, code));
}

// ----- for the owner of the stream

TlsSession::Needs TlsSession::handshake() {
  std::lock_guard lock(mutex_);
  ssl_.ERR_clear_error();
  int outcome = ssl_.SSL_do_handshake(session_);
  if (outcome != 1 && ssl_.SSL_get_error(session_, outcome) != kWantRead) throw failure(outcome);
  shaken_ = outcome == 1;
  if (!flush()) return Needs::writable;
  return shaken_ ? Needs::nothing : Needs::readable;
}

size_t TlsSession::receive(const iovec* parts, size_t count, bool held) {
  std::lock_guard lock(mutex_);
  if (failed_) throw *failed_;
  refill_ = !held;
  size_t done = 0;
  for (size_t i = 0; i < count; ++i) {
    for (size_t at = 0; at < parts[i].iov_len;) {
      ssl_.ERR_clear_error();
      size_t n = 0;
      int outcome = ssl_.SSL_read_ex(session_, static_cast<char*>(parts[i].iov_base) + at, parts[i].iov_len - at, &n);
      at += n, done += n;
      if (outcome == 1) continue;
      if (ssl_.SSL_get_error(session_, outcome) == kWantRead) {
        if (sealed_ == 0) flush();  // an answer that TLS itself gave
        return done;
      }
      Error error = failure(outcome);
      if (done == 0) throw error;
      failed_ = error;
      ::shutdown(socket_, SHUT_RDWR);  // whoever waits for more is woken, and told
      return done;
    }
  }
  return done;
}

size_t TlsSession::send(const iovec* parts, size_t count) {
  std::lock_guard lock(mutex_);
  if (!flush()) return 0;
  size_t total = 0;
  for (size_t i = 0; i < count; ++i) total += parts[i].iov_len;
  size_t done = std::min(sealed_, total);
  sealed_ -= done;
  if (done == total) return done;
  size_t fresh = encrypt(parts, count, done);
  if (flush()) return done + fresh;
  sealed_ = fresh;
  return done;
}

// The next bytes after the first `skip`, as many as a batch has; small ones share a record. Returns how many.
size_t TlsSession::encrypt(const iovec* parts, size_t count, size_t skip) {
  char gathered[kRecord];
  size_t done = 0, i = 0;
  while (i < count && skip >= parts[i].iov_len) skip -= parts[i++].iov_len;
  while (i < count && done < kBatch) {
    const char* from = static_cast<const char*>(parts[i].iov_base) + skip;
    size_t size = std::min(parts[i].iov_len - skip, kRecord);
    if (size == kRecord || i + 1 == count) {
      skip += size;
    } else {
      for (size = 0; i < count && size < kRecord;) {
        size_t n = std::min(parts[i].iov_len - skip, kRecord - size);
        std::memcpy(gathered + size, static_cast<const char*>(parts[i].iov_base) + skip, n);
        size += n, skip += n;
        if (skip == parts[i].iov_len) ++i, skip = 0;
      }
      from = gathered;
    }
    if (i < count && skip == parts[i].iov_len) ++i, skip = 0;
    ssl_.ERR_clear_error();
    size_t written = 0;
    int outcome = size ? ssl_.SSL_write_ex(session_, from, size, &written) : 1;
    if (outcome != 1) throw failure(outcome);
    done += size;  // all of it: it goes to memory
  }
  return done;
}

}  // namespace tl
