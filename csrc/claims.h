// The owner's side of the hold protocol (holds.h): which blocks stand, under which id, until when.
#pragma once
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "arena.h"
#include "hmac.h"
#include "holds.h"

namespace tl {

struct Span {  // memory of this process
  const char* data;
  uint64_t nbytes;
  uint64_t at;  // of the first byte, in the blocks of its claim, one after the other
};

// Memory of a claim that its owner is still filling, from the begin of its first block on. Only peers on other hosts, who ask for
// each byte, can read it so: on this host the claim doesn't stand before all is there.
struct Filling {
  std::atomic<uint64_t> valid{0};     // bytes that may be read
  std::atomic<bool> failed{false};    // no more will come
  std::atomic<bool> awaited{false};   // the progress thread has a reader that wants more
  // More may be read. True: the progress thread wants to know.
  bool advance(uint64_t now_valid) {
    valid.store(now_valid, std::memory_order_seq_cst);
    return awaited.exchange(false, std::memory_order_seq_cst);
  }
  // What is valid, for a reader who stops there unless it is beyond `at`.
  uint64_t look(uint64_t at) {
    if (uint64_t now = valid.load(std::memory_order_acquire); now > at) return now;
    awaited.store(true, std::memory_order_seq_cst);  // then look once more
    return valid.load(std::memory_order_seq_cst);
  }
};

struct Claim {
  Key key = random_key();    // what a reader on another host must show
  std::vector<std::shared_ptr<Block>> blocks;
  std::shared_ptr<Filling> filling;  // null: all of it is there
  bool counted = false;      // ends after `reads_left` reads
  uint64_t reads_left = 0;
  int64_t expires_ns = 0;    // ends then; 0: never
  uint64_t reader = 0;       // serial of the one peer (Outbound) that may read it, and with which it ends; 0: anyone
  std::set<std::pair<uint64_t, uint64_t>> tokens;  // acknowledgements that were counted
  bool passing() const { return expires_ns || counted || reader; }
  uint64_t nbytes() const {
    uint64_t n = 0;
    for (auto& block : blocks) n += block->extent().nbytes;
    return n;
  }
};

class Claims {
 public:
  // `held` visits the id of every hold that stands at that moment, over all readers.
  using Visit = std::function<void(ClaimId)>;
  using Holds = std::function<void(const Visit&)>;

  Claims(Generation* generations, Holds holds) : generations_(generations), holds_(std::move(holds)) {}

  // 0 when all slots are taken.
  ClaimId add(Claim claim) {
    std::lock_guard lock(mutex_);
    uint32_t slot;
    if (!free_slots_.empty()) {
      slot = free_slots_.back();
      free_slots_.pop_back();
    } else if (next_slot_ < kSlots) {
      slot = next_slot_++;
    } else {
      return 0;
    }
    uint64_t generation = generations_[slot].load(std::memory_order_relaxed) + 1;
    ClaimId id = make_id(slot, generation);
    if (claim.passing()) ++passing_;
    const bool whole = !claim.filling;
    claims_.emplace(id, std::move(claim));
    if (whole) generations_[slot].store(generation, std::memory_order_seq_cst);
    return id;
  }

  // All of a claim is there.
  void filled(ClaimId id) {
    std::lock_guard lock(mutex_);
    auto it = claims_.find(id);
    if (it == claims_.end()) return;
    it->second.filling.reset();
    generations_[slot_of(id)].store(generation_of(id), std::memory_order_seq_cst);
  }

  // Ends a claim: from now on nobody can take a hold of it. False when it doesn't stand.
  bool end(ClaimId id) {
    Claim claim;  // its blocks may be freed, outside the lock
    std::lock_guard lock(mutex_);
    return end_locked(id, claim);
  }

  // Memory of a claim for a reader who knows its key. The caller keeps `blocks` while it uses the spans: then the memory stays as
  // it is, also after the claim has ended. Throws Fault::stale, corrupt: the extents aren't in the claim.
  void lend(ClaimId id, const Key& key, const std::vector<Extent>& extents, std::vector<Span>& spans,
            std::vector<std::shared_ptr<Block>>& blocks, std::shared_ptr<Filling>& filling) {
    std::lock_guard lock(mutex_);
    auto it = claims_.find(id);
    if (it == claims_.end() || !same(it->second.key.data(), key.data(), key.size()))
      throw Error(Fault::stale, "the handle was released, has expired or never existed");
    blocks = it->second.blocks;
    filling = it->second.filling;
    for (const Extent& wanted : extents) {
      uint64_t before = 0;
      auto inside = [&](auto& block) {
        const Extent& own = block->extent();
        if (own.segment == wanted.segment && wanted.offset >= own.offset && wanted.nbytes <= own.nbytes &&
            wanted.offset - own.offset <= own.nbytes - wanted.nbytes)
          return true;
        before += own.nbytes;
        return false;
      };
      auto block = std::find_if(blocks.begin(), blocks.end(), inside);
      if (block == blocks.end()) throw Error(Fault::corrupt, "a descriptor names memory outside its claim");
      uint64_t offset = wanted.offset - (*block)->extent().offset;
      spans.push_back({(*block)->data() + offset, wanted.nbytes, before + offset});
    }
  }

