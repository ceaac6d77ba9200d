// Who is on the other side, shown without showing the secret: SHA-256, HMAC and random keys. For handshakes, not for bulk.
// Every function may be called from any thread.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "notes.h"

namespace tl {

using Digest = std::array<uint8_t, 32>;

// Source: FIPS 180-4.
Digest sha256(std::string_view message);

// Source: RFC 2104.
Digest hmac_sha256(std::string_view key, std::string_view message);

// Whether n bytes are equal; takes as long for any two contents.
bool same(const void* a, const void* b, size_t n);

// Fills memory from the kernel's generator. Waits only while the machine boots. Throws Fault::transport; the memory is
// then undefined.
void random_bytes(void* to, size_t n);

// The same for many keys, tens of nanoseconds each: they come out of a buffer that a forked child never shares. Throws as
// random_bytes does.
Key random_key();

}  // namespace tl
