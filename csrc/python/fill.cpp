#include <algorithm>
#include <cstring>
#include <tuple>
#include <unordered_map>

#include "copy.h"
#include "flight.h"
#include "python/codec.h"

namespace tl::python {

namespace {

constexpr uint64_t piece_nbytes = 8 << 20;  // between two looks at the clock: well under a millisecond
constexpr size_t listed = 10;

// Pairs the tensors of a message with those of `out` by their place in the tree; scalars are ignored.
class Matcher {
 public:
  Matcher(const Tree& message, const Tree& out, const Wording& wording)
      : target_of(message.nodes.size(), Tree::nil),
        message_(message),
        out_(out),
        words_(wording),
        source_of_(out.leaves.size(), Tree::nil) {}

  void run() { match(0, 0); }

  std::string text() const {
    std::string text;
    for (size_t i = 0; i < std::min(listed, lines_.size()); ++i) text += (i ? "\n" : "") + lines_[i];
    if (lines_.size() > listed) text += "\n... and " + std::to_string(lines_.size() - listed) + " more";
    return text;
  }

  std::vector<std::pair<uint32_t, uint32_t>> copies;
  std::vector<uint32_t> target_of;  // node of the message to leaf of `out`

 private:
  void match(uint32_t a, uint32_t b) {  // depth: at most max_depth, checked when the trees were read
    const Tree::Node &left = message_.nodes[a], &right = out_.nodes[b];
    if (is_tensor(left.tag) && is_tensor(right.tag)) return tensors(a, b);
    if (!is_container(left.tag) || left.tag != right.tag) {
      missing(a);
      return extra(b);
    }
    left.tag == Tag::dict ? dicts(left.first, right.first) : sequences(left.first, right.first);
  }

  void sequences(uint32_t a, uint32_t b) {
    for (; a != Tree::nil && b != Tree::nil; a = message_.nodes[a].next, b = out_.nodes[b].next) match(a, b);
    for (; a != Tree::nil; a = message_.nodes[a].next) missing(a);
    for (; b != Tree::nil; b = out_.nodes[b].next) extra(b);
  }

  void dicts(uint32_t a, uint32_t b) {
    // Most often both have the same keys in the same order.
    for (; a != Tree::nil && b != Tree::nil && message_.key(a) == out_.key(b);
         a = message_.nodes[a].next, b = out_.nodes[b].next)
      match(a, b);
    std::unordered_map<std::string_view, uint32_t> rest;
    for (; b != Tree::nil; b = out_.nodes[b].next) rest.emplace(out_.key(b), b);
    for (; a != Tree::nil; a = message_.nodes[a].next) {
      auto found = rest.find(message_.key(a));
      if (found == rest.end()) {
        missing(a);
        continue;
      }
      match(a, found->second);
      rest.erase(found);
    }
    std::vector<uint32_t> left;
    for (const auto& entry : rest) left.push_back(entry.second);
    std::sort(left.begin(), left.end());
    for (uint32_t node : left) extra(node);
  }

  void tensors(uint32_t a, uint32_t b) {
    const uint32_t from = message_.nodes[a].leaf, to = out_.nodes[b].leaf;
    const Tree::Leaf &source = message_.leaves[from], &target = out_.leaves[to];
    if (source.dtype != target.dtype || source.ndim != target.ndim ||
        std::memcmp(message_.shape(source), out_.shape(target), sizeof(int64_t) * source.ndim) != 0)
      return add(path(message_, a) + ": " + describe(message_, source) + " " + words_.source + ", " + words_.target + " has " +
                 describe(out_, target));
    if (source_of_[to] == Tree::nil)
      copies.emplace_back(from, to);
    else if (source_of_[to] != from)
      return add(path(message_, a) + " shares its tensor with another place in " + words_.target +
                 ", but it is another one that " + words_.source);
    source_of_[to] = from;
    target_of[a] = to;
  }

  void missing(uint32_t node) {
    each(message_, node, [&](uint32_t i, const std::string& layout) {
      add(path(message_, i) + ": missing in " + words_.target + ", " + layout + " " + words_.source);
    });
  }
  void extra(uint32_t node) {
    each(out_, node, [&](uint32_t i, const std::string& layout) {
      add(path(out_, i) + ": only in " + words_.target + " (" + layout + ")");
    });
  }

  // Calls with every tensor of a subtree, which is consecutive: the nodes are in pre-order.
  template <class Call>
  void each(const Tree& tree, uint32_t root, Call call) {
    uint32_t end = root, node = root;
    for (; node != Tree::nil && tree.nodes[node].next == Tree::nil; node = tree.nodes[node].parent) {
    }
    end = node == Tree::nil ? static_cast<uint32_t>(tree.nodes.size()) : tree.nodes[node].next;
    for (uint32_t i = root; i < end; ++i)
      if (is_tensor(tree.nodes[i].tag)) call(i, describe(tree, tree.leaves[tree.nodes[i].leaf]));
  }

