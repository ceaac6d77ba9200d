// A reader's mappings of a peer's pool segments, made once and kept.
//
// Two kinds of views. Shared: read-only, for frameworks that can express it. Private: copy-on-write, for those that
// can't (a torch tensor is always writable); what its user writes stays in pages of this process. A private span is lent
// to one view at a time: a second view of it uses another mapping. When it comes back, pages that were written are
// discarded, or a later block at the same place would show the old ones.
#pragma once
#include <map>
#include <mutex>
#include <vector>

#include "arena.h"

namespace tl {

class Pagemap {  // finds written pages of private mappings of this process
 public:
  Pagemap() : fd_(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {}
  void discard_written(char* start, uint64_t nbytes) const;

 private:
  Fd fd_;
};

struct Lent {  // a private span, to be given back
  Extent extent;
  uint32_t mapping;
  char* data;
};

class Segments {
 public:
  bool known(uint32_t id);
  void add(uint32_t id, Fd fd, uint64_t nbytes);
  // Reserves the segment against forget() for one view of it; false when it isn't known. Undo with unuse().
  bool use(uint32_t id);
  void unuse(uint32_t id);
  // Address of an extent in the shared mapping. Throws Fault::corrupt when it lies outside.
  const char* shared(const Extent& extent);
  Lent lend(const Extent& extent);
  void give_back(const Lent& lent);
  // The owner has dropped this segment: so do we, once no view uses it.
  void forget(uint32_t id);

 private:
  struct Private {
    Map map;
    std::map<uint64_t, uint64_t> lent;  // offset -> end
  };
  struct Segment {
    Fd fd;
    uint64_t nbytes;
    Map shared;
    std::vector<Private> privates;
    uint64_t uses = 0;
    bool forgotten = false;
  };
  Segment& at(const Extent& extent);

  std::mutex mutex_;
  std::map<uint32_t, Segment> segments_;
  Pagemap pagemap_;
};

}  // namespace tl
