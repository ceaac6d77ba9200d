// What the two ends of a stream say first: the hello and the welcome.
#include "../handshake.h"

#include "fuzz.h"

using namespace tl;
using fuzz::Bytes;

namespace {

const Nonce kAcceptors{1, 2, 3}, kDiallers{4, 5, 6};
const Key kKey{7, 8, 9};

void hear_it(std::string_view bytes, bool knows_key) {
  const size_t size = hello_size(bytes);
  if (bytes.size() < size || hello_size(bytes) != size) return;
  const Bytes hello(bytes.substr(0, size));
  const Heard heard = hear(hello.view(), kAcceptors, kKey);
  EXPECT(heard.knows_key || !knows_key);
  EXPECT(heard.knows_key == !heard.greeting.from.name.empty());
  for (const char* refusal : {"", "restarted"}) {
    const Bytes said(answer(heard, kAcceptors, kKey, refusal, 5));
    EXPECT(welcome_size(said.view()) == said.size());
    EXPECT(fuzz::good([&] { EXPECT(welcomed(said.view(), kAcceptors, heard.nonce, kKey) == 5); }) == !*refusal);
  }
}

void be_welcomed(std::string_view bytes) {
  const size_t size = welcome_size(bytes);
  if (bytes.size() < size) return;
  const Bytes welcome(bytes.substr(0, size));
  welcomed(welcome.view(), kAcceptors, kDiallers, kKey);
}

// The proof at the end of what has that size, as one who knows the key would write it.
Bytes sealed(Bytes bytes, size_t size, std::string purpose, const Nonce& diallers) {
  if (size < sizeof(Digest) || bytes.size() < size) return bytes;
  for (const Nonce& nonce : {kAcceptors, diallers}) purpose.append(reinterpret_cast<const char*>(nonce.data()), nonce.size());
  purpose.append(bytes.view().substr(0, size - sizeof(Digest)));
  bytes.put(size - sizeof(Digest), hmac_sha256({reinterpret_cast<const char*>(kKey.data()), kKey.size()}, purpose));
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const Bytes bytes(data, size);
  fuzz::good([&] { hear_it(bytes.view(), false); });
  fuzz::good([&] { be_welcomed(bytes.view()); });
  constexpr size_t kNonceAt = 32;  // in a hello
  Nonce nonce;
  if (bytes.get(kNonceAt, nonce)) fuzz::good([&] { hear_it(sealed(bytes, hello_size(bytes.view()), "tensorlink hello", nonce).view(), true); });
  fuzz::good([&] { be_welcomed(sealed(bytes, welcome_size(bytes.view()), "tensorlink welcome", kDiallers).view()); });
  return 0;
}
