#include "python/codec.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "python/bind.h"
#include "python/frameworks.h"
#include "python/gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tl::python {

namespace {

// A simple buffer of any object that exports one.
class Buffer {
 public:
  Buffer(nb::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
      throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  char* data() const { return static_cast<char*>(view_.buf); }
  uint64_t nbytes() const { return static_cast<uint64_t>(view_.len); }
  Extent extent() const { return {data(), nbytes()}; }

 private:
  Py_buffer view_;
};

nb::bytes to_bytes(const Packed& packed) {
  nb::object result = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(packed.nbytes)));
  if (!result.is_valid()) throw nb::python_error();
  char* to = PyBytes_AS_STRING(result.ptr());
  std::memset(to, 0, packed.nbytes);  // the gaps between leaves
  copy_payload(packed, to);
  return nb::borrow<nb::bytes>(result);
}

nb::object unpack_buffer(nb::bytes meta, nb::object buffer, nb::object like, bool copy) {
  auto source = std::make_shared<Buffer>(buffer, false);
  const Extent extent = source->extent();
  Memory memory{&extent, 1, nullptr};
  if (copy) return nb::steal(unpack(meta.c_str(), meta.size(), memory, nullptr, Mode::copy, like.ptr()));
  // A buffer must be released with the GIL, and a view may drop its hold without it.
  memory.keep = Keep(new std::shared_ptr<Buffer>(std::move(source)), [](void* held) {
    if (!Py_IsInitialized()) return;
    PyGILState_STATE state = PyGILState_Ensure();
    delete static_cast<std::shared_ptr<Buffer>*>(held);
    PyGILState_Release(state);
  });
  return nb::steal(unpack(meta.c_str(), meta.size(), memory, &memory, Mode::view, like.ptr()));
}

nb::object single(const Packed& packed) {
  const Tree tree(packed.meta);
  if (tree.nodes.size() != 1 || !is_tensor(tree.nodes[0].tag)) return nb::none();
  const PackedLeaf& leaf = packed.leaves.at(0);
  nb::object shape = nb::steal(PyTuple_New(leaf.ndim));
  for (int d = 0; d < leaf.ndim; ++d) PyTuple_SET_ITEM(shape.ptr(), d, PyLong_FromLongLong(packed.shape(leaf)[d]));
  return nb::make_tuple(shape, info(leaf.dtype).name, info(leaf.dtype).itemsize);
}

nb::list describe(nb::bytes meta) {
  const Tree tree({meta.c_str(), meta.size()});
  nb::list rows;
  for (uint32_t i = 0; i < tree.nodes.size(); ++i) {
    const Tree::Node& node = tree.nodes[i];
    if (!is_tensor(node.tag)) continue;
    const Tree::Leaf& leaf = tree.leaves[node.leaf];
    nb::object shape = nb::steal(PyTuple_New(leaf.ndim));
    for (int d = 0; d < leaf.ndim; ++d) PyTuple_SET_ITEM(shape.ptr(), d, PyLong_FromLongLong(tree.shape(leaf)[d]));
    const std::string path = tree.path(i);
    nb::object text = nb::steal(PyUnicode_DecodeUTF8(path.data(), static_cast<Py_ssize_t>(path.size()), "replace"));
    nb::object alias = node.tag == Tag::alias ? nb::object(nb::int_(node.leaf)) : nb::object(nb::none());
    rows.append(nb::make_tuple(text, shape, info(leaf.dtype).name, leaf.nbytes, alias));
  }
  return rows;
}

nb::object fill(nb::bytes meta, nb::object buffer, nb::object out) {
  Buffer source(buffer, false);
  auto target = pack(out.ptr(), true);
  FillPlan plan(meta.c_str(), meta.size(), *target);
  if (!plan.differences().empty()) raise("LayoutMismatchError", "out doesn't fit what arrived:\n" + plan.differences());
  const std::atomic<bool> stop{false};
  const Extent extent = source.extent();
  {
    Released released;
    plan.run(&extent, 1, stop, 0);
  }
  return nb::steal(plan.result());
}

}  // namespace

