#include "meta.h"

#include <cstring>

namespace tl {

namespace {

constexpr char magic[3] = {'T', 'L', 1};  // and the version of the format

char* put_varint(char* out, uint64_t value) {
  while (value >= 0x80) {
    *out++ = static_cast<char>(value | 0x80);
    value >>= 7;
  }
  *out++ = static_cast<char>(value);
  return out;
}

uint64_t zigzag(int64_t value) {
  return (static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63);
}
int64_t unzigzag(uint64_t value) {
  return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1);
}

// Shared by the readers of a single leaf and of a whole tree.
void check_leaf_place(uint32_t extent, uint64_t offset, uint64_t nbytes, bool strided, const int64_t* shape,
                      const int64_t* strides, int ndim, uint64_t item, const uint64_t* sizes, size_t count) {
  if (extent >= count) throw Corrupt("a tensor lies in an extent that the message doesn't have");
  uint64_t size = sizes[extent];
  if (offset > size) throw Corrupt("a tensor begins after the end of its extent");
  if (nbytes == 0) return;
  if (!strided) {
    if (nbytes > size - offset) throw Corrupt("a tensor ends after the end of its extent");
    return;
  }
  int64_t low, high;
  if (!byte_span(shape, strides, ndim, static_cast<int64_t>(item), &low, &high)) throw Corrupt("strides overflow");
  if (static_cast<uint64_t>(-low) > offset || static_cast<uint64_t>(high) > size - offset)
    throw Corrupt("a strided tensor reaches outside its extent");
}

}  // namespace

void Writer::integer(int64_t value) {
  char buffer[11];
  buffer[0] = static_cast<char>(Tag::integer);
  out_.append(buffer, static_cast<size_t>(put_varint(buffer + 1, zigzag(value)) - buffer));
}

void Writer::real(double value) {
  tag(Tag::real);
  out_.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void Writer::span(Tag kind, std::string_view bytes) {
  count(kind, bytes.size());
  out_.append(bytes);
}

void Writer::count(Tag kind, uint64_t value) {
  char buffer[11];
  buffer[0] = static_cast<char>(kind);
  out_.append(buffer, static_cast<size_t>(put_varint(buffer + 1, value) - buffer));
}

void Writer::leaf(Framework framework, DType dtype, int ndim, const int64_t* shape, const int64_t* strides,
                  uint32_t extent, uint64_t offset) {
  char buffer[4 + 5 + 10 + 20 * max_rank];
  buffer[0] = static_cast<char>(strides ? Tag::strided_tensor : Tag::tensor);
  buffer[1] = static_cast<char>(framework);
  buffer[2] = static_cast<char>(dtype);
  buffer[3] = static_cast<char>(ndim);
  char* at = put_varint(put_varint(buffer + 4, extent), offset);
  for (int i = 0; i < ndim; ++i) at = put_varint(at, static_cast<uint64_t>(shape[i]));
  if (strides)
    for (int i = 0; i < ndim; ++i) at = put_varint(at, zigzag(strides[i]));
  out_.append(buffer, static_cast<size_t>(at - buffer));
}

void Writer::header(const MetaHeader& header) {
  char* at = out_.data();
  std::memcpy(at, magic, sizeof magic);
  at[3] = static_cast<char>(header.frameworks);
  std::memcpy(at + 4, &header.leaves, 4);
  std::memcpy(at + 8, &header.nbytes, 8);
}

Reader::Reader(const char* data, size_t nbytes) : at_(data + header_nbytes), end_(data + nbytes) {
  if (nbytes < header_nbytes || std::memcmp(data, magic, sizeof magic) != 0)
    throw Corrupt("these bytes describe no object, or one of another version");
  if (nbytes > UINT32_MAX) throw Corrupt("the description of an object is larger than 4 GiB");
  header_.frameworks = static_cast<uint8_t>(data[3]);
  std::memcpy(&header_.leaves, data + 4, 4);
  std::memcpy(&header_.nbytes, data + 8, 8);
  if (header_.leaves > nbytes) throw Corrupt("more tensors announced than there are bytes");
}

uint8_t Reader::byte() {
  if (at_ == end_) throw Corrupt("the description of an object ends too early");
  return static_cast<uint8_t>(*at_++);
}

uint64_t Reader::varint() {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    uint8_t part = byte();
    if (shift == 63 && part > 1) break;
    value |= static_cast<uint64_t>(part & 0x7f) << shift;
    if (!(part & 0x80)) return value;
  }
  throw Corrupt("an integer has more than 64 bits");
}

