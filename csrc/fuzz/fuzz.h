// What the harnesses share. Each is one file with LLVMFuzzerTestOneInput(), for libFuzzer, AFL++ or main.cpp.
//
// A harness gives the bytes to the parsers twice: as they are, and with the checksums made right, since else nothing would get
// behind those. So a corpus holds frames as they are on the wire.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "../crc32c.h"
#include "../error.h"

// Not an assert: it holds in every build, and ends the program in a way that each driver notices.
#define EXPECT(condition)                                                            \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);   \
      std::abort();                                                                  \
    }                                                                                \
  } while (0)

namespace tl::fuzz {

// Bytes in a block of the heap of their own, so that a sanitizer sees who reads beyond them.
class Bytes {
 public:
  Bytes(const void* data, size_t size) : data_(new char[size]), size_(size) {
    if (size) std::memcpy(data_.get(), data, size);
  }
  explicit Bytes(std::string_view text) : Bytes(text.data(), text.size()) {}
  Bytes(const Bytes& other) : Bytes(other.view()) {}
  Bytes(Bytes&& other) = default;
  std::string_view view() const { return {data_.get(), size_}; }
  std::string text() const { return std::string(view()); }
  size_t size() const { return size_; }
  template <class T>
  bool get(size_t at, T& value) const {
    if (at > size() || size() - at < sizeof value) return false;
    std::memcpy(&value, data_.get() + at, sizeof value);
    return true;
  }
  template <class T>
  void put(size_t at, const T& value) { std::memcpy(data_.get() + at, &value, sizeof value); }

 private:
  std::unique_ptr<char[]> data_;
  size_t size_;
};

// Whether the bytes were good. An Error of one of the kinds that bytes of a peer may cause says no; all else is a fault of ours.
template <class Parse>
bool good(Parse parse) {
  try {
    parse();
    return true;
  } catch (const Error& error) {
    EXPECT(error.fault == Fault::corrupt || error.fault == Fault::refused || error.fault == Fault::lost || error.fault == Fault::stale ||
           error.fault == Fault::transport);
    return false;
  }
}

// Keeps a read of memory from being optimised away.
inline void touch(std::string_view bytes) {
  volatile uint32_t sum = crc32c(0, bytes.data(), bytes.size());
  static_cast<void>(sum);
}

}  // namespace tl::fuzz
