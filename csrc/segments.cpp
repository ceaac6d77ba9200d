#include "segments.h"

#include <sys/ioctl.h>

namespace tl {

namespace {

// Kernel ABI of ioctl(PAGEMAP_SCAN), Linux 6.7, declared here since older headers lack it (linux/fs.h).
struct PageRegion {
  uint64_t start, end, categories;
};
struct PagemapScan {
  uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
  uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
constexpr uint64_t kIsFile = 1 << 2, kIsPresent = 1 << 3, kIsSwapped = 1 << 4;

}  // namespace

void Pagemap::discard_written(char* start, uint64_t nbytes) const {
  PageRegion regions[64];
  PagemapScan scan{};
  scan.size = sizeof scan;
  scan.start = reinterpret_cast<uint64_t>(start);
  scan.end = scan.start + round_up(nbytes, kPage);
  scan.vec = reinterpret_cast<uint64_t>(regions);
  scan.vec_len = 64;
  scan.category_inverted = kIsFile;  // a written page is no longer the file's
  scan.category_mask = kIsFile;
  scan.category_anyof_mask = kIsPresent | kIsSwapped;
  scan.return_mask = kIsPresent;
  while (scan.start < scan.end) {
    int n = fd_ ? ::ioctl(fd_.get(), _IOWR('f', 16, PagemapScan), &scan) : -1;
    if (n < 0) {  // an older kernel, or a sandbox: discard all
      ::madvise(reinterpret_cast<void*>(scan.start), scan.end - scan.start, MADV_DONTNEED);
      return;
    }
    for (int i = 0; i < n; ++i)
      ::madvise(reinterpret_cast<void*>(regions[i].start), regions[i].end - regions[i].start, MADV_DONTNEED);
    scan.start = scan.walk_end;
  }
}

bool Segments::known(uint32_t id) {
  std::lock_guard lock(mutex_);
  return segments_.count(id) != 0;
}

void Segments::add(uint32_t id, Fd fd, uint64_t nbytes) {
  constexpr size_t kMost = 4096;  // each costs a descriptor
  std::lock_guard lock(mutex_);
  if (segments_.count(id)) return;
  if (segments_.size() >= kMost) throw Error(Fault::corrupt, "a peer sends more segments than a pool has");
  Segment segment{};
  segment.fd = std::move(fd);
  segment.nbytes = nbytes;
  segments_.emplace(id, std::move(segment));
}

bool Segments::use(uint32_t id) {
  std::lock_guard lock(mutex_);
  auto it = segments_.find(id);
  if (it == segments_.end() || it->second.forgotten) return false;
  ++it->second.uses;
  return true;
}

void Segments::unuse(uint32_t id) {
  std::lock_guard lock(mutex_);
  auto it = segments_.find(id);
  if (it != segments_.end() && --it->second.uses == 0 && it->second.forgotten) segments_.erase(it);
}

void Segments::forget(uint32_t id) {
  std::lock_guard lock(mutex_);
  auto it = segments_.find(id);
  if (it == segments_.end()) return;
  it->second.forgotten = true;
  if (it->second.uses == 0) segments_.erase(it);
}

Segments::Segment& Segments::at(const Extent& extent) {
  auto it = segments_.find(extent.segment);
  if (it == segments_.end()) throw Error(Fault::stale, "the memory that the handle names has been given back");
  Segment& segment = it->second;
  if (extent.offset > segment.nbytes || extent.nbytes > segment.nbytes - extent.offset)
    throw Error(Fault::corrupt, "a handle names memory outside its segment");
  return segment;
}

const char* Segments::shared(const Extent& extent) {
  std::lock_guard lock(mutex_);
  Segment& segment = at(extent);
  if (!segment.shared) segment.shared = Map(segment.fd.get(), segment.nbytes, PROT_READ, MAP_SHARED);
  return segment.shared.data() + extent.offset;
}

Lent Segments::lend(const Extent& extent) {
  std::lock_guard lock(mutex_);
  Segment& segment = at(extent);
  uint64_t start = extent.offset, end = round_up(extent.offset + extent.nbytes, kPage);
  if (start % kPage) throw Error(Fault::corrupt, "a handle names a block that does not start on a page");
  for (uint32_t i = 0;; ++i) {
    if (i == segment.privates.size())
      segment.privates.push_back({Map(segment.fd.get(), segment.nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE), {}});
    Private& mapping = segment.privates[i];
    auto next = mapping.lent.lower_bound(end);
    if (next != mapping.lent.begin() && std::prev(next)->second > start) continue;
    mapping.lent[start] = end;
    return {extent, i, mapping.map.data() + start};
  }
}

void Segments::give_back(const Lent& lent) {
  pagemap_.discard_written(lent.data, lent.extent.nbytes);
  std::lock_guard lock(mutex_);
  segments_.at(lent.extent.segment).privates[lent.mapping].lent.erase(lent.extent.offset);
}

}  // namespace tl
