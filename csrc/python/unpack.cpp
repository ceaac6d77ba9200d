#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "copy.h"
#include "python/codec.h"
#include "python/frameworks.h"
#include "python/gil.h"

namespace nb = nanobind;

namespace tl::python {

namespace {

constexpr uint32_t many = 64;                 // tensors from which a garbage collection in the middle would be felt
constexpr uint64_t release_from = 256 << 10;  // bytes from which copying without the GIL pays

PyObject* handle_from_bytes;

// Building thousands of tensors would trigger collections that find nothing.
class GcPause {
 public:
  explicit GcPause(bool pause) : resume_(pause && PyGC_Disable()) {}
  ~GcPause() {
    if (resume_) PyGC_Enable();
  }

 private:
  bool resume_;
};

// What torch allocates for the tensors of a tree goes back to the kernel when the tree is dropped, and the next one pays a
// page fault for each 4 KiB of it. The C library keeps twice the largest chunk that it has seen freed (mallopt(3),
// M_MMAP_THRESHOLD), so one is shown to it; nothing touches that chunk.
void expect_tensors(uint64_t count) {
  constexpr uint64_t each = 512, most = 31 << 20;  // the C library ignores chunks above 32 MiB
  static uint64_t shown = 0;                       // guarded by the GIL
  const uint64_t nbytes = std::min(count * each, most);
  if (nbytes <= shown) return;
  void* volatile chunk = std::malloc(nbytes);
  std::free(chunk);
  shown = nbytes;
}

PyObject* checked(PyObject* object) {
  if (!object) throw nb::python_error();
  return object;
}

enum class Like { sender, numpy, torch };

Like parse_like(PyObject* like) {
  if (!like || like == Py_None) return Like::sender;
  if (PyUnicode_Check(like) && PyUnicode_CompareWithASCIIString(like, "torch") == 0) return Like::torch;
  if (PyUnicode_Check(like) && PyUnicode_CompareWithASCIIString(like, "numpy") == 0) return Like::numpy;
  PyErr_Format(PyExc_ValueError, "like must be \"torch\", \"numpy\" or None, not %R", like);
  throw nb::python_error();
}

bool build_torch(Framework sent, Like like) {
  if (like == Like::numpy || (like == Like::sender && sent != Framework::torch)) return false;
  if (torch_available()) return true;
  if (like == Like::sender) return false;
  PyErr_SetString(PyExc_TypeError, "like=\"torch\", but torch isn't installed");
  throw nb::python_error();
}

// Makes the objects of a tree; `Tensors` makes its tensors.
template <class Tensors>
class Builder {
 public:
  Builder(std::string_view meta, Tensors& tensors) : reader_(meta.data(), meta.size()), tensors_(tensors) {
    // A lone tensor pays nothing for this.
    if (reader_.header().leaves >= many) tensors_.reserve(reader_.header().leaves);
  }

  nb::object run() {
    GcPause pause(reader_.header().leaves >= many);
    nb::object result = value(0);
    if (!reader_.done()) throw Corrupt("bytes follow the description of an object");
    return result;
  }

 private:
  nb::object value(uint32_t depth) {
    reader_.next(token_);
    switch (token_.tag) {
      case Tag::tensor:
      case Tag::strided_tensor:
      case Tag::alias:
        return tensors_.tensor(token_);
      case Tag::list:
        return sequence(depth, PyList_New,
                        [](PyObject* list, Py_ssize_t i, PyObject* item) { PyList_SET_ITEM(list, i, item); });
      case Tag::tuple:
        return tuple(depth, false);
      case Tag::dict:
        return dict(depth);
      default:
        return scalar();
    }
  }

  nb::object key(uint32_t depth) {
    reader_.next(token_);
    if (token_.tag == Tag::tuple) return tuple(depth, true);
    if (token_.tag >= Tag::handle) throw Corrupt("a key of a dict is no scalar");
    return scalar();
  }

