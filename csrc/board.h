// A board: the newest version of each named thing that a process publishes, in memory that its peers may only read.
//
// Each notice is a seqlock with one writer: odd while it is being written. A reader that sees the same even number
// before and after has read one whole notice. So peers learn of a version with no message, at any time, also while
// the publisher's interpreter is busy, and one that joins late sees the newest at once.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

namespace tl {

struct Notice {
  uint64_t version = 0;
  std::string descriptor;
};

struct BoardSlot {
  static constexpr size_t kName = 128, kDescriptor = 256;
  std::atomic<uint64_t> sequence;
  std::atomic<uint64_t> version;
  std::atomic<uint32_t> size;
  char name[kName];  // written once, before `sequence` leaves 0
  std::atomic<uint64_t> words[kDescriptor / 8];

  void write(uint64_t new_version, const std::string& descriptor) {
    uint64_t before = sequence.load(std::memory_order_relaxed);
    sequence.store(before + 1, std::memory_order_release);  // of the name, which find() reads from now on
    std::atomic_thread_fence(std::memory_order_release);
    uint64_t copy[kDescriptor / 8] = {};
    std::memcpy(copy, descriptor.data(), descriptor.size());
    version.store(new_version, std::memory_order_relaxed);
    size.store(static_cast<uint32_t>(descriptor.size()), std::memory_order_relaxed);
    for (size_t i = 0; i < kDescriptor / 8; ++i) words[i].store(copy[i], std::memory_order_relaxed);
    sequence.store(before + 2, std::memory_order_release);
  }
  // False while nothing was written, or while a writer is in the middle: try again.
  bool read(Notice& notice) const {
    uint64_t before = sequence.load(std::memory_order_acquire);
    if (before == 0 || (before & 1)) return false;
    uint64_t copy[kDescriptor / 8];
    uint64_t v = version.load(std::memory_order_relaxed);
    uint32_t n = size.load(std::memory_order_relaxed);
    for (size_t i = 0; i < kDescriptor / 8; ++i) copy[i] = words[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (sequence.load(std::memory_order_relaxed) != before || n > kDescriptor) return false;
    notice.version = v;
    notice.descriptor.assign(reinterpret_cast<const char*>(copy), n);
    return true;
  }
};

struct Board {
  static constexpr size_t kSlots = 64;
  BoardSlot slots[kSlots];

  // The slot of that name, or null. Names are compared within their field, since a peer may have written them.
  const BoardSlot* find(const std::string& name) const { return const_cast<Board*>(this)->find(name); }
  BoardSlot* find(const std::string& name) {
    for (BoardSlot& slot : slots)
      if (slot.sequence.load(std::memory_order_acquire) != 0 && name == std::string(slot.name, ::strnlen(slot.name, BoardSlot::kName)))
        return &slot;
    return nullptr;
  }
  // The slot of that name, made if need be; null when the board is full.
  BoardSlot* claim(const std::string& name) {
    if (BoardSlot* slot = find(name)) return slot;
    for (BoardSlot& slot : slots)
      if (slot.sequence.load(std::memory_order_relaxed) == 0) {
        std::memcpy(slot.name, name.data(), name.size());
        return &slot;
      }
    return nullptr;
  }
};

}  // namespace tl
