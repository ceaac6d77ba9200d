// Claims and holds: who may still read a block of the pool, agreed between processes without a message.
//
// A claim is the owner's word that some blocks stay as they are; it is named by (slot, generation), packed into 64
// bits, which is also the id of a handle. The owner keeps each slot's generation in memory that readers may only read.
// A hold is a reader's word that it reads a claim; it is an entry in a table that the owner made for that one reader.
//
//   take (reader)   write the id into my entry; full fence; read the slot's generation again; if it has changed, clear
//                   the entry: the handle is stale
//   end (owner)     bump the generation; full fence; scan every reader's entries; while one names the id, the claim is
//                   parked and its blocks aren't recycled
//
// The fences order "write entry, read generation" against "write generation, read entries", so at least one side sees
// the other (Dekker's argument, as in hazard pointers). A hold ends when the reader clears it, or when every process
// that could use its mapping has gone: the kernel then closes the connection's socket.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace tl {

using ClaimId = uint64_t;

constexpr unsigned kSlotBits = 20;
constexpr uint32_t kSlots = 1u << kSlotBits;  // claims that one owner can have at a time

inline uint32_t slot_of(ClaimId id) { return static_cast<uint32_t>(id & (kSlots - 1)); }
inline uint64_t generation_of(ClaimId id) { return id >> kSlotBits; }
inline ClaimId make_id(uint32_t slot, uint64_t generation) { return (generation << kSlotBits) | slot; }

inline bool standing(ClaimId id) { return generation_of(id) & 1; }

// One generation a slot; in the owner's control segment, read-only for readers. Odd: the claim stands.
using Generation = std::atomic<uint64_t>;

// Shared part of a hold table: the owner makes it, one reader fills it.
struct HoldTableHeader {
  static constexpr uint32_t kEntries = 1u << 16;
  static constexpr uint32_t kAcks = 1u << 12;
  alignas(64) std::atomic<uint32_t> used;    // entries below this index may be set; grows only
  std::atomic<uint32_t> owner_waits;         // the owner wants to be told when a hold ends or an acknowledgement comes
  alignas(64) std::atomic<uint64_t> drained;  // acknowledgements that the owner has seen
  alignas(64) std::atomic<uint64_t> acked;   // acknowledgements ever written
  std::atomic<uint64_t> acks[kAcks];         // ring of claim ids that the reader has taken over; the owner drains it
  alignas(64) std::atomic<uint64_t> entries[kEntries];  // ids held, 0 where free
};

// Owner's view. All of it is checked: the reader may be hostile, and can then harm only its own holds.
class HoldsOfReader {
 public:
  explicit HoldsOfReader(HoldTableHeader* table) : table_(table) {}

  template <class Visit>
  void scan(Visit visit) const {
    uint32_t used = std::min(table_->used.load(std::memory_order_seq_cst), HoldTableHeader::kEntries);
    for (uint32_t i = 0; i < used; ++i)
      if (uint64_t id = table_->entries[i].load(std::memory_order_seq_cst)) visit(id);
  }
  template <class Visit>
  void drain_acks(Visit visit) {
    uint64_t acked = table_->acked.load(std::memory_order_acquire);
    if (acked - drained_ > HoldTableHeader::kAcks) drained_ = acked - HoldTableHeader::kAcks;  // only a hostile reader
    for (; drained_ != acked; ++drained_)
      visit(table_->acks[drained_ % HoldTableHeader::kAcks].load(std::memory_order_relaxed));
    table_->drained.store(drained_, std::memory_order_release);
  }
  void want_news(bool wanted) { table_->owner_waits.store(wanted, std::memory_order_seq_cst); }

 private:
  HoldTableHeader* table_;
  uint64_t drained_ = 0;
};

// Reader's view; the caller serialises its use.
class HoldsOfMine {
 public:
  explicit HoldsOfMine(HoldTableHeader* table) : table_(table) {}

  static constexpr uint32_t kNone = ~0u;

  // Entry index, or kNone when the table is full. `stale` tells whether the claim had ended.
  uint32_t take(ClaimId id, const Generation* generations, bool& stale) {
    stale = false;
    uint32_t entry = next_free();
    if (entry == kNone) return kNone;
    table_->entries[entry].store(id, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!standing(id) || generations[slot_of(id)].load(std::memory_order_seq_cst) != generation_of(id)) {
      clear(entry);
      stale = true;
      return kNone;
    }
    return entry;
  }
  void clear(uint32_t entry) {
    table_->entries[entry].store(0, std::memory_order_seq_cst);
    free_.push_back(entry);
  }
  // Tells the owner that a read of the claim is over: a hold or a copy has taken its place. False: no room for it.
  bool acknowledge(ClaimId id) {
    if (acked_ - table_->drained.load(std::memory_order_acquire) >= HoldTableHeader::kAcks) return false;
    table_->acks[acked_ % HoldTableHeader::kAcks].store(id, std::memory_order_relaxed);
    table_->acked.store(++acked_, std::memory_order_seq_cst);
    return true;
  }
  bool owner_waits() const { return table_->owner_waits.load(std::memory_order_seq_cst) != 0; }
  uint32_t count() const { return high_ - static_cast<uint32_t>(free_.size()); }

 private:
  uint32_t next_free() {
    if (!free_.empty()) {
      uint32_t entry = free_.back();
      free_.pop_back();
      return entry;
    }
    if (high_ == HoldTableHeader::kEntries) return kNone;
    table_->used.store(high_ + 1, std::memory_order_seq_cst);
    return high_++;
  }

  HoldTableHeader* table_;
  std::vector<uint32_t> free_;
  uint32_t high_ = 0;
  uint64_t acked_ = 0;
};

}  // namespace tl
