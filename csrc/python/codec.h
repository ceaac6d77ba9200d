// Python objects to meta and payload, and back. All functions need the GIL unless said; errors are
// `nanobind::python_error`.
#pragma once
#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "meta.h"
#include "sink.h"

namespace tl::python {

// What keeps memory readable under a view. Its last copy may be dropped on any thread and without the GIL.
using Keep = std::shared_ptr<void>;

struct Extent {
  const char* data;
  uint64_t nbytes;
};

// Extents of a message as they are mapped in one way. A view holds a copy of `keep`.
struct Memory {
  const Extent* extents = nullptr;
  size_t count = 0;
  Keep keep{};
};

struct PackedLeaf {
  const char* data;
  uint64_t nbytes;  // dense
  uint64_t offset;  // in the packed payload
  size_t dims;      // index of its shape, then strides (bytes), in Packed::dims
  DType dtype;
  Framework framework;
  uint8_t ndim;
  bool dense;
  bool writable;
};

// The parts of a packed object that grow with it. The next one takes over their memory: fresh pages would cost a third of
// the work on a large tree.
struct PackedRoom {
  std::string meta;  // for a payload in one extent, as `copy_payload` writes it
  std::vector<PackedLeaf> leaves;
  std::vector<int64_t> dims;
  std::vector<PyObject*> objects;  // one a leaf: the tensor as found in the tree
  std::vector<const void*> ids;    // one a leaf, and `slots`: for the packer, to find tensors that come again
  std::vector<uint32_t> slots;
};

// An object taken apart. It refers to the tensors' memory and keeps the tensors alive; make and destroy it with the GIL
// held.
struct Packed : PackedRoom {
  uint64_t nbytes = 0;  // of the payload
  uint8_t frameworks = 0;
  std::vector<PyObject*> kept;  // what stands in for some of the tensors, such as an array over a bytearray

  Packed();
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;
  ~Packed();
  const int64_t* shape(const PackedLeaf& leaf) const { return dims.data() + leaf.dims; }
  const int64_t* strides(const PackedLeaf& leaf) const { return dims.data() + leaf.dims + leaf.ndim; }

  // The meta for tensors that are read where they lie, in `extents` (sorted or not); empty: some tensor lies in none of
  // them, or overlaps itself, so that the payload must be packed. Needs no GIL.
  std::string meta_in_place(const Extent* extents, size_t count) const;
};

// Raises: TypeError for what cannot travel, naming its path; ValueError: nested more than 1000 deep, or contains
// itself. `writable`: the tensors are to be filled: LayoutMismatchError for read-only ones and those that only a copy
// could represent.
std::unique_ptr<Packed> pack(PyObject* object, bool writable = false);

// Gathers every leaf into `to`, which has room for `packed.nbytes`. Needs no GIL; may use several threads. `told` hears now and then
// how many bytes, from the first on, are there.
void copy_payload(const Packed& packed, char* to, const std::function<void(uint64_t)>& told = {});

// The frameworks (FrameworkMask) that `unpack` will build with; imports torch if the message needs it and it is
// installed. `like`: None, "torch" or "numpy". Raises: CorruptTransferError, ValueError (unknown `like`), TypeError
// (torch isn't installed).
uint8_t meta_frameworks(const char* meta, size_t nbytes, PyObject* like);

enum class Mode {
  copy,  // private tensors; needs `shared` only, and no `keep`
  view,  // numpy: read-only views of `shared`; torch: views of `writable`, or private copies where that is null
};

// Raises: CorruptTransferError; TypeError: a dtype that the framework lacks; what building a tensor raises.
PyObject* unpack(const char* meta, size_t nbytes, const Memory& shared, const Memory* writable, Mode mode,
                 PyObject* like);

enum class Outcome { done, stopped, timed_out };

// How differences are told: such as "obj['w']: float32(2,) arrived, out has float32(3,)".
struct Wording {
  const char* object = "obj";   // the whole tree
  const char* source = "arrived";
  const char* target = "out";
};

// Fills the tensors of an object (`out=`) with those of a message. `out` must outlive it, and so must the meta's bytes.
class FillPlan {
 public:
  FillPlan(const char* meta, size_t nbytes, const Packed& out, const Wording& wording = {});  // needs no GIL. Throws: tl::Corrupt
  // From now on fills another object, whose meta is that of the first, byte for byte.
  void retarget(const Packed& out) { out_ = &out; }
  // Empty: they fit. Else up to ten lines, one for each difference, and a count of the rest.
  const std::string& differences() const { return differences_; }
  // Copies in pieces of at most 8 MiB and looks at `stop` and the deadline (ns of CLOCK_MONOTONIC; 0: none) between
  // them. Needs no GIL. Throws: tl::Corrupt before the first byte.
  Outcome run(const Extent* extents, size_t count, const std::atomic<bool>& stop, int64_t deadline_ns) const;
  // Where the bytes of extents of these sizes go, one after the other, if each of them has at most one place and that is dense: then
  // they need no memory in between. Needs no GIL. Throws: tl::Corrupt.
  bool sinks(const uint64_t* sizes, size_t count, std::vector<Sink>& sinks) const;
  // The tree of the message with the tensors of `out` and the scalars of the message; `out` itself where it is one
  // tensor.
  PyObject* result() const;

 private:
  std::string_view meta_;
  const Packed* out_;
  Tree tree_;
  std::string differences_;
  std::vector<std::pair<uint32_t, uint32_t>> copies_;  // leaf of the message, leaf of `out`; each pair once
  std::vector<uint32_t> targets_;  // leaf of `out` for each tensor of the message, aliases too, in order
};

// Sets and throws tensorlink.errors.<name>(message).
[[noreturn]] void raise(const char* name, const std::string& message);

}  // namespace tl::python
