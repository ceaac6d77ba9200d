// What every native test needs: checks that tell where they failed, and seeds that tell runs apart.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);   \
      std::_Exit(1);                                                                 \
    }                                                                                \
  } while (0)

// The expression throws tl::Error with that fault.
#define CHECK_FAULT(expression, expected)           \
  do {                                              \
    bool thrown = false;                            \
    try {                                           \
      (void)(expression);                           \
    } catch (const tl::Error& error) {              \
      thrown = error.fault == (expected);           \
    }                                               \
    CHECK(thrown && #expression);                   \
  } while (0)

namespace tl::test {

// The suites, one a file.
void ring_tests();
void holds_tests();
void board_tests();
void inbox_tests();
void segments_tests();
void hmac_tests();
void crc32c_tests();
void flight_tests();
void tcp_tests();

// Source: Marsaglia, "Xorshift RNGs", 2003.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  uint64_t below(uint64_t n) { return next() % n; }

 private:
  uint64_t state_;
};

// How much work a program does: 1 unless the sanitizers slow it down.
inline uint64_t scaled(uint64_t n) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return n / 10;
#else
  return n;
#endif
}

}  // namespace tl::test