std::string_view Reader::take(uint64_t nbytes) {
  if (nbytes > static_cast<uint64_t>(end_ - at_)) throw Corrupt("the description of an object ends too early");
  std::string_view view(at_, static_cast<size_t>(nbytes));
  at_ += nbytes;
  return view;
}

void Reader::leaf(LeafRecord& leaf, bool strided) {
  uint8_t framework = byte(), dtype = byte(), ndim = byte();
  if (framework > static_cast<uint8_t>(Framework::torch)) throw Corrupt("unknown framework");
  if (dtype >= dtype_count) throw Corrupt("unknown dtype");
  if (ndim > max_rank) throw Corrupt("a tensor has more than 64 dimensions");
  leaf.framework = static_cast<Framework>(framework);
  leaf.dtype = static_cast<DType>(dtype);
  leaf.ndim = ndim;
  leaf.strided = strided;
  if (!(header_.frameworks & mask_of(leaf.framework))) throw Corrupt("a tensor of a framework that wasn't announced");
  uint64_t extent = varint();
  if (extent > UINT32_MAX) throw Corrupt("the number of an extent has more than 32 bits");
  leaf.extent = static_cast<uint32_t>(extent);
  leaf.offset = varint();
  for (int i = 0; i < ndim; ++i) leaf.shape[i] = static_cast<int64_t>(varint());
  if (!dense_nbytes(leaf.shape, ndim, itemsize(leaf.dtype), &leaf.nbytes)) throw Corrupt("a shape overflows");
  const auto item = static_cast<int64_t>(itemsize(leaf.dtype));
  if (!strided) return dense_strides(leaf.shape, ndim, item, leaf.strides);
  for (int i = 0; i < ndim; ++i) leaf.strides[i] = unzigzag(varint());
  int64_t low, high;
  if (leaf.nbytes == 0) return;
  if (!byte_span(leaf.shape, leaf.strides, ndim, item, &low, &high)) throw Corrupt("strides overflow");
  // Else a few bytes of payload could make a copy of any size.
  if (leaf.nbytes > static_cast<uint64_t>(high - low)) throw Corrupt("a strided tensor overlaps itself");
}

void Reader::next(Token& token) {
  uint8_t tag = byte();
  if (tag >= static_cast<uint8_t>(Tag::count)) throw Corrupt("unknown kind of value");
  token.tag = static_cast<Tag>(tag);
  const auto left = [this] { return static_cast<uint64_t>(end_ - at_); };
  switch (token.tag) {
    case Tag::integer:
      token.integer = unzigzag(varint());
      break;
    case Tag::real:
      std::memcpy(&token.real, take(8).data(), 8);
      break;
    case Tag::big_integer:
    case Tag::text:
    case Tag::bytes:
    case Tag::handle:
      token.bytes = take(varint());
      break;
    case Tag::list:
    case Tag::tuple:
    case Tag::dict:
      token.count = varint();
      // Every value takes a byte at least, so a count can be trusted for allocation after this.
      if (token.count > left() / (token.tag == Tag::dict ? 2 : 1))
        throw Corrupt("a container has more entries than bytes");
      break;
    case Tag::tensor:
    case Tag::strided_tensor:
      leaf(token.leaf, token.tag == Tag::strided_tensor);
      if (++leaves_ > header_.leaves) throw Corrupt("more tensors than announced");
      break;
    case Tag::alias:
      token.count = varint();
      if (token.count >= leaves_) throw Corrupt("an alias of a tensor that doesn't come before it");
      break;
    default:
      break;
  }
}

void Reader::skip_key() {
  Token token;
  std::vector<uint64_t> left;  // of each tuple that is open
  do {
    next(token);
    if (token.tag >= Tag::handle && token.tag != Tag::tuple) throw Corrupt("a key of a dict is no scalar");
    if (!left.empty()) --left.back();
    if (token.tag == Tag::tuple) left.push_back(token.count);
    if (left.size() > max_depth) throw Corrupt("a key of a dict is nested too deeply");
    while (!left.empty() && left.back() == 0) left.pop_back();
  } while (!left.empty());
}

void check_place(const LeafRecord& leaf, const uint64_t* sizes, size_t count) {
  check_leaf_place(leaf.extent, leaf.offset, leaf.nbytes, leaf.strided, leaf.shape, leaf.strides, leaf.ndim,
                   itemsize(leaf.dtype), sizes, count);
}

std::string relocate(std::string_view meta, const Place* places) {
  Reader reader(meta.data(), meta.size());
  std::string out;
  out.reserve(meta.size() + 16);
  Writer writer(out);
  Token token;
  for (size_t leaf = 0; !reader.done();) {
    const char* begin = reader.position();
    reader.next(token);
    if (token.tag != Tag::tensor && token.tag != Tag::strided_tensor) {
      out.append(begin, static_cast<size_t>(reader.position() - begin));
      continue;
    }
    const Place& place = places[leaf++];
    writer.leaf(token.leaf.framework, token.leaf.dtype, token.leaf.ndim, token.leaf.shape, place.strides, place.extent,
                place.offset);
  }
  writer.header(reader.header());
  return out;
}

