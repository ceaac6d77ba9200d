// Owners of descriptors and mappings. A Memfd is anonymous shared memory: nothing is named anywhere, so nothing
// can be left behind, and its size is sealed, so that no peer can make another one's mapping fault.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "error.h"

namespace tl {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = 2u << 20;

inline uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

// Descriptors that a forked child must not keep open: its copy of a TCP socket would hide from the other side that this process
// has ended. By number; the child puts /dev/null in their places (socket.cpp).
constexpr int kMostFds = 1 << 16;
inline std::atomic<bool> closed_by_fork[kMostFds];

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0 && fd_ < kMostFds) closed_by_fork[fd_].store(false, std::memory_order_relaxed);
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  void close_by_fork() {
    if (fd_ >= 0 && fd_ < kMostFds) closed_by_fork[fd_].store(true, std::memory_order_relaxed);
  }

 private:
  int fd_ = -1;
};

// One mapping. Large ones start on a huge page, so that huge pages can be used.
class Map {
 public:
  Map() = default;
  Map(int fd, uint64_t nbytes, int protection, int flags) : nbytes_(nbytes) {
    uint64_t align = nbytes >= kHugePage ? kHugePage : kPage;
    span_ = nbytes + (align > kPage ? align : 0);
    void* space = ::mmap(nullptr, span_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) throw_errno("cannot reserve " + std::to_string(span_) + " bytes of address space");
    start_ = static_cast<char*>(space);
    char* aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(space), align));
    if (::mmap(aligned, nbytes, protection, flags | MAP_FIXED, fd, 0) == MAP_FAILED) {
      int code = errno;
      ::munmap(start_, span_);
      start_ = nullptr;
      errno = code;
      throw_errno("cannot map " + std::to_string(nbytes) + " bytes of shared memory");
    }
    data_ = aligned;
  }
  Map(Map&& other) noexcept { *this = std::move(other); }
  Map& operator=(Map&& other) noexcept {
    if (this != &other) {
      reset();
      start_ = std::exchange(other.start_, nullptr);
      data_ = std::exchange(other.data_, nullptr);
      span_ = std::exchange(other.span_, 0);
      nbytes_ = std::exchange(other.nbytes_, 0);
    }
    return *this;
  }
  ~Map() { reset(); }
  void reset() {
    if (start_) ::munmap(start_, span_);
    start_ = data_ = nullptr;
  }
  char* data() const { return data_; }
  uint64_t nbytes() const { return nbytes_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  char* start_ = nullptr;
  char* data_ = nullptr;
  uint64_t span_ = 0;
  uint64_t nbytes_ = 0;
};

inline Fd make_memfd(const char* name, uint64_t nbytes) {
  Fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_errno("cannot create shared memory");
  if (::ftruncate(fd.get(), static_cast<off_t>(nbytes)) != 0)
    throw_errno("cannot size shared memory to " + std::to_string(nbytes) + " bytes");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw_errno("cannot seal shared memory");
  return fd;
}

// A second descriptor of the same memory that can never be mapped writable and shared.
inline Fd read_only(const Fd& fd) {
  Fd copy(::open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), O_RDONLY | O_CLOEXEC));
  if (!copy) throw_errno("cannot reopen shared memory read-only");
  return copy;
}

// Size of a memfd that a peer sent, or an error unless it is sealed: only then can its size be trusted.
inline uint64_t sealed_size(int fd) {
  int seals = ::fcntl(fd, F_GET_SEALS);
  struct stat status {};
  if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW) || ::fstat(fd, &status) != 0)
    throw Error(Fault::corrupt, "a peer sent a descriptor that is no sealed shared memory");
  return static_cast<uint64_t>(status.st_size);
}

}  // namespace tl
