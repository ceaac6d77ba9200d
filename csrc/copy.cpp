#include "copy.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "layout.h"
#include "parallel.h"

namespace tl {

namespace {

constexpr size_t stream_from = 64 << 10;  // measured: below it a cached copy is as fast and leaves the target warm
constexpr size_t span_stream_from = 1 << 10;  // the same for spans that are more in all than caches hold
constexpr size_t thread_chunk = 1 << 20;

#if defined(__x86_64__)

// Streams whole cache lines; `to` is aligned to 64. The loads stay unaligned: they cost nothing on what streams well.
__attribute__((target("avx2"))) void stream_avx2(char* to, const char* from, size_t lines) {
  for (; lines; --lines, to += 64, from += 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), b);
  }
  _mm_sfence();
}

__attribute__((target("avx512f"))) void stream_avx512(char* to, const char* from, size_t lines) {
  for (; lines; --lines, to += 64, from += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  _mm_sfence();
}

using Stream = void (*)(char*, const char*, size_t);
Stream choose_stream() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return stream_avx512;
  return __builtin_cpu_supports("avx2") ? stream_avx2 : nullptr;
}

bool stream(char* to, const char* from, size_t nbytes) {
  static const Stream lines = choose_stream();
  if (!lines) return false;
  const size_t head = -reinterpret_cast<uintptr_t>(to) & 63;
  std::memcpy(to, from, head);
  const size_t middle = (nbytes - head) & ~size_t{63};
  lines(to + head, from + head, middle / 64);
  std::memcpy(to + head + middle, from + head + middle, nbytes - head - middle);
  return true;
}

#else

// Elsewhere memcpy of the C library does this by itself (glibc on AArch64 streams and uses DC ZVA where it helps).
bool stream(char*, const char*, size_t) {
  return false;
}

#endif

// Two dimensions of one element size: `rows` outside and `columns` inside, in the order of the target.
struct Plane {
  char* to;
  const char* from;
  int64_t rows, to_row, from_row;
  int64_t columns, to_column, from_column;
};

template <class Element>
void copy_rows(const Plane& p) {
  for (int64_t r = 0; r < p.rows; ++r) {
    char* to = p.to + r * p.to_row;
    const char* from = p.from + r * p.from_row;
    for (int64_t c = 0; c < p.columns; ++c, to += p.to_column, from += p.from_column)
      std::memcpy(to, from, sizeof(Element));
  }
}

// For a source that runs along the rows: blocks of a cache line a side, turned in a buffer, so that each line of either
// side is touched once. (Strides that are powers of two put all lines of a block into one set of the cache.)
template <class Element>
void turn_blocks(const Plane& p) {
  constexpr int64_t block = sizeof(Element) >= 8 ? 8 : 64 / sizeof(Element);
  Element buffer[block][block];
  for (int64_t r0 = 0; r0 < p.rows; r0 += block)
    for (int64_t c0 = 0; c0 < p.columns; c0 += block) {
      const int64_t rows = std::min(block, p.rows - r0), columns = std::min(block, p.columns - c0);
      for (int64_t c = 0; c < columns; ++c) {
        const char* from = p.from + r0 * p.from_row + (c0 + c) * p.from_column;
        for (int64_t r = 0; r < rows; ++r, from += p.from_row) std::memcpy(&buffer[r][c], from, sizeof(Element));
      }
      for (int64_t r = 0; r < rows; ++r) {
        char* to = p.to + (r0 + r) * p.to_row + c0 * p.to_column;
        for (int64_t c = 0; c < columns; ++c, to += p.to_column) std::memcpy(to, &buffer[r][c], sizeof(Element));
      }
    }
}

template <class Element>
void copy_plane(const Plane& p) {
  if (p.rows > 1 && std::llabs(p.from_row) < std::llabs(p.from_column))
    turn_blocks<Element>(p);
  else
    copy_rows<Element>(p);
}

struct Bytes16 {
  char bytes[16];
};
struct Bytes32 {
  char bytes[32];
};

// Rows that are consecutive bytes on both sides.
void copy_runs(const Plane& p, size_t run) {
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t c = 0; c < p.columns; ++c)
      copy_bytes_here(p.to + r * p.to_row + c * p.to_column, p.from + r * p.from_row + c * p.from_column, run);
}

void copy_here(void* to, const void* from, size_t nbytes, size_t threshold) {
  if (nbytes < threshold || !stream(static_cast<char*>(to), static_cast<const char*>(from), nbytes))
    std::memcpy(to, from, nbytes);
}

}  // namespace

void copy_bytes_here(void* to, const void* from, size_t nbytes) {
  copy_here(to, from, nbytes, stream_from);
}

void copy_bytes(void* to, const void* from, size_t nbytes) {
  if (nbytes < copy_threads_from) {
    if (nbytes) copy_bytes_here(to, from, nbytes);
    return;
  }
  parallel_for((nbytes + thread_chunk - 1) / thread_chunk, [&](size_t i) {
    const size_t begin = i * thread_chunk;
    copy_bytes_here(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                    std::min(thread_chunk, nbytes - begin));
  });
}

