// Meta: the tree of an object, its layouts and places.
#include "../meta.h"

#include "fuzz.h"

using namespace tl;

namespace {

constexpr uint64_t kSizes[] = {1024, 64, 0, uint64_t{1} << 40};
constexpr size_t kExtents = sizeof kSizes / sizeof *kSizes;

template <class Read>
bool well_formed(Read read) {
  try {
    read();
    return true;
  } catch (const Corrupt&) {
    return false;
  }
}

// Each tensor in its extent, by wider arithmetic than the parser's.
void places_are_inside(const Tree& tree) {
  for (const Tree::Leaf& leaf : tree.leaves) {
    EXPECT(leaf.extent < kExtents);
    __int128 low = leaf.offset, high = low;
    bool empty = false;
    for (int i = 0; i < leaf.ndim; ++i) {
      __int128 reach = static_cast<__int128>(tree.shape(leaf)[i] - 1) * tree.strides(leaf)[i];
      (reach < 0 ? low : high) += reach;
      empty |= tree.shape(leaf)[i] == 0;
    }
    EXPECT(leaf.offset <= kSizes[leaf.extent] && (leaf.nbytes == 0) == empty);
    EXPECT(empty || (low >= 0 && high + static_cast<__int128>(itemsize(leaf.dtype)) <= kSizes[leaf.extent]));
  }
}

void look_at(const Tree& tree) {
  EXPECT(!tree.nodes.empty() && tree.leaves.size() == tree.header.leaves);
  for (size_t i = 0; i < tree.nodes.size(); i += 1 + tree.nodes.size() / 8) EXPECT(tree.path(static_cast<uint32_t>(i)).substr(0, 3) == "obj");
  for (const Tree::Node& node : tree.nodes) {
    EXPECT(node.parent == Tree::nil || is_container(tree.nodes[node.parent].tag));
    EXPECT(!is_tensor(node.tag) || node.leaf < tree.leaves.size());
  }
}

void move_elsewhere(std::string_view meta, const Tree& tree) {
  std::vector<Place> places;
  for (size_t i = 0; i < tree.leaves.size(); ++i) places.push_back({static_cast<uint32_t>(i), 64 * i, nullptr});
  const std::string moved = relocate(meta, places.data());
  const Tree again(moved);
  EXPECT(again.nodes.size() == tree.nodes.size() && again.leaves.size() == tree.leaves.size());
  for (size_t i = 0; i < tree.leaves.size(); ++i) EXPECT(again.leaves[i].nbytes == tree.leaves[i].nbytes && again.leaves[i].extent == i);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view meta(reinterpret_cast<const char*>(data), size);
  well_formed([&] {
    const Tree tree(meta);
    look_at(tree);
    move_elsewhere(meta, tree);
    if (well_formed([&] { tree.check_places(kSizes, kExtents); })) places_are_inside(tree);
  });
  well_formed([&] {  // also what is no tree: bindings read token by token
    Reader reader(meta.data(), meta.size());
    Token token;
    for (bool key = false; !reader.done(); key = !key)
      if (key && size % 2)
        reader.skip_key();
      else
        reader.next(token);
  });
  return 0;
}
