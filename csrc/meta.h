// The meta bytes of a message: the tree of an object and the layout and place of each tensor in it.
//
// A header of 16 bytes, then the nodes in pre-order. Integers are LEB128 (signed ones zigzag), all little-endian. A
// tensor says where its bytes are: an extent (a block of payload) and an offset in it; without strides it is dense in C
// order. Meta comes from peers: every reader here throws `Corrupt` for what isn't well-formed, allocates by no length
// that it hasn't checked against the bytes at hand, and never recurses by what it reads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "dtype.h"
#include "layout.h"

namespace tl {

struct Corrupt : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr uint32_t max_depth = 1000;
inline constexpr uint64_t payload_alignment = 64;

enum class Framework : uint8_t { numpy, torch };
enum FrameworkMask : uint8_t { uses_numpy = 1, uses_torch = 2 };
inline uint8_t mask_of(Framework framework) {
  return static_cast<uint8_t>(1u << static_cast<int>(framework));
}

enum class Tag : uint8_t {
  none,
  no,
  yes,
  integer,
  big_integer,
  real,
  text,
  bytes,
  handle,
  list,
  tuple,
  dict,
  tensor,
  strided_tensor,
  alias,
  count,
};
inline bool is_container(Tag tag) {
  return tag == Tag::list || tag == Tag::tuple || tag == Tag::dict;
}
inline bool is_tensor(Tag tag) {
  return tag == Tag::tensor || tag == Tag::strided_tensor || tag == Tag::alias;
}

struct MetaHeader {
  uint8_t frameworks = 0;  // FrameworkMask of the tensors in it, as sent
  uint32_t leaves = 0;     // distinct tensors: aliases don't count
  uint64_t nbytes = 0;     // of the payload when packed into one extent
};
inline constexpr size_t header_nbytes = 16;

// A tensor's layout and place. Not initialised: `ndim` says how much of the arrays counts.
struct LeafRecord {
  Framework framework;
  DType dtype;
  uint8_t ndim;
  bool strided;  // else `strides` are those of C order
  uint32_t extent;
  uint64_t offset;  // of the first element in its extent
  uint64_t nbytes;  // when dense
  int64_t shape[max_rank];
  int64_t strides[max_rank];  // bytes
};

struct Token {
  Tag tag;
  int64_t integer;  // integer
  double real;      // real
  std::string_view
      bytes;        // big_integer (two's complement, little-endian), text (UTF-8, surrogates pass), bytes, handle
  uint64_t count;   // list, tuple, dict: children; alias: index of a leaf before it
  LeafRecord leaf;  // tensor, strided_tensor; where `is_tensor` but not alias
};

class Writer {
 public:
  explicit Writer(std::string& out) : out_(out) { out_.append(header_nbytes, '\0'); }
  void tag(Tag tag) { out_.push_back(static_cast<char>(tag)); }
  void integer(int64_t value);
  void real(double value);
  void span(Tag kind, std::string_view bytes);
  void count(Tag kind, uint64_t value);
  void leaf(Framework framework, DType dtype, int ndim, const int64_t* shape, const int64_t* strides, uint32_t extent,
            uint64_t offset);             // strides may be null: dense
  void header(const MetaHeader& header);  // last of all

 private:
  std::string& out_;
};

class Reader {
 public:
  Reader(const char* data, size_t nbytes);  // Throws: Corrupt: the header is none of ours
  const MetaHeader& header() const { return header_; }
  void next(Token& token);
  void skip_key();  // steps over one dict key
  const char* position() const { return at_; }
  bool done() const { return at_ == end_; }

 private:
  uint8_t byte();
  uint64_t varint();
  std::string_view take(uint64_t nbytes);
  void leaf(LeafRecord& leaf, bool strided);

  const char* at_;
  const char* end_;
  MetaHeader header_;
  uint32_t leaves_ = 0;
};

// Throws: Corrupt: the leaf reaches outside its extent; `sizes` are the extents' bytes.
void check_place(const LeafRecord& leaf, const uint64_t* sizes, size_t count);

// Where the tensors of a message lie instead of in its packed payload.
struct Place {
  uint32_t extent;
  uint64_t offset;
  const int64_t* strides;  // bytes; null: dense
};
std::string relocate(std::string_view meta, const Place* places);

// A parsed message, for all that compares, lists or copies by layout and builds no Python object.
class Tree {
 public:
  static constexpr uint32_t nil = UINT32_MAX;
  struct Node {
    Tag tag;
    uint32_t parent, first, next;  // nodes; nil: none
    uint32_t leaf;                 // tensors and aliases: index into `leaf`
    uint32_t index;                // in the parent
    uint32_t key, key_nbytes;      // in the meta; children of a dict
  };
  struct Leaf {
    Framework framework;
    DType dtype;
    uint8_t ndim;
    bool strided;
    uint32_t extent;
    uint64_t offset, nbytes;
    size_t dims;  // shape and then strides, in `dims`
    uint32_t node;
  };

  explicit Tree(std::string_view meta);   // refers to `meta`, which must outlive it. Throws: Corrupt
  std::string path(uint32_t node) const;  // such as obj['layers'][3]
  std::string_view key(uint32_t node) const { return meta_.substr(nodes[node].key, nodes[node].key_nbytes); }
  const int64_t* shape(const Leaf& leaf) const { return dims.data() + leaf.dims; }
  const int64_t* strides(const Leaf& leaf) const { return dims.data() + leaf.dims + leaf.ndim; }
  void check_places(const uint64_t* sizes, size_t count) const;

  MetaHeader header;
  std::vector<Node> nodes;
  std::vector<Leaf> leaves;
  std::vector<int64_t> dims;

 private:
  uint32_t append(Reader& reader, Token& token, uint32_t parent, uint32_t index);
  std::string_view meta_;
};

}  // namespace tl
