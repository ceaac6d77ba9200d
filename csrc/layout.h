// Arithmetic on layouts: shape in elements, strides in bytes. All of it is safe for values that a peer sent.
#pragma once
#include <cstdint>

namespace tl {

inline constexpr int max_rank = 64;

// Bytes of a dense tensor; false where the product of the non-zero extents doesn't fit (numpy and torch refuse those
// too).
inline bool dense_nbytes(const int64_t* shape, int ndim, uint64_t itemsize, uint64_t* nbytes) {
  int64_t product = static_cast<int64_t>(itemsize);
  bool empty = false;
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] < 0) return false;
    if (shape[i] == 0)
      empty = true;
    else if (__builtin_mul_overflow(product, shape[i], &product))
      return false;
  }
  *nbytes = empty ? 0 : static_cast<uint64_t>(product);
  return true;
}

// C order, ignoring the strides of extents that are one (they carry no information) and of empty tensors.
inline bool is_dense(const int64_t* shape, const int64_t* strides, int ndim, int64_t itemsize) {
  int64_t expected = itemsize;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] == 0) return true;
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

inline void dense_strides(const int64_t* shape, int ndim, int64_t itemsize, int64_t* strides) {
  int64_t step = itemsize;
  for (int i = ndim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= shape[i] > 1 ? shape[i] : 1;
  }
}

// The bytes that a non-empty tensor touches, as [low, high) around its first element; false: they don't fit in 63 bits.
inline bool byte_span(const int64_t* shape, const int64_t* strides, int ndim, int64_t itemsize, int64_t* low,
                      int64_t* high) {
  *low = 0;
  *high = itemsize;
  for (int i = 0; i < ndim; ++i) {
    int64_t reach;
    if (__builtin_mul_overflow(shape[i] - 1, strides[i], &reach)) return false;
    if (__builtin_add_overflow(reach < 0 ? *low : *high, reach, reach < 0 ? low : high)) return false;
  }
  int64_t size;
  return !__builtin_sub_overflow(*high, *low, &size);
}

}  // namespace tl
