// A checksum is a remainder of polynomials over GF(2). Everything here is reflected: the lowest bit of a register or of memory
// is the highest power, and a register of 32 bits holds x^31 in bit 0. "Raw" registers lack the inversions that CRC32C begins and
// ends with. Sources: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", 2009; Gopal et
// al., "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction", 2011.
#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace tl {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;
constexpr uint32_t kOne = 1u << 31, kByte = kOne >> 8;  // x^0 and x^8

// a * b mod P
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a; a <<= 1) {
    product ^= b & (0 - (a >> 31));
    b = b >> 1 ^ (kPolynomial & (0 - (b & 1)));
  }
  return product;
}

// base^n mod P
constexpr uint32_t power(uint32_t base, uint64_t n) {
  uint32_t result = kOne;
  for (; n; n >>= 1, base = multiply(base, base))
    if (n & 1) result = multiply(result, base);
  return result;
}

constexpr uint32_t x_to(uint64_t n) { return power(kOne >> 1, n); }

uint64_t load8(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// ----- by tables

using Table = std::array<std::array<uint32_t, 256>, 8>;

// table[k][b]: the register after byte b and k zeros.
constexpr Table make_table() {
  Table table{};
  for (uint32_t b = 0; b < 256; ++b) table[0][b] = multiply(b, kByte);
  for (size_t k = 1; k < 8; ++k)
    for (uint32_t b = 0; b < 256; ++b) table[k][b] = table[k - 1][b] >> 8 ^ table[0][table[k - 1][b] & 255];
  return table;
}

constexpr Table kTable = make_table();

uint32_t raw_table(uint32_t crc, const uint8_t* p, size_t n) {
  for (; n >= 8; p += 8, n -= 8) {
    const uint64_t word = load8(p) ^ crc;
    crc = kTable[7][word & 255] ^ kTable[6][word >> 8 & 255] ^ kTable[5][word >> 16 & 255] ^ kTable[4][word >> 24 & 255] ^
          kTable[3][word >> 32 & 255] ^ kTable[2][word >> 40 & 255] ^ kTable[1][word >> 48 & 255] ^ kTable[0][word >> 56];
  }
  for (; n; --n) crc = crc >> 8 ^ kTable[0][(crc ^ *p++) & 255];
  return crc;
}

#if defined(__x86_64__) || defined(__aarch64__)

// ----- by the processor's instruction for eight bytes. It has a latency of three cycles and can begin each cycle, so it takes
// three streams at a time.

#if defined(__x86_64__)

#define TL_WITH_CRC __attribute__((target("sse4.2,pclmul")))

TL_WITH_CRC inline uint32_t step8(uint32_t crc, uint64_t word) { return static_cast<uint32_t>(_mm_crc32_u64(crc, word)); }
TL_WITH_CRC inline uint32_t step1(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
TL_WITH_CRC inline uint64_t carryless(uint32_t a, uint32_t b) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128(static_cast<int>(a)), _mm_cvtsi32_si128(static_cast<int>(b)), 0);
  return static_cast<uint64_t>(_mm_cvtsi128_si64(product));
}

bool has_crc() { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }

#else

#define TL_WITH_CRC

// Assembler, since compilers disagree on how a function asks for these extensions.
inline uint32_t step8(uint32_t crc, uint64_t word) {
  asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
  return crc;
}
inline uint32_t step1(uint32_t crc, uint8_t byte) {
  asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(uint32_t{byte}));
  return crc;
}
inline uint64_t carryless(uint32_t a, uint32_t b) {
  uint64_t product;
  asm(".arch_extension crypto\n\tfmov d0, %x1\n\tfmov d1, %x2\n\tpmull v0.1q, v0.1d, v1.1d\n\tfmov %x0, d0"
      : "=r"(product)
      : "r"(uint64_t{a}), "r"(uint64_t{b})
      : "v0", "v1");
  return product;
}

bool has_crc() {
  const unsigned long has = getauxval(AT_HWCAP);
  return (has & 1 << 7) && (has & 1 << 4);  // HWCAP_CRC32, HWCAP_PMULL
}

#endif

// As many blocks of three streams of `length` bytes as there are.
template <size_t length>
TL_WITH_CRC uint32_t raw_blocks(uint32_t crc, const uint8_t*& p, size_t& n) {
  // The product of two registers, read as eight bytes, stands for their product times x, and step8 multiplies by x^32.
  constexpr uint32_t once = x_to(8 * length - 33), twice = x_to(16 * length - 33);
  for (; n >= 3 * length; p += 3 * length, n -= 3 * length) {
    uint32_t b = 0, c = 0;
    for (size_t i = 0; i < length; i += 8) {
      crc = step8(crc, load8(p + i));
      b = step8(b, load8(p + i + length));
      c = step8(c, load8(p + i + 2 * length));
    }
    crc = c ^ step8(0, carryless(crc, twice) ^ carryless(b, once));
  }
  return crc;
}