  nb::object scalar() {
    const std::string_view bytes = token_.bytes;
    const auto size = [&] { return static_cast<Py_ssize_t>(bytes.size()); };
    switch (token_.tag) {
      case Tag::none:
        return nb::none();
      case Tag::no:
        return nb::bool_(false);
      case Tag::yes:
        return nb::bool_(true);
      case Tag::integer:
        return nb::steal(checked(PyLong_FromLongLong(token_.integer)));
      case Tag::real:
        return nb::steal(checked(PyFloat_FromDouble(token_.real)));
      case Tag::bytes:
        return nb::steal(checked(PyBytes_FromStringAndSize(bytes.data(), size())));
      case Tag::text: {
        PyObject* text = PyUnicode_DecodeUTF8(bytes.data(), size(), "surrogatepass");
        if (text) return nb::steal(text);
        PyErr_Clear();
        throw Corrupt("a string isn't UTF-8");
      }
      case Tag::big_integer: {
        nb::dict sign;
        sign["signed"] = true;
        nb::object type = nb::borrow(reinterpret_cast<PyObject*>(&PyLong_Type));
        return type.attr("from_bytes")(nb::bytes(bytes.data(), bytes.size()), "little", **sign);
      }
      default: {
        PyObject* make = imported("tensorlink.tensors", "handle_from_bytes", &handle_from_bytes);
        return nb::handle(make)(nb::bytes(bytes.data(), bytes.size()));
      }
    }
  }

  template <class New, class Set>
  nb::object sequence(uint32_t depth, New make, Set set) {
    deeper(depth);
    const auto count = static_cast<Py_ssize_t>(token_.count);
    nb::object result = nb::steal(checked(make(count)));
    for (Py_ssize_t i = 0; i < count; ++i) set(result.ptr(), i, value(depth + 1).release().ptr());
    return result;
  }

  nb::object tuple(uint32_t depth, bool of_keys) {
    deeper(depth);
    const auto count = static_cast<Py_ssize_t>(token_.count);
    nb::object result = nb::steal(checked(PyTuple_New(count)));
    for (Py_ssize_t i = 0; i < count; ++i)
      PyTuple_SET_ITEM(result.ptr(), i, (of_keys ? key(depth + 1) : value(depth + 1)).release().ptr());
    return result;
  }

  nb::object dict(uint32_t depth) {
    deeper(depth);
    const uint64_t count = token_.count;
    nb::object result = nb::steal(checked(PyDict_New()));
    for (uint64_t i = 0; i < count; ++i) {
      nb::object name = key(0);
      nb::object item = value(depth + 1);
      if (PyDict_SetItem(result.ptr(), name.ptr(), item.ptr()) != 0) throw nb::python_error();
    }
    if (static_cast<uint64_t>(PyDict_GET_SIZE(result.ptr())) != count) throw Corrupt("a dict has a key twice");
    return result;
  }

  static void deeper(uint32_t depth) {
    if (depth >= max_depth) throw Corrupt("an object is nested too deeply");
  }

  Reader reader_;
  Tensors& tensors_;
  Token token_;  // one for all levels: it is large
};

// Makes tensors from a payload.
class PayloadTensors {
 public:
  PayloadTensors(const Memory& shared, const Memory* writable, Mode mode, Like like)
      : shared_(shared), writable_(writable), mode_(mode), like_(like) {
    for (size_t i = 0; i < shared.count; ++i) sizes_.push_back(shared.extents[i].nbytes);
    if (!writable) return;
    if (writable->count != shared.count) throw std::logic_error("two mappings of different extents");
  }

  void reserve(uint32_t leaves) {
    built_.reserve(leaves);
    expect_tensors(leaves);
    if (writable_) views_ = std::make_unique<TorchViews>(writable_->keep);
  }

  nb::object tensor(const Token& token) {
    if (token.tag == Tag::alias) return built_[token.count];
    const LeafRecord& leaf = token.leaf;
    check_place(leaf, sizes_.data(), sizes_.size());
    const bool torch = build_torch(leaf.framework, like_);
    nb::object made =
        mode_ == Mode::view && (!torch || (writable_ && viewable(leaf))) ? view(leaf, torch) : copy(leaf, torch);
    built_.push_back(made);
    return made;
  }

  // Fills the private tensors, without the GIL if that takes long.
  void finish() {
    if (total_ < release_from) return run_copies();
    Released released;
    run_copies();
  }

 private:
  static bool viewable(const LeafRecord& leaf) {
    return !leaf.strided || torch_can_view(leaf.dtype, leaf.ndim, leaf.shape, leaf.strides);
  }

