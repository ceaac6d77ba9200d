#include "hmac.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>

#include "error.h"

namespace tl {

namespace {

// The first 32 bits of the fractions of the cube roots of the first 64 primes.
constexpr uint32_t kRoots[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

class Sha256 {
 public:
  static constexpr size_t kBlock = 64;

  ~Sha256() { explicit_bzero(this, sizeof *this); }  // it may have read a key

  void update(const void* data, size_t n) {
    auto* from = static_cast<const uint8_t*>(data);
    size_ += n;
    while (n) {
      const size_t part = std::min(n, kBlock - filled_);
      std::memcpy(block_ + filled_, from, part);
      filled_ += part, from += part, n -= part;
      if (filled_ == kBlock) compress(), filled_ = 0;
    }
  }

  // Call once, last.
  Digest finish() {
    const uint64_t bits = size_ * 8;
    const uint8_t one = 0x80, zero = 0;
    update(&one, 1);
    while (filled_ != kBlock - 8) update(&zero, 1);
    uint8_t length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
    update(length, sizeof length);
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - i % 4 * 8));
    return digest;
  }

 private:
  static uint32_t turn(uint32_t x, int n) { return x >> n | x << (32 - n); }

  void compress() {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i)
      w[i] = uint32_t{block_[4 * i]} << 24 | uint32_t{block_[4 * i + 1]} << 16 | uint32_t{block_[4 * i + 2]} << 8 | block_[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3;
      const uint32_t s1 = turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (int i = 0; i < 64; ++i) {
      const uint32_t t1 = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + kRoots[i] + w[i];
      const uint32_t t2 = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const uint32_t worked[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state_[i] += worked[i];
  }

  // The same of the square roots of the first 8 primes.
  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t block_[kBlock];
  size_t filled_ = 0;
  uint64_t size_ = 0;
};

// Random bytes that are not given out yet, in one page which the kernel clears in a forked child. That is safe where a pid to
// compare is not (pids come again), costs no system call, and leaves the child a lock that is free whoever held it: glibc's
// and musl's free mutex is all zeros.
struct RandomPage {
  static constexpr size_t kPage = 4096, kKeys = (kPage - 64) / sizeof(Key);

  std::mutex lock;
  size_t left = 0;  // keys[0..left) are unused
  Key keys[kKeys];

  // Null: this kernel has no such memory.
  static RandomPage* make() {
    void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return nullptr;
    // An emulator that says yes to anything doesn't do it.
    if (madvise(page, kPage, MADV_WIPEONFORK) == 0 && madvise(page, kPage, -1) != 0) return new (page) RandomPage;
    munmap(page, kPage);
    return nullptr;
  }
};
static_assert(sizeof(RandomPage) <= RandomPage::kPage);

}  // namespace

Digest sha256(std::string_view message) {
  Sha256 hash;
  hash.update(message.data(), message.size());
  return hash.finish();
}

Digest hmac_sha256(std::string_view key, std::string_view message) {
  std::array<uint8_t, Sha256::kBlock> inner{}, outer;
  if (key.size() > inner.size()) {
    const Digest shorter = sha256(key);
    std::copy(shorter.begin(), shorter.end(), inner.begin());
  } else {
    std::copy(key.begin(), key.end(), inner.begin());
  }
  for (size_t i = 0; i < inner.size(); ++i) outer[i] = inner[i] ^ 0x5c, inner[i] ^= 0x36;
  Sha256 first, second;
  first.update(inner.data(), inner.size());
  first.update(message.data(), message.size());
  const Digest digest = first.finish();
  second.update(outer.data(), outer.size());
  second.update(digest.data(), digest.size());
  explicit_bzero(inner.data(), inner.size());
  explicit_bzero(outer.data(), outer.size());
  return second.finish();
}

bool same(const void* a, const void* b, size_t n) {
  auto* left = static_cast<const volatile uint8_t*>(a);  // volatile: no early end, no memcmp
  auto* right = static_cast<const volatile uint8_t*>(b);
  uint8_t differ = 0;
  for (size_t i = 0; i < n; ++i) differ |= left[i] ^ right[i];
  return differ == 0;
}

void random_bytes(void* to, size_t n) {
  auto* next = static_cast<uint8_t*>(to);
  while (n) {
    const ssize_t got = getrandom(next, n, 0);
    if (got < 0 && errno != EINTR) throw_errno("getrandom");
    if (got > 0) next += got, n -= static_cast<size_t>(got);
  }
}

Key random_key() {
  static RandomPage* const page = RandomPage::make();  // lives as long as the process
  Key key;
  if (!page) {
    random_bytes(key.data(), key.size());
    return key;
  }
  std::lock_guard<std::mutex> locked(page->lock);
  if (page->left == 0) {
    random_bytes(page->keys, sizeof page->keys);
    page->left = RandomPage::kKeys;
  }
  Key& given = page->keys[--page->left];
  key = given;
  explicit_bzero(given.data(), given.size());
  return key;
}

}  // namespace tl