  static std::string describe(const Tree& tree, const Tree::Leaf& leaf) {
    std::string text = std::string(info(leaf.dtype).name) + "(";
    for (int i = 0; i < leaf.ndim; ++i) text += (i ? ", " : "") + std::to_string(tree.shape(leaf)[i]);
    return text + (leaf.ndim == 1 ? ",)" : ")");
  }

  std::string path(const Tree& tree, uint32_t node) const { return words_.object + tree.path(node).substr(3); }  // it begins with "obj"

  void add(std::string line) { lines_.push_back(std::move(line)); }

  const Tree &message_, &out_;
  const Wording words_;
  std::vector<std::string> lines_;
  std::vector<uint32_t> source_of_;  // leaf of `out` to the leaf that fills it; nil: none yet
};

}  // namespace

FillPlan::FillPlan(const char* meta, size_t nbytes, const Packed& out, const Wording& wording)
    : meta_(meta, nbytes), out_(&out), tree_(meta_) {
  const Tree out_tree(out.meta);
  Matcher matcher(tree_, out_tree, wording);
  matcher.run();
  differences_ = matcher.text();
  if (!differences_.empty()) return;
  copies_ = std::move(matcher.copies);
  for (uint32_t i = 0; i < tree_.nodes.size(); ++i)
    if (is_tensor(tree_.nodes[i].tag)) targets_.push_back(matcher.target_of[i]);
}

Outcome FillPlan::run(const Extent* extents, size_t count, const std::atomic<bool>& stop, int64_t deadline_ns) const {
  std::vector<uint64_t> sizes;
  for (size_t i = 0; i < count; ++i) sizes.push_back(extents[i].nbytes);
  tree_.check_places(sizes.data(), count);
  uint64_t since = piece_nbytes;  // bytes since the last look: small tensors share one
  uint64_t begun = 0;  // bytes of the pieces that are done, and of the one that comes next
  const auto halted = [&](uint64_t next) {
    begun += next;
    if ((since += next) < piece_nbytes) return Outcome::done;
    since = next;
    Activity::moved(begun - next);
    if (stop.load(std::memory_order_acquire)) return Outcome::stopped;
    return deadline_ns && now_ns() >= deadline_ns ? Outcome::timed_out : Outcome::done;
  };
  std::vector<StridedCopy> pieces;
  std::vector<CopySpan> spans;  // small tensors that make a piece together
  for (auto [from, to] : copies_) {
    const Tree::Leaf& source = tree_.leaves[from];
    const PackedLeaf& target = out_->leaves[to];
    char* data = const_cast<char*>(target.data);  // checked when `out` was packed as writable
    const char* bytes = extents[source.extent].data + source.offset;
    if (source.nbytes <= piece_nbytes && !source.strided && target.dense) {
      if (since + source.nbytes >= piece_nbytes) {
        copy_spans(spans);
        spans.clear();
      }
      if (Outcome outcome = halted(source.nbytes); outcome != Outcome::done) return outcome;
      spans.push_back({data, bytes, source.nbytes});
      continue;
    }
    pieces.clear();
    StridedCopy(data, target.dense ? nullptr : out_->strides(target), bytes,
                source.strided ? tree_.strides(source) : nullptr, tree_.shape(source), source.ndim,
                itemsize(source.dtype))
        .split(piece_nbytes, pieces);
    for (const StridedCopy& piece : pieces) {
      if (Outcome outcome = halted(piece.nbytes()); outcome != Outcome::done) return outcome;
      piece.run();
    }
  }
  copy_spans(spans);
  return Outcome::done;
}

bool FillPlan::sinks(const uint64_t* sizes, size_t count, std::vector<Sink>& sinks) const {
  tree_.check_places(sizes, count);
  struct Place {
    size_t extent;
    uint64_t offset, nbytes;
    char* to;
    bool operator<(const Place& other) const { return std::tie(extent, offset, nbytes) < std::tie(other.extent, other.offset, other.nbytes); }
  };
  std::vector<Place> places;
  places.reserve(copies_.size());
  for (auto [from, to] : copies_) {
    const Tree::Leaf& source = tree_.leaves[from];
    const PackedLeaf& target = out_->leaves[to];
    if (source.nbytes == 0) continue;
    if (source.strided || !target.dense) return false;
    places.push_back({source.extent, source.offset, source.nbytes, const_cast<char*>(target.data)});
  }
  if (!std::is_sorted(places.begin(), places.end())) std::sort(places.begin(), places.end());
  size_t next = 0;
  for (size_t extent = 0; extent < count; ++extent) {
    uint64_t at = 0;
    for (; next < places.size() && places[next].extent == extent; ++next) {
      if (places[next].offset < at) return false;
      if (places[next].offset > at) sinks.push_back({nullptr, places[next].offset - at});
      sinks.push_back({places[next].to, places[next].nbytes});
      at = places[next].offset + places[next].nbytes;
    }
    if (at < sizes[extent]) sinks.push_back({nullptr, sizes[extent] - at});
  }
  return true;
}

}  // namespace tl::python