  bool stands(ClaimId id) {
    std::lock_guard lock(mutex_);
    return claims_.count(id) != 0;
  }

  bool knows(ClaimId id, const Key& key) {
    std::lock_guard lock(mutex_);
    auto it = claims_.find(id);
    return it != claims_.end() && same(it->second.key.data(), key.data(), key.size());
  }

  // A reader has finished one read. Only claims that count reads care, and only the reader they are meant for counts.
  // True: that was the last one, and the claim has ended.
  // `token`: not 0: tells an acknowledgement that is repeated.
  bool acknowledged(ClaimId id, uint64_t reader, uint64_t token = 0) {
    Claim claim;
    std::lock_guard lock(mutex_);
    auto it = claims_.find(id);
    if (it == claims_.end() || !it->second.counted || (it->second.reader && it->second.reader != reader)) return false;
    if (token && !it->second.tokens.insert({reader, token}).second) return false;
    return --it->second.reads_left == 0 && end_locked(id, claim);
  }

  // Ends what has expired, and frees parked blocks that nobody holds any more. False: there was nothing to do.
  bool sweep(int64_t now) {
    std::vector<Claim> dropped;
    std::lock_guard lock(mutex_);
    std::vector<ClaimId> expired;
    if (passing_)
      for (auto& [id, claim] : claims_)
        if (claim.expires_ns && claim.expires_ns <= now) expired.push_back(id);
    for (ClaimId id : expired) end_locked(id, dropped.emplace_back());
    if (parked_.empty()) return !dropped.empty();
    std::unordered_set<ClaimId> held;
    holds_([&](ClaimId id) { held.insert(id); });
    for (auto it = parked_.begin(); it != parked_.end();) {
      if (held.count(it->first)) {
        ++it;
      } else {
        dropped.push_back(std::move(it->second));
        free_slots_.push_back(slot_of(it->first));
        it = parked_.erase(it);
      }
    }
    return !dropped.empty();
  }

  // The reader has gone: what was meant for it alone ends.
  void reader_gone(uint64_t reader) {
    std::vector<Claim> dropped;
    std::lock_guard lock(mutex_);
    std::vector<ClaimId> gone;
    for (auto& [id, claim] : claims_)
      if (claim.reader == reader) gone.push_back(id);
    for (ClaimId id : gone) end_locked(id, dropped.emplace_back());
  }

  bool meant_for(uint64_t reader) {
    std::lock_guard lock(mutex_);
    return passing_ && std::any_of(claims_.begin(), claims_.end(), [&](auto& entry) { return entry.second.reader == reader; });
  }

  bool restless() {  // something may end without a call of the owner
    std::lock_guard lock(mutex_);
    return passing_ || !parked_.empty();
  }
  bool any_parked() {
    std::lock_guard lock(mutex_);
    return !parked_.empty();
  }
  uint64_t standing_count() {
    std::lock_guard lock(mutex_);
    return claims_.size();
  }
  uint64_t standing_bytes() {
    std::lock_guard lock(mutex_);
    uint64_t n = 0;
    for (auto& [id, claim] : claims_) n += claim.nbytes();
    return n;
  }
  uint64_t parked_bytes() {
    std::lock_guard lock(mutex_);
    uint64_t n = 0;
    for (auto& [id, claim] : parked_) n += claim.nbytes();
    return n;
  }
  // Bytes behind an id, standing or parked; 0 when unknown. The id may come from a hostile reader's table.
  uint64_t nbytes(ClaimId id) {
    std::lock_guard lock(mutex_);
    if (auto it = claims_.find(id); it != claims_.end()) return it->second.nbytes();
    if (auto it = parked_.find(id); it != parked_.end()) return it->second.nbytes();
    return 0;
  }

 private:
  bool end_locked(ClaimId id, Claim& dropped) {
    auto it = claims_.find(id);
    if (it == claims_.end()) return false;
    generations_[slot_of(id)].store(generation_of(id) + 1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (it->second.passing()) --passing_;
    bool held = false;
    holds_([&](ClaimId other) { held |= other == id; });
    if (held) {
      parked_.emplace(id, std::move(it->second));
    } else {
      dropped = std::move(it->second);
      free_slots_.push_back(slot_of(id));
    }
    claims_.erase(it);
    return true;
  }

  Generation* generations_;
  Holds holds_;
  std::mutex mutex_;
  std::unordered_map<ClaimId, Claim> claims_, parked_;
  std::vector<uint32_t> free_slots_;
  uint32_t next_slot_ = 0;
  uint64_t passing_ = 0;  // claims that end by themselves
};

}  // namespace tl
