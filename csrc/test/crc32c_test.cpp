// CRC32C: published values, and every way of this processor against the bitwise definition.
#include "crc32c.h"

#include <cstring>
#include <string>
#include <vector>

#include "check.h"

using namespace tl;

namespace {

uint32_t bit_by_bit(const uint8_t* p, size_t n) {
  uint32_t crc = ~0u;
  for (; n; --n) {
    crc ^= *p++;
    for (int i = 0; i < 8; ++i) crc = crc >> 1 ^ (0x82f63b78 & (0 - (crc & 1)));
  }
  return ~crc;
}

std::vector<uint8_t> noise(size_t n, uint64_t seed) {
  test::Random random(seed);
  std::vector<uint8_t> bytes(n);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.next() >> 32);
  return bytes;
}

uint32_t crc_of(const std::string& text) { return crc32c(0, text.data(), text.size()); }

// RFC 3720, B.4, and the check value of the catalogue of CRCs.
void published_values() {
  std::string up, down;
  for (int i = 0; i < 32; ++i) up += static_cast<char>(i), down += static_cast<char>(31 - i);
  const uint8_t command[48] = {0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0,    0, 0x04, 0,
                               0,    0,    0, 0x14, 0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0};
  CHECK(crc_of("") == 0);
  CHECK(crc_of("123456789") == 0xe3069283);
  CHECK(crc_of(std::string(32, '\0')) == 0x8a9136aa);
  CHECK(crc_of(std::string(32, '\xff')) == 0x62a8ab43);
  CHECK(crc_of(up) == 0x46dd794e);
  CHECK(crc_of(down) == 0x113fdb5c);
  CHECK(crc32c(0, command, sizeof command) == 0xd9963a56);
}

void every_way_agrees() {
  const std::vector<Crc32cWay> ways = crc32c_ways();
  std::vector<size_t> sizes;
  for (size_t n = 0; n <= 600; ++n) sizes.push_back(n);
  test::Random random(1);
  for (int i = 0; i < 200; ++i) sizes.push_back(600 + random.below(60'000));
  const std::vector<uint8_t> bytes = noise(64 << 10, 2);
  for (size_t n : sizes) {
    const uint8_t* from = bytes.data() + random.below(bytes.size() - n + 1);
    const std::vector<uint8_t> alone(from, from + n);  // the sanitizer sees a byte too far
    const uint32_t right = bit_by_bit(from, n);
    for (const Crc32cWay& way : ways) {
      CHECK(way.update(0, from, n) == right);
      CHECK(way.update(0, alone.data(), n) == right);
    }
  }
}

void parts_add_up() {
  test::Random random(3);
  const std::vector<uint8_t> bytes = noise(40'000, 4);
  const std::vector<Crc32cWay> ways = crc32c_ways();
  for (int i = 0; i < 300; ++i) {
    const size_t n = i < 150 ? random.below(600) : random.below(bytes.size()), first = random.below(n + 1);
    const uint8_t *begin = bytes.data(), *middle = begin + first;
    const uint32_t right = ways.front().update(0, begin, n);
    for (const Crc32cWay& way : ways) CHECK(way.update(way.update(0, begin, first), middle, n - first) == right);
    CHECK(crc32c_combine(crc32c(0, begin, first), crc32c(0, middle, n - first), n - first) == right);
  }
}

// Lengths that no memory has. The order of x is 2^31 - 1: that many zeros bring a register back.
void lengths_of_64_bits() {
  const uint64_t order = 0x7fffffff;
  CHECK(crc32c_combine(0x12345678, 0x9abcdef0, order) == (0x12345678 ^ 0x9abcdef0));
  CHECK(crc32c_combine(5, 7, 1000 * order + 77) == crc32c_combine(5, 7, 77));
  CHECK(crc32c_combine(5, 7, ~uint64_t{0}) == crc32c_combine(5, 7, 3));
}

}  // namespace

void tl::test::crc32c_tests() {
  published_values();
  every_way_agrees();
  parts_add_up();
  lengths_of_64_bits();
}
