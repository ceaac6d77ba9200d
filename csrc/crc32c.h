// CRC32C, the checksum of iSCSI (Castagnoli's polynomial): finds what wires and memory break, not what an enemy forges. No
// function here allocates, blocks or throws, but for the list of ways; any thread may call them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tl {

// The checksum of the bytes that `crc` is the checksum of, followed by these; 0 is the checksum of no bytes. On this thread
// alone, as fast as this processor can.
uint32_t crc32c(uint32_t crc, const void* data, size_t n);

// The checksum of two parts in a row from those of the parts; `nbytes` is the length of the second. O(log nbytes).
uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t nbytes);

// A way to compute it. `update` is crc32c by that way.
struct Crc32cWay {
  const char* name;
  uint32_t (*update)(uint32_t crc, const void* data, size_t n);
};

// The ways that this processor can go, the slowest first. The last is the one that crc32c goes.
std::vector<Crc32cWay> crc32c_ways();

}  // namespace tl
