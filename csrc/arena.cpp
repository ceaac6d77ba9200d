#include "arena.h"

#include <algorithm>

#include "doorbell.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace tl {

namespace {
int64_t cpu_ns() {
  timespec t;
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}
}  // namespace

Block::~Block() { arena_->release(extent_); }

std::shared_ptr<Block> Arena::allocate(uint64_t nbytes) {
  if (nbytes > budget_) return nullptr;
  uint64_t want = round_up(std::max<uint64_t>(nbytes, 1), kPage);
  bool large = want >= kLarge;
  if (large) want = round_up(want, kHugePage);
  std::lock_guard lock(mutex_);
  if (want > budget_ || used_ > budget_ - want) return nullptr;
  Free found{};
  if (!best_fit(want, large, found)) {
    uint64_t size = large ? want : kChunk;
    if (!make_room(size)) {
      size = want;  // the budget is nearly spent: a segment of just the right size
      if (!make_room(size)) return nullptr;
    }
    found = {size, add_segment(size).id, 0};
  }
  return carve(found, want);
}

// A large block may waste at most a quarter of an idle segment that another one left.
bool Arena::best_fit(uint64_t want, bool large, Free& found) {
  auto at = in_chunks_.lower_bound({want, 0, 0});
  if (at != in_chunks_.end()) return found = *at, true;
  at = whole_.lower_bound({want, 0, 0});
  if (!large || at == whole_.end() || at->nbytes / 4 * 3 > want) return false;
  return found = *at, true;
}

std::shared_ptr<Block> Arena::carve(const Free& free, uint64_t want) {
  Segment& segment = segments_.at(free.segment);
  if (!segment.shared()) want = free.nbytes;
  remove_free(segment, segment.free.find(free.offset));
  if (free.nbytes > want) add_free(segment, free.offset + want, free.nbytes - want);
  auto block = std::make_shared<Block>(shared_from_this(), Extent{segment.id, free.offset, want}, segment.map.data() + free.offset);
  segment.live[free.offset] = block;
  used_ += want;
  return block;
}

void Arena::add_free(Segment& segment, uint64_t offset, uint64_t nbytes) {
  segment.free[offset] = nbytes;
  (segment.shared() ? in_chunks_ : whole_).insert({nbytes, segment.id, offset});
}

void Arena::remove_free(Segment& segment, std::map<uint64_t, uint64_t>::iterator at) {
  (segment.shared() ? in_chunks_ : whole_).erase({at->second, segment.id, at->first});
  segment.free.erase(at);
}

Arena::Segment& Arena::add_segment(uint64_t nbytes) {
  Segment made{next_id_, make_memfd("tensorlink", nbytes), {}, {}, {}, {}, 0};
  made.map = Map(made.fd.get(), nbytes, PROT_READ | PROT_WRITE, MAP_SHARED);
  made.warmed.resize((nbytes + kHugePage - 1) / kHugePage);
  Segment& segment = segments_.emplace(next_id_++, std::move(made)).first->second;
  by_address_[reinterpret_cast<uintptr_t>(segment.map.data())] = segment.id;
  committed_ += nbytes;
  add_free(segment, 0, nbytes);
  return segment;
}

std::map<uint32_t, Arena::Segment>::iterator Arena::drop_segment(std::map<uint32_t, Segment>::iterator at) {
  Segment& segment = at->second;
  committed_ -= segment.map.nbytes();
  by_address_.erase(reinterpret_cast<uintptr_t>(segment.map.data()));
  while (!segment.free.empty()) remove_free(segment, segment.free.begin());
  dropped_.push_back(segment.id);
  return segments_.erase(at);
}

// Idle segments count against the budget too: drop some when a new one needs their room.
bool Arena::make_room(uint64_t nbytes) {
  if (nbytes > budget_) return false;
  for (auto it = segments_.begin(); it != segments_.end() && committed_ > budget_ - nbytes;)
    it = it->second.live.empty() ? drop_segment(it) : std::next(it);
  return committed_ <= budget_ - nbytes;
}