Tree::Tree(std::string_view meta) : meta_(meta) {
  Reader reader(meta.data(), meta.size());
  header = reader.header();
  leaves.reserve(header.leaves);
  nodes.reserve(header.leaves + 1);
  struct Open {
    uint32_t node, last;
    uint64_t left, index;
  };
  std::vector<Open> open;
  Token token;
  const auto enter = [&](uint32_t node) {
    if (!is_container(nodes[node].tag) || token.count == 0) return;
    if (open.size() >= max_depth) throw Corrupt("an object is nested too deeply");
    open.push_back({node, nil, token.count, 0});
  };
  enter(append(reader, token, nil, 0));
  while (!open.empty()) {
    Open& top = open.back();
    if (top.left == 0) {
      open.pop_back();
      continue;
    }
    --top.left;
    const char* key = reader.position();
    if (nodes[top.node].tag == Tag::dict) reader.skip_key();
    const auto key_nbytes = static_cast<uint32_t>(reader.position() - key);
    uint32_t node = append(reader, token, top.node, static_cast<uint32_t>(top.index++));
    nodes[node].key = static_cast<uint32_t>(key - meta.data());
    nodes[node].key_nbytes = key_nbytes;
    (top.last == nil ? nodes[top.node].first : nodes[top.last].next) = node;
    top.last = node;
    enter(node);
  }
  if (!reader.done()) throw Corrupt("bytes follow the description of an object");
  if (leaves.size() != header.leaves) throw Corrupt("fewer tensors than announced");
}

uint32_t Tree::append(Reader& reader, Token& token, uint32_t parent, uint32_t index) {
  reader.next(token);
  const auto id = static_cast<uint32_t>(nodes.size());
  Node node{token.tag, parent, nil, nil, nil, index, 0, 0};
  if (token.tag == Tag::alias) node.leaf = static_cast<uint32_t>(token.count);
  if (token.tag == Tag::tensor || token.tag == Tag::strided_tensor) {
    const LeafRecord& leaf = token.leaf;
    node.leaf = static_cast<uint32_t>(leaves.size());
    leaves.push_back(
        {leaf.framework, leaf.dtype, leaf.ndim, leaf.strided, leaf.extent, leaf.offset, leaf.nbytes, dims.size(), id});
    dims.insert(dims.end(), leaf.shape, leaf.shape + leaf.ndim);
    dims.insert(dims.end(), leaf.strides, leaf.strides + leaf.ndim);
  }
  nodes.push_back(node);
  return id;
}

void Tree::check_places(const uint64_t* sizes, size_t count) const {
  for (const Leaf& leaf : leaves)
    check_leaf_place(leaf.extent, leaf.offset, leaf.nbytes, leaf.strided, shape(leaf), strides(leaf), leaf.ndim,
                     itemsize(leaf.dtype), sizes, count);
}

namespace {

std::string quoted(std::string_view text) {
  std::string out = "'";
  for (char c : text) {
    if (c == '\'' || c == '\\') out += '\\';
    if (c == '\n')
      out += "\\n";
    else
      out += c;
  }
  return out + "'";
}

// A key as Python would print it; the rare kinds are abbreviated.
std::string key_text(std::string_view encoded) {
  std::string with_header(header_nbytes, '\0');
  std::memcpy(with_header.data(), magic, sizeof magic);
  with_header += encoded;
  Reader reader(with_header.data(), with_header.size());
  Token token;
  reader.next(token);
  switch (token.tag) {
    case Tag::none:
      return "None";
    case Tag::no:
      return "False";
    case Tag::yes:
      return "True";
    case Tag::integer:
      return std::to_string(token.integer);
    case Tag::real:
      return std::to_string(token.real);
    case Tag::text:
      return quoted(token.bytes);
    case Tag::bytes:
      return "b" + quoted(token.bytes);
    case Tag::tuple:
      return "(...)";
    default:
      return "...";
  }
}

}  // namespace

std::string Tree::path(uint32_t node) const {
  std::string out;
  for (; nodes[node].parent != nil; node = nodes[node].parent) {
    const bool named = nodes[nodes[node].parent].tag == Tag::dict;
    out = "[" + (named ? key_text(key(node)) : std::to_string(nodes[node].index)) + "]" + out;
  }
  return "obj" + out;
}

}  // namespace tl
