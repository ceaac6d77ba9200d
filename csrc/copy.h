// Copies of bytes and of strided tensors. No function here allocates by the size of the data, throws or takes a lock
// for long.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tl {

constexpr size_t copy_threads_from = 4 << 20;  // below it waking a helper costs more than it brings

// Copies between spans that don't overlap, as fast as the machine can: memcpy, non-temporal stores for large spans,
// several threads for very large ones.
void copy_bytes(void* to, const void* from, size_t nbytes);

// The same on this thread alone.
void copy_bytes_here(void* to, const void* from, size_t nbytes);

struct CopySpan {
  char* to;
  const char* from;
  size_t nbytes;
};

// As copy_bytes for each; several threads share many small spans like one large one. Allocates a little by their count.
void copy_spans(const std::vector<CopySpan>& spans);

// An element-wise copy between two layouts of one shape; the target must not overlap itself or the source.
class StridedCopy {
 public:
  // `shape` in elements, strides in bytes; null strides: dense C order.
  StridedCopy(char* to, const int64_t* to_strides, const char* from, const int64_t* from_strides, const int64_t* shape,
              int ndim, size_t itemsize);

  uint64_t nbytes() const { return nbytes_; }
  void run() const;       // several threads for large ones
  void run_here() const;  // on this thread alone
  // Appends to `pieces` copies of at most `nbytes` each that make up this one; a single element is never divided.
  void split(uint64_t nbytes, std::vector<StridedCopy>& pieces) const;

 private:
  struct Dim {
    int64_t count, to, from;
  };
  StridedCopy() = default;
  char* to_;
  const char* from_;
  size_t itemsize_;
  uint64_t nbytes_;
  std::vector<Dim> dims_;  // outermost first, by the target's strides; merged where both sides allow
};

}  // namespace tl
