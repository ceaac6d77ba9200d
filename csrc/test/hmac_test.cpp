// SHA-256 and HMAC against published values; random keys never come twice, in a forked child neither.
#include "hmac.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

using namespace tl;

namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (uint8_t byte : digest) text += "0123456789abcdef"[byte >> 4], text += "0123456789abcdef"[byte & 15];
  return text;
}

// FIPS 180-2, appendix B.
void published_hashes() {
  CHECK(hex(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu")) ==
        "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK(hex(sha256(std::string(1'000'000, 'a'))) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// RFC 4231; case 5, a digest cut short, is left out.
void published_macs() {
  std::string counting;
  for (char c = 1; c <= 25; ++c) counting += c;
  const struct {
    std::string key, message;
    const char* mac;
  } cases[] = {
      {std::string(20, '\x0b'), "Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {"Jefe", "what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {std::string(20, '\xaa'), std::string(50, '\xdd'), "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {counting, std::string(50, '\xcd'), "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First",
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {std::string(131, '\xaa'),
       "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be hashed before "
       "being used by the HMAC algorithm.",
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  };
  for (const auto& c : cases) CHECK(hex(hmac_sha256(c.key, c.message)) == c.mac);
}

void same_compares_every_byte() {
  std::string a(100, 'x');
  for (size_t i = 0; i < a.size(); ++i)
    for (int bit = 0; bit < 8; ++bit) {
      std::string b = a;
      b[i] = static_cast<char>(b[i] ^ 1 << bit);
      CHECK(!same(a.data(), b.data(), a.size()) && same(a.data(), b.data(), i));
    }
  CHECK(same(a.data(), std::string(a).data(), a.size()) && same(nullptr, nullptr, 0));
}

void random_bytes_fill_it_all() {
  std::vector<uint8_t> bytes(3 << 20);  // more than the kernel gives in one piece when a signal comes
  random_bytes(bytes.data(), bytes.size());
  size_t seen[256] = {};
  for (uint8_t byte : bytes) ++seen[byte];
  for (size_t count : seen) CHECK(count > 10'000 && count < 14'600);  // 12288 expected, 110 the standard deviation
  for (size_t at = 0; at < bytes.size(); at += 4096) CHECK(std::count(&bytes[at], &bytes[at] + 64, 0) < 16);
}

std::vector<Key> draw(size_t n) {
  std::vector<Key> keys(n);
  for (Key& key : keys) key = random_key();
  return keys;
}

void all_differ(std::vector<Key> keys) {
  std::sort(keys.begin(), keys.end());
  CHECK(std::adjacent_find(keys.begin(), keys.end()) == keys.end());
}

void keys_differ_between_threads() {
  const size_t each = test::scaled(10'000);
  std::vector<Key> drawn[4], all;
  std::vector<std::thread> threads;
  for (auto& keys : drawn) threads.emplace_back([&keys, each] { keys = draw(each); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& keys : drawn) all.insert(all.end(), keys.begin(), keys.end());
  all_differ(all);
}

// Draws in this process and, below it, in a line of `depth` more; sends what they drew.
void draw_in_line(int depth, int to) {
  random_key();  // so that a part of the buffer is used, and the rest is there to be repeated
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    if (depth > 1) draw_in_line(depth - 1, to);
    const std::vector<Key> keys = draw(300);
    const auto nbytes = static_cast<ssize_t>(keys.size() * sizeof(Key));
    CHECK(write(to, keys.data(), keys.size() * sizeof(Key)) == nbytes);
    std::_Exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

void keys_differ_between_processes() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  draw_in_line(3, ends[1]);
  close(ends[1]);
  std::vector<Key> all = draw(300);
  Key key;
  while (read(ends[0], key.data(), key.size()) == static_cast<ssize_t>(key.size())) all.push_back(key);
  close(ends[0]);
  CHECK(all.size() == 4 * 300);
  all_differ(all);
}

}  // namespace

void tl::test::hmac_tests() {
  published_hashes();
  published_macs();
  same_compares_every_byte();
  random_bytes_fill_it_all();
  keys_differ_between_processes();
  keys_differ_between_threads();
}
