// Runs the native test suites that are named, or all.
#include <cstring>

#include "check.h"

int main(int count, char** names) {
  const struct {
    const char* name;
    void (*run)();
  } suites[] = {
#if !defined(TL_SUITES_SMALL)
      {"tcp", tl::test::tcp_tests},
#endif
#if !defined(TL_SUITES_ENGINE)
      {"ring", tl::test::ring_tests},   {"holds", tl::test::holds_tests},       {"board", tl::test::board_tests},
      {"inbox", tl::test::inbox_tests}, {"segments", tl::test::segments_tests},
      {"hmac", tl::test::hmac_tests},   {"crc32c", tl::test::crc32c_tests},
      {"flight", tl::test::flight_tests},
#endif
  };
  int ran = 0;
  for (const auto& suite : suites) {
    bool wanted = count == 1;
    for (int i = 1; i < count; ++i) wanted |= std::strcmp(names[i], suite.name) == 0;
    if (wanted) suite.run(), ++ran;
  }
  return ran ? 0 : 2;
}