void copy_spans(const std::vector<CopySpan>& spans) {
  std::vector<size_t> begins;  // of the work of a thread: spans that make up a chunk
  size_t since = thread_chunk;
  for (size_t i = 0; i < spans.size(); ++i) {
    if (since >= thread_chunk) {
      begins.push_back(i);
      since = 0;
    }
    if (spans[i].nbytes >= copy_threads_from)
      copy_bytes(spans[i].to, spans[i].from, spans[i].nbytes);
    else
      since += spans[i].nbytes;
  }
  const bool many = begins.size() >= copy_threads_from / thread_chunk;
  const auto work = [&](size_t chunk) {
    const size_t end = chunk + 1 < begins.size() ? begins[chunk + 1] : spans.size();
    for (size_t i = begins[chunk]; i < end; ++i)
      if (spans[i].nbytes && spans[i].nbytes < copy_threads_from)
        copy_here(spans[i].to, spans[i].from, spans[i].nbytes, many ? span_stream_from : stream_from);
  };
  if (many) return parallel_for(begins.size(), work);
  for (size_t chunk = 0; chunk < begins.size(); ++chunk) work(chunk);
}

StridedCopy::StridedCopy(char* to, const int64_t* to_strides, const char* from, const int64_t* from_strides,
                         const int64_t* shape, int ndim, size_t itemsize)
    : to_(to), from_(from), itemsize_(itemsize), nbytes_(0) {
  const auto item = static_cast<int64_t>(itemsize);
  int64_t dense[max_rank];
  dense_strides(shape, ndim, item, dense);
  if (!dense_nbytes(shape, ndim, itemsize, &nbytes_) || nbytes_ == 0) return;
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] == 1) continue;
    Dim dim{shape[i], to_strides ? to_strides[i] : dense[i], from_strides ? from_strides[i] : dense[i]};
    if (dim.to < 0) {  // walk the target upwards
      to_ += (dim.count - 1) * dim.to;
      from_ += (dim.count - 1) * dim.from;
      dim.to = -dim.to;
      dim.from = -dim.from;
    }
    dims_.push_back(dim);
  }
  std::stable_sort(dims_.begin(), dims_.end(), [](const Dim& a, const Dim& b) { return a.to > b.to; });
  size_t kept = 0;
  for (const Dim& dim : dims_) {
    Dim* outer = kept ? &dims_[kept - 1] : nullptr;
    if (outer && outer->to == dim.to * dim.count && outer->from == dim.from * dim.count)
      *outer = {outer->count * dim.count, dim.to, dim.from};
    else
      dims_[kept++] = dim;
  }
  dims_.resize(kept);
}

void StridedCopy::run_here() const {
  if (nbytes_ == 0) return;
  const auto item = static_cast<int64_t>(itemsize_);
  size_t inner = dims_.size();
  size_t run = itemsize_;  // bytes that are consecutive on both sides
  if (inner && dims_[inner - 1].to == item && dims_[inner - 1].from == item)
    run *= static_cast<size_t>(dims_[--inner].count);
  if (inner == 0) return copy_bytes_here(to_, from_, run);
  // The two dimensions of the kernel: along the target, and along the source (or the next one outwards).
  const Dim column = dims_[inner - 1];
  Dim row{1, 0, 0};
  size_t row_at = inner;
  for (size_t i = 0; i + 1 < inner; ++i)
    if (row_at == inner || std::llabs(dims_[i].from) <= std::llabs(row.from)) row = dims_[row_at = i];
  std::vector<Dim> outer;
  for (size_t i = 0; i + 1 < inner; ++i)
    if (i != row_at) outer.push_back(dims_[i]);
  std::vector<int64_t> at(outer.size(), 0);
  char* to = to_;
  const char* from = from_;
  for (;;) {
    const Plane plane{to, from, row.count, row.to, row.from, column.count, column.to, column.from};
    switch (run) {
      case 1:
        copy_plane<uint8_t>(plane);
        break;
      case 2:
        copy_plane<uint16_t>(plane);
        break;
      case 4:
        copy_plane<uint32_t>(plane);
        break;
      case 8:
        copy_plane<uint64_t>(plane);
        break;
      case 16:
        copy_plane<Bytes16>(plane);
        break;
      case 32:
        copy_plane<Bytes32>(plane);
        break;
      default:
        copy_runs(plane, run);
    }
    size_t i = outer.size();
    for (; i > 0; --i) {
      const Dim& dim = outer[i - 1];
      if (++at[i - 1] < dim.count) {
        to += dim.to;
        from += dim.from;
        break;
      }
      at[i - 1] = 0;
      to -= (dim.count - 1) * dim.to;
      from -= (dim.count - 1) * dim.from;
    }
    if (i == 0) return;
  }
}

void StridedCopy::split(uint64_t nbytes, std::vector<StridedCopy>& pieces) const {
  if (nbytes_ <= nbytes || dims_.empty()) {
    if (nbytes_) pieces.push_back(*this);
    return;
  }
  const Dim& dim = dims_.front();
  const uint64_t slice = nbytes_ / static_cast<uint64_t>(dim.count);  // bytes of one step along the outermost dimension
  const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(nbytes / slice));
  for (int64_t begin = 0; begin < dim.count; begin += step) {
    StridedCopy piece = *this;
    const int64_t count = std::min(step, dim.count - begin);
    piece.to_ += begin * dim.to;
    piece.from_ += begin * dim.from;
    piece.nbytes_ = slice * static_cast<uint64_t>(count);
    if (count == 1)
      piece.dims_.erase(piece.dims_.begin());
    else
      piece.dims_.front().count = count;
    piece.split(nbytes, pieces);
  }
}

void StridedCopy::run() const {
  if (nbytes_ < copy_threads_from) return run_here();
  std::vector<StridedCopy> pieces;
  split(thread_chunk, pieces);
  parallel_for(pieces.size(), [&](size_t i) { pieces[i].run_here(); });
}

}  // namespace tl
