#include "handshake.h"

#include "point.h"

namespace tl {

namespace {

constexpr uint32_t kMagic = 0x31534c54;  // "TLS1"
constexpr size_t kMaxBody = 2048;

struct ChallengeBytes {
  uint32_t magic, version;
  Nonce nonce;
};

struct HelloHead {
  uint32_t magic;
  uint16_t role, port;
  uint32_t body_size, zero;
  uint64_t incarnation, to_incarnation;
  Nonce nonce;
  Key masked_key;
};

struct WelcomeHead {
  uint32_t magic;
  uint16_t accepted, text_size;
  uint64_t received;  // of who isn't accepted: 1: there is no room for it, else 0
};

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

Digest mac(const Key& key, std::string_view purpose, const Nonce& first, const Nonce& second, std::string_view text) {
  std::string all(purpose);
  all += bytes_of(first);
  all += bytes_of(second);
  all += text;
  return hmac_sha256(bytes_of(key), all);
}

Key differ(const Key& key, const Digest& pad) {
  Key result;
  for (size_t i = 0; i < result.size(); ++i) result[i] = key[i] ^ pad[i];
  return result;
}

Key masked(const Key& secret, const Key& key, const Nonce& acceptors, const Nonce& diallers) {
  return differ(secret, mac(key, "tensorlink pad", acceptors, diallers, {}));
}

}  // namespace

std::string hello(const Contact& to, const Greeting& greeting, const Nonce& theirs, const Nonce& ours) {
  const Contact& mine = greeting.contact;
  std::string body = greeting.from.name + '\0' + greeting.to.name + '\0' + mine.at.host;
  HelloHead head{kMagic, static_cast<uint16_t>(greeting.role), mine.at.port, static_cast<uint32_t>(body.size()), 0,
                 greeting.from.incarnation, greeting.to.incarnation, ours, masked(mine.key, to.key, theirs, ours)};
  std::string text = std::string(bytes_of(head)) + body;
  Digest proof = mac(to.key, "tensorlink hello", theirs, ours, text);
  return text.append(bytes_of(proof));
}

namespace {

// What the acceptor says first. That it refuses our certificate is heard only then.
ChallengeBytes challenged(Socket& socket, const Contact& to, const Tls* tls, const Patience& patience) {
  try {
    if (tls) {
      socket.secure(*tls, false);
      shake_hands(socket, patience);
    }
    ChallengeBytes theirs;
    receive_all(socket, &theirs, sizeof theirs, patience);
    return theirs;
  } catch (const Error& error) {
    if (error.fault != Fault::refused) throw;
    throw Error(Fault::refused, to.at.text() + ": " + error.what());
  }
}

}  // namespace

Session greet(const Contact& to, const Greeting& greeting, const Tls* tls, const Patience& patience) {
  Session session{dial(to.at, patience)};
  Socket& socket = session.socket;
  Stop::Guard guard(patience.stop, socket.get());
  ChallengeBytes theirs = challenged(socket, to, tls, patience);
  if (theirs.magic != kMagic) throw Error(Fault::refused, "whatever listens at " + to.at.text() + " is no peer of ours");
  if (theirs.version != Note::kVersion) throw Error(Fault::refused, "the peer speaks another version of the protocol");
  Nonce ours;
  random_bytes(ours.data(), ours.size());
  std::string text = hello(to, greeting, theirs.nonce, ours);
  send_all(socket, text.data(), text.size(), patience);
  point("handshake", "greeted");
  std::string welcome(welcome_size({}), '\0');
  receive_all(socket, welcome.data(), welcome.size(), patience);
  const size_t head_size = welcome.size();
  welcome.resize(welcome_size(welcome));
  receive_all(socket, welcome.data() + head_size, welcome.size() - head_size, patience);
  session.received = welcomed(welcome, theirs.nonce, ours, to.key);
  session.secret = mac(to.key, "tensorlink secret", theirs.nonce, ours, {});
  return session;
}

size_t welcome_size(std::string_view so_far) {
  WelcomeHead head;
  if (so_far.size() < sizeof head) return sizeof head;
  std::memcpy(&head, so_far.data(), sizeof head);
  if (head.magic != kMagic || head.text_size > kMaxBody) throw Error(Fault::refused, "the key is wrong");
  return sizeof head + head.text_size + sizeof(Digest);
}

uint64_t welcomed(std::string_view welcome, const Nonce& theirs, const Nonce& ours, const Key& key) {
  WelcomeHead head;
  std::memcpy(&head, welcome.data(), sizeof head);
  std::string_view said = welcome.substr(0, welcome.size() - sizeof(Digest));
  Digest proof = mac(key, "tensorlink welcome", theirs, ours, said);
  if (!same(proof.data(), welcome.data() + said.size(), sizeof proof)) throw Error(Fault::refused, "the key is wrong");
  if (!head.accepted) throw Error(head.received ? Fault::transport : Fault::refused, std::string(said.substr(sizeof head)));
  return head.received;
}

std::string challenge(const Nonce& nonce) {
  ChallengeBytes bytes{kMagic, Note::kVersion, nonce};
  return std::string(bytes_of(bytes));
}

size_t hello_size(std::string_view so_far) {
  HelloHead head;
  if (so_far.size() < sizeof head) return sizeof head;
  std::memcpy(&head, so_far.data(), sizeof head);
  if (head.magic != kMagic || head.body_size > kMaxBody) throw Error(Fault::corrupt, "what it said is no greeting");
  return sizeof head + head.body_size + sizeof(Digest);
}

Heard hear(std::string_view hello, const Nonce& ours, const Key& key) {
  HelloHead head;
  std::memcpy(&head, hello.data(), sizeof head);
  std::string_view text = hello.substr(0, hello.size() - sizeof(Digest));
  Digest proof = mac(key, "tensorlink hello", ours, head.nonce, text);
  if (!same(proof.data(), hello.data() + text.size(), sizeof proof)) return {false, {}, head.nonce, {}};
  std::string body(text.substr(sizeof head));
  size_t first = body.find('\0'), second = body.find('\0', first + 1);
  if (first == std::string::npos || first == 0 || second == std::string::npos) throw Error(Fault::corrupt, "its greeting cannot be read");
  Heard heard{true, {}, head.nonce, mac(key, "tensorlink secret", ours, head.nonce, {})};
  heard.greeting.role = static_cast<Role>(head.role);
  heard.greeting.from = {body.substr(0, first), head.incarnation};
  heard.greeting.to = {body.substr(first + 1, second - first - 1), head.to_incarnation};
  heard.greeting.contact = {{body.substr(second + 1), head.port}, masked(head.masked_key, key, ours, head.nonce)};
  return heard;
}

std::string answer(const Heard& heard, const Nonce& ours, const Key& key, const std::string& refusal, uint64_t received) {
  std::string text = refusal.substr(0, kMaxBody);
  WelcomeHead head{kMagic, refusal.empty(), static_cast<uint16_t>(text.size()), received};
  std::string said = std::string(bytes_of(head)) + text;
  Digest proof = mac(key, "tensorlink welcome", ours, heard.nonce, said);
  return said.append(bytes_of(proof));
}

Key masked(const Key& key, const Digest& secret, uint64_t number) {
  return differ(key, hmac_sha256(bytes_of(secret), bytes_of(number)));
}

}  // namespace tl