  nb::object view(const LeafRecord& leaf, bool torch) {
    const Memory& memory = torch ? *writable_ : shared_;
    const char* data = memory.extents[leaf.extent].data + leaf.offset;
    const int64_t* strides = leaf.strided ? leaf.strides : nullptr;
    if (torch) {
      if (!leaf.nbytes) data = nullptr;
      PyObject* made = views_ ? views_->make(leaf.dtype, leaf.ndim, leaf.shape, strides, data)
                              : torch_view(leaf.dtype, leaf.ndim, leaf.shape, strides, data, memory.keep);
      return nb::steal(checked(made));
    }
    if (!base_.is_valid() && memory.keep) base_ = nb::steal(checked(keep_capsule(memory.keep)));
    return nb::steal(checked(numpy_view(leaf.dtype, leaf.ndim, leaf.shape, strides, data, base_.ptr())));
  }

  nb::object copy(const LeafRecord& leaf, bool torch) {
    char* to = nullptr;
    const Framework framework = torch ? Framework::torch : Framework::numpy;
    nb::object made = nb::steal(checked(new_tensor(framework, leaf.dtype, leaf.ndim, leaf.shape, leaf.nbytes, &to)));
    if (!leaf.nbytes) return made;
    const char* from = shared_.extents[leaf.extent].data + leaf.offset;
    if (leaf.strided)
      strided_.emplace_back(to, nullptr, from, leaf.strides, leaf.shape, leaf.ndim, itemsize(leaf.dtype));
    else if (leaf.nbytes <= 4096)
      std::memcpy(to, from, leaf.nbytes);
    else
      pending_.push_back({to, from, leaf.nbytes});
    total_ += leaf.nbytes;
    return made;
  }

  void run_copies() {
    copy_spans(pending_);
    for (const StridedCopy& copy : strided_) copy.run();
  }

  const Memory& shared_;
  const Memory* writable_;
  const Mode mode_;
  const Like like_;
  std::vector<uint64_t> sizes_;
  std::vector<nb::object> built_;
  std::vector<CopySpan> pending_;
  std::vector<StridedCopy> strided_;
  uint64_t total_ = 0;
  nb::object base_;                     // of numpy views
  std::unique_ptr<TorchViews> views_;  // where there are many
};

// Takes the tensors of an `out` object, in the order in which the message mentions them.
class GivenTensors {
 public:
  GivenTensors(const Packed& out, const std::vector<uint32_t>& targets) : out_(out), targets_(targets) {}
  void reserve(uint32_t) {}
  nb::object tensor(const Token&) { return nb::borrow(out_.objects[targets_.at(next_++)]); }

 private:
  const Packed& out_;
  const std::vector<uint32_t>& targets_;
  size_t next_ = 0;
};

}  // namespace

void raise(const char* name, const std::string& message) {
  nb::object type = nb::module_::import_("tensorlink.errors").attr(name);
  nb::object text = nb::steal(PyUnicode_DecodeUTF8(message.data(), static_cast<Py_ssize_t>(message.size()), "replace"));
  PyErr_SetObject(type.ptr(), text.ptr());
  throw nb::python_error();
}

uint8_t meta_frameworks(const char* meta, size_t nbytes, PyObject* like) try {
  const uint8_t sent = Reader(meta, nbytes).header().frameworks;
  const Like wanted = parse_like(like);
  uint8_t built = 0;
  for (Framework framework : {Framework::numpy, Framework::torch})
    if (sent & mask_of(framework)) built |= build_torch(framework, wanted) ? uses_torch : uses_numpy;
  return built;
} catch (const Corrupt& error) {
  raise("CorruptTransferError", error.what());
}

PyObject* unpack(const char* meta, size_t nbytes, const Memory& shared, const Memory* writable, Mode mode,
                 PyObject* like) try {
  PayloadTensors tensors(shared, writable, mode, parse_like(like));
  nb::object result = Builder<PayloadTensors>({meta, nbytes}, tensors).run();
  tensors.finish();
  return result.release().ptr();
} catch (const Corrupt& error) {
  raise("CorruptTransferError", error.what());
} catch (const std::bad_alloc&) {
  PyErr_NoMemory();
  throw nb::python_error();
}

PyObject* FillPlan::result() const {
  GivenTensors tensors(*out_, targets_);
  return Builder<GivenTensors>(meta_, tensors).run().release().ptr();
}

}  // namespace tl::python