void Arena::trim(int64_t idle_since) {
  std::lock_guard lock(mutex_);
  for (auto it = segments_.begin(); it != segments_.end();)
    it = it->second.live.empty() && it->second.idle_since < idle_since ? drop_segment(it) : std::next(it);
}

std::vector<uint32_t> Arena::take_dropped() {
  std::lock_guard lock(mutex_);
  return std::exchange(dropped_, {});
}

void Arena::release(const Extent& extent) {
  if (::getpid() != pid_) return;  // a forked child: the block is its parent's, and the lock may be held for ever
  std::lock_guard lock(mutex_);
  Segment& segment = segments_.at(extent.segment);
  segment.live.erase(extent.offset);
  if (segment.live.empty()) segment.idle_since = now_ns();
  used_ -= extent.nbytes;
  uint64_t start = extent.offset, end = extent.offset + extent.nbytes;
  auto next = segment.free.lower_bound(start);
  if (next != segment.free.end() && next->first == end) {
    end += next->second;
    auto gone = next++;
    remove_free(segment, gone);
  }
  if (next != segment.free.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == start) {
      start = before->first;
      remove_free(segment, before);
    }
  }
  add_free(segment, start, end - start);
}

std::shared_ptr<Block> Arena::find(const void* address, uint64_t nbytes) {
  std::unique_lock lock(mutex_);
  auto at = by_address_.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (at == by_address_.begin()) return nullptr;
  --at;
  Segment& segment = segments_.at(at->second);
  uint64_t offset = reinterpret_cast<uintptr_t>(address) - at->first;
  auto live = segment.live.upper_bound(offset);
  if (offset >= segment.map.nbytes() || live == segment.live.begin()) return nullptr;
  std::shared_ptr<Block> block = std::prev(live)->second.lock();
  lock.unlock();  // dropping what may be the last owner takes the lock again
  if (!block || nbytes > block->extent().nbytes || offset > block->extent().offset + block->extent().nbytes - nbytes) return nullptr;
  return block;
}

// Touching one page of a huge page and then collapsing it is ten times cheaper than faulting its 512 pages, and makes
// readers' faults cheap too, and the search for written pages when a view is dropped. The kernel may have to compact memory
// first (4 ms a page were seen where it was fragmented, instead of 0.3): stop once that has cost more than faults would. By
// the time of this thread, since on a busy host elapsed time says little.
void Arena::warm(const Block& block) {
  const Extent& extent = block.extent();
  if (extent.nbytes < kHugePage) return;
  std::vector<uint64_t> cold;
  {
    std::lock_guard lock(mutex_);
    Segment& segment = segments_.at(extent.segment);
    for (uint64_t i = round_up(extent.offset, kHugePage) / kHugePage; (i + 1) * kHugePage <= extent.offset + extent.nbytes; ++i)
      if (!segment.warmed[i]) segment.warmed[i] = true, cold.push_back(i * kHugePage - extent.offset);
  }
  constexpr int64_t kPatience = 250'000'000, kFaults = 4'000'000;  // once; for the 512 faults here and in each reader
  int64_t stop = cpu_ns() + kPatience;
  for (uint64_t at : cold) {
    *static_cast<volatile char*>(block.data() + at) = 0;
    if (::madvise(block.data() + at, kHugePage, MADV_COLLAPSE) != 0 || cpu_ns() > (stop += kFaults)) return;
  }
}

Fd Arena::share(uint32_t id, uint64_t& nbytes) {
  std::lock_guard lock(mutex_);
  auto it = segments_.find(id);
  if (it == segments_.end()) return Fd();
  nbytes = it->second.map.nbytes();
  return read_only(it->second.fd);
}

uint64_t Arena::used() {
  std::lock_guard lock(mutex_);
  return used_;
}

uint64_t Arena::committed() {
  std::lock_guard lock(mutex_);
  return committed_;
}

uint64_t Arena::blocks() {
  std::lock_guard lock(mutex_);
  uint64_t n = 0;
  for (auto& [id, segment] : segments_) n += segment.live.size();
  return n;
}

}  // namespace tl
