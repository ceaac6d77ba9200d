#include <algorithm>

#include "copy.h"
#include "python/codec.h"

namespace tl::python {

namespace {

constexpr uint64_t piece_nbytes = 1 << 20;                           // between two words of how far a copy is
constexpr size_t spare_leaves = 128 << 10, spare_nbytes = 16 << 20;  // beyond it nothing is kept for the next object
PackedRoom spare;                                                    // guarded by the GIL

}  // namespace

Packed::Packed() : PackedRoom(std::exchange(spare, {})) {
}

Packed::~Packed() {
  for (PyObject* object : objects) Py_DECREF(object);
  for (PyObject* object : kept) Py_DECREF(object);
  if (leaves.capacity() < spare.leaves.capacity() || leaves.capacity() > spare_leaves) return;
  if (meta.capacity() > spare_nbytes || sizeof(int64_t) * dims.capacity() > spare_nbytes) return;
  spare = std::move(*this);
  spare.meta.clear();
  spare.leaves.clear();
  spare.dims.clear();
  spare.objects.clear();
  spare.ids.clear();
  spare.slots.clear();
}

void copy_payload(const Packed& packed, char* to, const std::function<void(uint64_t)>& told) {
  const bool at_once = !told && (packed.leaves.size() == 1 || packed.nbytes < copy_threads_from);
  std::vector<CopySpan> spans;
  if (!at_once) spans.reserve(packed.leaves.size());
  uint64_t there = 0;
  for (const PackedLeaf& leaf : packed.leaves) {
    if (!leaf.dense) {
      StridedCopy(to + leaf.offset, nullptr, leaf.data, packed.strides(leaf), packed.shape(leaf), leaf.ndim,
                  itemsize(leaf.dtype))
          .run();
      continue;
    }
    if (at_once) copy_bytes(to + leaf.offset, leaf.data, leaf.nbytes);
    for (uint64_t at = 0, n; !at_once && at < leaf.nbytes; at += n) {
      n = told ? std::min(leaf.nbytes - at, piece_nbytes) : leaf.nbytes;
      spans.push_back({to + leaf.offset + at, leaf.data + at, n});
      if (!told || leaf.offset + at + n - there < piece_nbytes) continue;
      copy_spans(spans);
      spans.clear();
      told(there = leaf.offset + at + n);
    }
  }
  copy_spans(spans);
}

std::string Packed::meta_in_place(const Extent* extents, size_t count) const {
  std::vector<Place> places;
  places.reserve(leaves.size());
  for (const PackedLeaf& leaf : leaves) {
    int64_t low = 0, high = 0;
    if (leaf.nbytes &&
        (!byte_span(shape(leaf), strides(leaf), leaf.ndim, static_cast<int64_t>(itemsize(leaf.dtype)), &low, &high) ||
         leaf.nbytes > static_cast<uint64_t>(high - low)))
      return {};
    size_t i = 0;
    uint64_t offset = 0;
    for (; leaf.nbytes && i < count; ++i) {
      offset = reinterpret_cast<uintptr_t>(leaf.data) - reinterpret_cast<uintptr_t>(extents[i].data);
      if (offset < extents[i].nbytes && static_cast<uint64_t>(-low) <= offset &&
          static_cast<uint64_t>(high) <= extents[i].nbytes - offset)
        break;
    }
    if (i == count) return {};
    places.push_back({static_cast<uint32_t>(i), offset, leaf.dense ? nullptr : strides(leaf)});
  }
  return relocate(meta, places.data());
}

}  // namespace tl::python
