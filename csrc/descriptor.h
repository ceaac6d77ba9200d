// Where an object lies in a pool, as it stands in handles and messages: the claim that keeps it and its extents.
//
//   u64 claim, 16 bytes key, u16 extents of the payload, u8 1 if one more extent holds the meta, u8 how reads are counted,
//   u32 CRC32C of the payload and u64 1 if there is one, then (u64 segment, offset, nbytes) each
//
// The key is what another host must show to read the claim; nobody can guess it.
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "arena.h"
#include "holds.h"
#include "notes.h"

namespace tl {

// Extents as they stand on every wire: three words each. Reading checks their form, and throws Fault::corrupt; whether they lie
// inside something is checked where they are used.
constexpr size_t kExtentSize = 24;

inline void append_extents(std::string& bytes, const std::vector<Extent>& extents) {
  for (const Extent& extent : extents) {
    uint64_t words[3] = {extent.segment, extent.offset, extent.nbytes};
    bytes.append(reinterpret_cast<const char*>(words), sizeof words);
  }
}

inline std::vector<Extent> read_extents(const char* bytes, size_t count) {
  std::vector<Extent> extents;
  extents.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    uint64_t words[3];
    std::memcpy(words, bytes + i * sizeof words, sizeof words);
    if (words[0] > UINT32_MAX || words[1] + words[2] < words[1]) throw Error(Fault::corrupt, "a descriptor names an impossible extent");
    extents.push_back({static_cast<uint32_t>(words[0]), words[1], words[2]});
  }
  return extents;
}

struct Descriptor {
  ClaimId claim = 0;
  Key key{};
  bool meta_in_pool = false;  // then the last extent is the meta
  enum Count : uint8_t { none, acknowledge, tell };  // `tell`: acknowledge, and wake the owner, who counts exactly
  Count counted = none;
  bool checked = false;  // there is a checksum
  uint32_t crc = 0;
  std::vector<Extent> extents;

  size_t payload_count() const { return extents.size() - (meta_in_pool ? 1 : 0); }

  std::string encode() const {
    Head head{claim, key, static_cast<uint16_t>(payload_count()), meta_in_pool, counted, crc, checked};
    std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
    append_extents(bytes, extents);
    return bytes;
  }

  // Checks the form; whether the extents lie inside their segments is checked where they are mapped.
  static Descriptor decode(std::string_view bytes) {
    Head head;
    if (bytes.size() < sizeof head) throw Error(Fault::corrupt, "a descriptor is too short");
    std::memcpy(&head, bytes.data(), sizeof head);
    size_t count = size_t{head.payload_extents} + (head.meta_in_pool ? 1 : 0);
    if (head.meta_in_pool > 1 || head.counted > tell || head.checked > 1 || bytes.size() != sizeof head + count * kExtentSize) throw Error(Fault::corrupt, "a descriptor has a wrong length");
    Descriptor result{head.claim, head.key, head.meta_in_pool == 1, static_cast<Count>(head.counted), head.checked == 1, head.crc, {}};
    result.extents = read_extents(bytes.data() + sizeof head, count);
    return result;
  }

 private:
  struct Head {
    ClaimId claim;
    Key key;
    uint16_t payload_extents;
    uint8_t meta_in_pool, counted;
    uint32_t crc;
    uint64_t checked;
  };
};

}  // namespace tl