void bind_codec(nb::module_& module) {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Corrupt& error) {
      nb::object type = nb::module_::import_("tensorlink.errors").attr("CorruptTransferError");
      PyErr_SetString(type.ptr(), error.what());
    }
  });
  nb::class_<Packed>(module, "Packed",
                     "An object taken apart: `meta` describes it, the payload holds its tensors' bytes.")
      .def_prop_ro("meta", [](const Packed& packed) { return nb::bytes(packed.meta.data(), packed.meta.size()); })
      .def_ro("nbytes", &Packed::nbytes, "Bytes of the packed payload.")
      .def_prop_ro(
          "tensors", [](const Packed& packed) { return packed.leaves.size(); }, "Distinct tensors.")
      .def("single", single,
           nb::sig("def single(self) -> tuple[tuple[int, ...], str, int] | None"), "(shape, dtype, itemsize) of an object that is one tensor, or None.")
      .def("to_bytes", to_bytes, "The payload; the gaps between tensors are zero.")
      .def(
          "copy_to",
          [](const Packed& packed, uintptr_t address) { copy_payload(packed, reinterpret_cast<char*>(address)); },
          "address"_a, nb::call_guard<Released>(),
          "Writes the payload to `nbytes` of memory at `address`.")
      .def(
          "meta_in_place",
          [](const Packed& packed, nb::list extents) -> nb::object {
            std::vector<Extent> spans;
            for (nb::handle extent : extents)
              spans.push_back(
                  {reinterpret_cast<const char*>(nb::cast<uintptr_t>(extent[0])), nb::cast<uint64_t>(extent[1])});
            const std::string meta = packed.meta_in_place(spans.data(), spans.size());
            return meta.empty() ? nb::object(nb::none()) : nb::object(nb::bytes(meta.data(), meta.size()));
          },
          nb::sig("def meta_in_place(self, extents: list[tuple[int, int]]) -> bytes | None"), "extents"_a,
          "Meta that refers to the tensors where they lie, in [(address, nbytes)]; None: some lie elsewhere.");
  module.def(
      "pack", [](nb::object object, bool writable) { return pack(object.ptr(), writable); }, "object"_a.none(),
      nb::kw_only(), "writable"_a = false,
      "Takes an object apart. Raises: TypeError, ValueError; LayoutMismatchError if `writable`.");
  module.def("unpack", unpack_buffer,
           nb::sig("def unpack(meta: bytes, buffer: object, like: object | None = None, copy: bool = True) -> typing.Any"), "meta"_a, "buffer"_a, "like"_a = nb::none(), "copy"_a = true,
             "The object of `meta` with its payload in `buffer`. Raises: CorruptTransferError, TypeError.");
  module.def("describe", describe,
           nb::sig("def describe(meta: bytes) -> list[tuple[str, tuple[int, ...], str, int, int | None]]"), "meta"_a,
             "(path, shape, dtype, nbytes, index of the tensor it repeats or None) a tensor.");
  module.def(
      "fill", fill,
           nb::sig("def fill(meta: bytes, buffer: object, out: object | None) -> typing.Any"), "meta"_a, "buffer"_a, "out"_a.none(),
      "Fills the tensors of `out` and returns its tree with the scalars of the message. Raises: LayoutMismatchError.");
  module.def(
      "meta_frameworks",
      [](nb::bytes meta, nb::object like) { return meta_frameworks(meta.c_str(), meta.size(), like.ptr()); }, "meta"_a,
      "like"_a = nb::none(), "Bits: 1 numpy, 2 torch; what `unpack` would build.");
  module.def("torch_by_attributes", torch_by_attributes, "only"_a,
             "For tests: as with a torch that has no C exchange API.");
}

}  // namespace tl::python
