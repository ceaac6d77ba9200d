// What every native test needs: checks that tell where they failed, and seeds that tell runs apart.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "random.h"

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

// How much work a program does: 1 unless the sanitizers slow it down.
inline uint64_t scaled(uint64_t n) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return n / 10;
#else
  return n;
#endif
}

}  // namespace tl::test