TL_WITH_CRC uint32_t raw_instruction(uint32_t crc, const uint8_t* p, size_t n) {
  crc = raw_blocks<4096>(crc, p, n);
  crc = raw_blocks<256>(crc, p, n);
  crc = raw_blocks<64>(crc, p, n);
  for (; n >= 8; p += 8, n -= 8) crc = step8(crc, load8(p));
  for (; n; --n) crc = step1(crc, *p++);
  return crc;
}

#endif

#if defined(__x86_64__)

// ----- by folding: what has been read is kept as a remainder of many bits, which is moved on by multiplying its halves.

#define TL_WITH_FOLD __attribute__((target("avx2,sse4.2,pclmul,vpclmulqdq")))

TL_WITH_FOLD inline __m256i fold(__m256i x, __m256i factors, __m256i next) {
  const __m256i low = _mm256_clmulepi64_epi128(x, factors, 0x00), high = _mm256_clmulepi64_epi128(x, factors, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, next), high);
}

// What moves 128 bits on by `nbits`: for the half with the higher powers, which lies lower, and for the other. A product of two
// words of 64 bits, read as 128, stands for theirs times x.
template <uint64_t nbits>
TL_WITH_FOLD inline __m256i factors() {
  constexpr uint64_t low = uint64_t{x_to(nbits + 63)} << 32, high = uint64_t{x_to(nbits - 1)} << 32;
  return _mm256_set_epi64x(high, low, high, low);
}

// The register after 32 bytes with the remainder x.
TL_WITH_FOLD inline uint32_t register_of(__m256i x) {
  uint32_t crc = step8(0, static_cast<uint64_t>(_mm256_extract_epi64(x, 0)));
  crc = step8(crc, static_cast<uint64_t>(_mm256_extract_epi64(x, 1)));
  crc = step8(crc, static_cast<uint64_t>(_mm256_extract_epi64(x, 2)));
  return step8(crc, static_cast<uint64_t>(_mm256_extract_epi64(x, 3)));
}

TL_WITH_FOLD inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// One block: `rounds` times 128 bytes that are folded, then three streams of `rounds` times 40 bytes that go by the instruction,
// both at once, since they keep different parts of the processor busy.
template <size_t rounds>
TL_WITH_FOLD uint32_t raw_mixed(uint32_t crc, const uint8_t*& p, size_t& n) {
  constexpr size_t folded = 128 * rounds, length = 40 * rounds, block = folded + 3 * length;
  constexpr uint32_t once = x_to(8 * length - 33), twice = x_to(16 * length - 33), thrice = x_to(24 * length - 33);
  const __m256i far = factors<8 * 128>(), near = factors<8 * 32>();
  for (; n >= block; p += block, n -= block) {
    const uint8_t *q = p, *s = p + folded;
    __m256i w = _mm256_xor_si256(load32(q), _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(crc))));
    __m256i x = load32(q + 32), y = load32(q + 64), z = load32(q + 96);
    uint32_t a = 0, b = 0, c = 0;
    for (size_t round = 1;; ++round) {
      for (int i = 0; i < 40; i += 8) {
        a = step8(a, load8(s + i));
        b = step8(b, load8(s + i + length));
        c = step8(c, load8(s + i + 2 * length));
      }
      if (round == rounds) break;
      q += 128, s += 40;
      w = fold(w, far, load32(q));
      x = fold(x, far, load32(q + 32));
      y = fold(y, far, load32(q + 64));
      z = fold(z, far, load32(q + 96));
    }
    crc = register_of(fold(fold(fold(w, near, x), near, y), near, z));
    crc = c ^ step8(0, carryless(crc, thrice) ^ carryless(a, twice) ^ carryless(b, once));
  }
  return crc;
}

TL_WITH_FOLD uint32_t raw_fold(uint32_t crc, const uint8_t* p, size_t n) {
  crc = raw_mixed<64>(crc, p, n);
  crc = raw_mixed<8>(crc, p, n);
  return raw_instruction(crc, p, n);
}

#endif

using Raw = uint32_t (*)(uint32_t, const uint8_t*, size_t);

template <Raw raw>
uint32_t whole(uint32_t crc, const void* data, size_t n) {
  return ~raw(~crc, static_cast<const uint8_t*>(data), n);
}

}  // namespace

std::vector<Crc32cWay> crc32c_ways() {
  std::vector<Crc32cWay> ways{{"table", whole<raw_table>}};
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
#if defined(__x86_64__) || defined(__aarch64__)
  if (has_crc()) ways.push_back({"instruction", whole<raw_instruction>});
#endif
#if defined(__x86_64__)
  if (has_crc() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq")) ways.push_back({"fold", whole<raw_fold>});
#endif
  return ways;
}

uint32_t crc32c(uint32_t crc, const void* data, size_t n) {
  static const auto update = crc32c_ways().back().update;
  return update(crc, data, n);
}

uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t nbytes) {
  return multiply(first, power(kByte, nbytes)) ^ second;
}

}  // namespace tl
