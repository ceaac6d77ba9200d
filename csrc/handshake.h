// How two ends of a TCP stream show each other that they know the acceptor's key, which a peer has from the
// authenticated control channel. Nothing that is sent can be used again, or tells the key.
//
//   acceptor -> dialler   Challenge: a nonce
//   dialler  -> acceptor  Hello: who, to whom, what for, a nonce, where the dialler listens; HMAC over the challenge and all that
//   acceptor -> dialler   Welcome: accepted or why not; HMAC over both nonces and all that
//
// HMAC-SHA-256 (RFC 2104); a challenge and response each way, as in ISO/IEC 9798-4. The dialler's own key travels under a
// pad made from both nonces and the acceptor's key.
#pragma once
#include <array>
#include <string>
#include <string_view>

#include "connection.h"
#include "hmac.h"
#include "notes.h"
#include "socket.h"

namespace tl {

using Nonce = std::array<uint8_t, 16>;

enum class Role : uint16_t { lane = 1, reads = 2 };

// Where a peer's engine listens for other hosts, and what it wants to see there.
struct Contact {
  Address at;  // no host: it doesn't
  Key key{};
};

struct Greeting {
  Role role{};
  Identity from, to;
  Contact contact;  // of `from`
};

// ----- the dialler

struct Session {
  Socket socket;
  uint64_t received = 0;  // number of the last message that the acceptor had from us
  Digest secret{};        // that only the two ends know
};
// Connects and greets; `tls`: inside that, if there is any. Throws Fault::lost, timeout, cancelled; refused: the key is wrong, a certificate is, or what the acceptor says;
// transport: it has no room for another stream of ours.
Session greet(const Contact& to, const Greeting& greeting, const Tls* tls, const Patience& patience);

// ----- the acceptor: all without blocking

std::string challenge(const Nonce& nonce);
// Bytes that the hello has at least; the exact number once that many are there. Throws Fault::corrupt.
size_t hello_size(std::string_view so_far);
struct Heard {
  bool knows_key = false;  // else nothing else in it counts but the nonce, for an answer
  Greeting greeting;
  Nonce nonce;
  Digest secret;
};
// Throws Fault::corrupt: it is no hello.
Heard hear(std::string_view hello, const Nonce& ours, const Key& key);
// `refusal`: empty: welcome; else `received` is 1 where it is for want of room, and 0 for anything else.
std::string answer(const Heard& heard, const Nonce& ours, const Key& key, const std::string& refusal, uint64_t received);

// Of what is answered, for the dialler: its bytes, as with hello_size(); the number of the last message that was received.
// Throws Fault::refused: the key is wrong, or what the acceptor says; transport: it has no room.
size_t welcome_size(std::string_view so_far);
uint64_t welcomed(std::string_view welcome, const Nonce& theirs, const Nonce& ours, const Key& key);
// What a dialler says. In answer to the nonce `theirs`.
std::string hello(const Contact& to, const Greeting& greeting, const Nonce& theirs, const Nonce& ours);

// Hides a key, or shows it again, from all but the two ends; `number` must be another one for each key.
Key masked(const Key& key, const Digest& secret, uint64_t number);

}  // namespace tl
