// The pool: blocks of shared memory under one hard budget.
//
// Small blocks share segments of kChunk bytes; a large block has a segment of its own. Blocks are whole pages, so that a
// reader can map one copy-on-write without seeing a neighbour, and they are recycled warm: the first touch of a page
// costs many times the copy into it, so segments are kept until trim() finds them long idle.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "memory.h"

namespace tl {

struct Extent {  // where bytes are, as it stands in descriptors
  uint32_t segment = 0;
  uint64_t offset = 0;
  uint64_t nbytes = 0;
};

class Arena;

// One allocated span. It goes back to the arena when its last owner drops it; owners are claims and pool tensors.
class Block {
 public:
  Block(std::shared_ptr<Arena> arena, Extent extent, char* data) : arena_(std::move(arena)), extent_(extent), data_(data) {}
  ~Block();
  Block(const Block&) = delete;
  const Extent& extent() const { return extent_; }
  char* data() const { return data_; }

 private:
  std::shared_ptr<Arena> arena_;
  Extent extent_;
  char* data_;
};

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  static constexpr uint64_t kChunk = 64u << 20;
  static constexpr uint64_t kLarge = 16u << 20;

  explicit Arena(uint64_t budget) : budget_(budget), pid_(::getpid()) {}

  // A block of at least n bytes, or null when the budget has no room. The memory holds old bytes.
  std::shared_ptr<Block> allocate(uint64_t nbytes);
  // The live block that holds [address, address + n), or null.
  std::shared_ptr<Block> find(const void* address, uint64_t nbytes);
  // Makes the block's first touches cheap where the kernel can; call before filling it, without a lock.
  void warm(const Block& block);
  // A read-only descriptor of a segment, and its size; an empty one when there is no such segment.
  Fd share(uint32_t segment, uint64_t& nbytes);
  // Gives back segments that have held no block since `idle_since` (monotonic nanoseconds).
  void trim(int64_t idle_since);
  // Segments given back since the last call: readers may drop their mappings of them.
  std::vector<uint32_t> take_dropped();

  uint64_t budget() const { return budget_; }
  uint64_t used();       // bytes in live blocks
  uint64_t committed();  // bytes in segments, live or idle
  uint64_t blocks();

 private:
  friend class Block;
  struct Segment {
    uint32_t id;
    Fd fd;
    Map map;
    std::map<uint64_t, uint64_t> free;            // offset -> bytes, coalesced
    std::map<uint64_t, std::weak_ptr<Block>> live;  // offset -> block
    std::vector<bool> warmed;                      // one a huge page
    int64_t idle_since = 0;
    bool shared() const { return map.nbytes() == kChunk; }
  };
  struct Free {  // ordered by size: the first that is large enough is the best fit
    uint64_t nbytes;
    uint32_t segment;
    uint64_t offset;
    bool operator<(const Free& o) const { return std::tie(nbytes, segment, offset) < std::tie(o.nbytes, o.segment, o.offset); }
  };
  using Frees = std::set<Free>;

  void release(const Extent& extent);
  Segment& add_segment(uint64_t nbytes);
  std::map<uint32_t, Segment>::iterator drop_segment(std::map<uint32_t, Segment>::iterator at);
  bool make_room(uint64_t nbytes);
  bool best_fit(uint64_t nbytes, bool large, Free& found);
  std::shared_ptr<Block> carve(const Free& free, uint64_t nbytes);
  void add_free(Segment& segment, uint64_t offset, uint64_t nbytes);
  void remove_free(Segment& segment, std::map<uint64_t, uint64_t>::iterator at);

  const uint64_t budget_;
  const pid_t pid_;
  std::mutex mutex_;
  std::map<uint32_t, Segment> segments_;
  std::map<uintptr_t, uint32_t> by_address_;
  Frees in_chunks_, whole_;  // free spans of shared segments, and idle segments of one block
  std::vector<uint32_t> dropped_;
  uint64_t used_ = 0, committed_ = 0;
  uint32_t next_id_ = 1;
};

}  // namespace tl
