#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "python/codec.h"
#include "python/frameworks.h"

namespace nb = nanobind;

namespace tl::python {

namespace {

PyObject *enum_type, *handle_type, *adapter;  // looked up once

// Entries of a container that are taken together, so that the memory of all can be asked for before the first is read: it
// is mostly cold.
constexpr int group = 8;

// Where in the tree we are; a string only when something is wrong.
struct Step {
  PyObject* container;
  PyObject* key;  // of a dict; else null
  Py_ssize_t index;
};

class Packer {
 public:
  Packer(Packed& out, bool writable) : out_(out), writer_(out.meta), writable_(writable) {}

  void run(PyObject* object) {
    value(object);
    if (out_.meta.size() > UINT32_MAX) {
      PyErr_SetString(PyExc_ValueError,
                      "the scalars and strings of an object take more than 4 GiB; send large bytes as arrays");
      throw nb::python_error();
    }
    writer_.header({out_.frameworks, static_cast<uint32_t>(out_.leaves.size()), out_.nbytes});
  }

 private:
  void value(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    if (scalar(object, type)) return;
    if (type == &PyDict_Type) return exact_dict(object);
    if (type == &PyList_Type) return sequence(Tag::list, object);
    if (type == &PyTuple_Type) return sequence(Tag::tuple, object);
    TensorFields fields;
    switch (read_tensor(object, fields)) {
      case Leaf::yes:
        return leaf(object, object, fields);
      case Leaf::special:
        return adapted(object);
      case Leaf::no:
        break;
    }
    if (PyDict_Check(object)) return other_dict(object);
    if (PyList_Check(object)) return sequence(Tag::list, object);
    if (PyTuple_Check(object)) return sequence(Tag::tuple, object);
    if (handle(object)) return;
    adapted(object);
  }

  // None, bool, int, float, str, bytes and their subclasses except enums.
  bool scalar(PyObject* object, PyTypeObject* type) {
    if (object == Py_None) return writer_.tag(Tag::none), true;
    if (type == &PyBool_Type) return writer_.tag(object == Py_True ? Tag::yes : Tag::no), true;
    if (type == &PyUnicode_Type) return text(object), true;
    if (type == &PyLong_Type) return integer(object), true;
    if (type == &PyFloat_Type) return writer_.real(PyFloat_AS_DOUBLE(object)), true;
    if (type == &PyBytes_Type) return bytes(Tag::bytes, object), true;
    if (type == &PyDict_Type || type == &PyList_Type || type == &PyTuple_Type) return false;
    const bool derived =
        PyLong_Check(object) || PyUnicode_Check(object) || PyFloat_Check(object) || PyBytes_Check(object);
    if (!derived || is_enum(object)) return false;
    if (PyLong_Check(object))
      integer(object);
    else if (PyUnicode_Check(object))
      text(object);
    else if (PyFloat_Check(object))
      writer_.real(PyFloat_AS_DOUBLE(object));
    else
      bytes(Tag::bytes, object);
    return true;
  }

  static bool is_enum(PyObject* object) {
    const int result = PyObject_IsInstance(object, imported("enum", "Enum", &enum_type));
    if (result < 0) throw nb::python_error();
    return result;
  }

  void text(PyObject* object) {
    Py_ssize_t size;
    if (const char* utf8 = PyUnicode_AsUTF8AndSize(object, &size))
      return writer_.span(Tag::text, {utf8, static_cast<size_t>(size)});
    PyErr_Clear();  // lone surrogates, as in file names
    nb::object encoded = nb::steal(PyUnicode_AsEncodedString(object, "utf-8", "surrogatepass"));
    if (!encoded.is_valid()) throw nb::python_error();
    bytes(Tag::text, encoded.ptr());
  }

  void bytes(Tag tag, PyObject* object) {
    writer_.span(tag, {PyBytes_AS_STRING(object), static_cast<size_t>(PyBytes_GET_SIZE(object))});
  }

  void integer(PyObject* object) {
    int overflow;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (!overflow) {
      if (value == -1 && PyErr_Occurred()) throw nb::python_error();
      return writer_.integer(value);
    }
    nb::object number = nb::steal(PyNumber_Long(object));  // a plain int, whatever a subclass overrides
    if (!number.is_valid()) throw nb::python_error();
    const auto bits = nb::cast<uint64_t>(number.attr("bit_length")());
    nb::dict sign;
    sign["signed"] = true;
    bytes(Tag::big_integer, nb::object(number.attr("to_bytes")(bits / 8 + 1, "little", **sign)).ptr());
  }

  void key(PyObject* object, uint32_t depth) {
    PyTypeObject* type = Py_TYPE(object);
    if (scalar(object, type)) return;
    if (!PyTuple_Check(object) || is_enum(object))
      fail(PyExc_TypeError,
           "the dict has a key of type %s; keys may be str, int, float, bool, None, bytes and tuples of these",
           type->tp_name);
    if (depth >= max_depth) fail(PyExc_ValueError, "a key is nested more than %s deep", "1000");
    const Py_ssize_t count = PyTuple_GET_SIZE(object);
    writer_.count(Tag::tuple, static_cast<uint64_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) key(PyTuple_GET_ITEM(object, i), depth + 1);
  }

  void enter(PyObject* container) {
    if (path_.size() >= max_depth) {
      for (size_t i = 0; i < path_.size(); ++i)
        if (path_[i].container == container) {
          path_.resize(i + 1);
          fail(PyExc_ValueError, "the %s contains itself", Py_TYPE(container)->tp_name);
        }
      path_.resize(3);
      fail(PyExc_ValueError, "below it the %s is nested more than 1000 deep", Py_TYPE(container)->tp_name);
    }
    path_.push_back({container, nullptr, 0});
  }

  void changed(PyObject* container) {
    fail(PyExc_RuntimeError, "the %s changed while it was packed", Py_TYPE(container)->tp_name);
  }

  void sequence(Tag tag, PyObject* object) {
    if (is_enum_sequence(object))
      fail(PyExc_TypeError, "an enum (%s) cannot travel; send its .value", Py_TYPE(object)->tp_name);
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
    writer_.count(tag, static_cast<uint64_t>(count));
    enter(object);
    nb::object items[group];
    for (Py_ssize_t first = 0; first < count; first += group) {
      if (PySequence_Fast_GET_SIZE(object) != count) changed(object);
      const auto taken = std::min<Py_ssize_t>(group, count - first);
      for (Py_ssize_t i = 0; i < taken; ++i) items[i] = nb::borrow(PySequence_Fast_GET_ITEM(object, first + i));
      for (Py_ssize_t i = 0; i < taken; ++i) prefetch_tensor(items[i].ptr());
      for (Py_ssize_t i = 0; i < taken; ++i) {
        path_.back().index = first + i;
        value(items[i].ptr());
      }
    }
    if (PySequence_Fast_GET_SIZE(object) != count) changed(object);
    path_.pop_back();
  }

  static bool is_enum_sequence(PyObject* object) {
    return !PyList_CheckExact(object) && !PyTuple_CheckExact(object) && is_enum(object);
  }

  void entry(PyObject* name, PyObject* item) {
    path_.back().key = nullptr;
    key(name, 0);
    path_.back().key = name;
    value(item);
  }

  void exact_dict(PyObject* object) {
    const Py_ssize_t count = PyDict_GET_SIZE(object);
    writer_.count(Tag::dict, static_cast<uint64_t>(count));
    enter(object);
    nb::object names[group], items[group];
    Py_ssize_t at = 0, seen = 0;
    for (int taken = group; taken == group;) {
      PyObject *name, *item;
      for (taken = 0; taken < group && PyDict_Next(object, &at, &name, &item); ++taken) {
        names[taken] = nb::borrow(name);
        items[taken] = nb::borrow(item);
      }
      for (int i = 0; i < taken; ++i) prefetch_tensor(items[i].ptr());
      for (int i = 0; i < taken; ++i, ++seen) {
        // The adapter runs Python code, which may change the dict: hold what is in use, and count again.
        if (seen == count || PyDict_GET_SIZE(object) != count) changed(object);
        entry(names[i].ptr(), items[i].ptr());
      }
    }
    if (seen != count) changed(object);
    path_.pop_back();
  }

  // Subclasses may order or compute their items (OrderedDict, for one), so they are asked.
  void other_dict(PyObject* object) {
    nb::object items = nb::steal(PyMapping_Items(object));
    if (!items.is_valid()) throw nb::python_error();
    const Py_ssize_t count = PyList_GET_SIZE(items.ptr());
    writer_.count(Tag::dict, static_cast<uint64_t>(count));
    enter(object);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* pair = PyList_GET_ITEM(items.ptr(), i);
      if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
        fail(PyExc_TypeError, "the items of this %s aren't pairs", Py_TYPE(object)->tp_name);
      entry(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1));
    }
    path_.pop_back();
  }

  bool handle(PyObject* object) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != imported("tensorlink.types", "TensorRef", &handle_type))
      return false;
    nb::bytes encoded(nb::object(nb::handle(object).attr("to_bytes")()));
    bytes(Tag::handle, encoded.ptr());
    return true;
  }

  // Whatever isn't read directly: Python code finds a numpy array or torch tensor that is, or raises.
  void adapted(PyObject* object) {
    auto known = adapted_.find(object);
    nb::object stand_in;
    if (known != adapted_.end()) {
      stand_in = nb::borrow(known->second);
    } else {
      const std::string where = path();
      stand_in = nb::steal(PyObject_CallFunction(imported("tensorlink.tensors", "canonical", &adapter), "OsO", object,
                                                 where.c_str(), writable_ ? Py_True : Py_False));
      if (!stand_in.is_valid()) throw nb::python_error();
      out_.kept.push_back(nb::borrow(object).release().ptr());  // so that its address stays its own
      out_.kept.push_back(nb::borrow(stand_in).release().ptr());
      adapted_.emplace(object, stand_in.ptr());
    }
    TensorFields fields;
    if (read_tensor(stand_in.ptr(), fields) != Leaf::yes)
      fail(PyExc_TypeError, "a tensor of type %s has no plain memory that could travel; pass a dense CPU tensor",
           Py_TYPE(object)->tp_name);
    leaf(object, stand_in.ptr(), fields);
  }

  void leaf(PyObject* object, PyObject* tensor, const TensorFields& fields) {
    if (writable_ && !fields.writable) raise("LayoutMismatchError", path() + " is read-only and cannot be filled");
    PackedLeaf leaf;
    leaf.data = fields.data;
    leaf.dtype = fields.dtype;
    leaf.framework = fields.framework;
    leaf.ndim = static_cast<uint8_t>(fields.ndim);
    leaf.writable = fields.writable;
    const auto item = static_cast<int64_t>(itemsize(fields.dtype));
    if (!dense_nbytes(fields.shape, fields.ndim, itemsize(fields.dtype), &leaf.nbytes) ||
        leaf.nbytes > INT64_MAX - out_.nbytes)
      fail(PyExc_ValueError, "this %s has more than 2**63 bytes", Py_TYPE(object)->tp_name);
    leaf.dense = is_dense(fields.shape, fields.strides, fields.ndim, item);
    if (writable_ && !leaf.dense && overlaps(fields, leaf.nbytes))
      raise("LayoutMismatchError", path() + " overlaps itself (it was expanded) and cannot be filled");
    const uint32_t same = find(leaf, fields, tensor);
    if (same != Tree::nil) return writer_.count(Tag::alias, same);
    leaf.dims = out_.dims.size();
    leaf.offset = (out_.nbytes + payload_alignment - 1) & ~(payload_alignment - 1);
    out_.dims.resize(leaf.dims + 2 * leaf.ndim);
    std::copy_n(fields.shape, leaf.ndim, out_.dims.data() + leaf.dims);
    std::copy_n(fields.strides, leaf.ndim, out_.dims.data() + leaf.dims + leaf.ndim);
    if (leaf.nbytes == 0) leaf.offset = out_.nbytes;
    out_.nbytes = leaf.offset + leaf.nbytes;
    out_.frameworks |= mask_of(leaf.framework);
    writer_.leaf(leaf.framework, leaf.dtype, leaf.ndim, fields.shape, nullptr, 0, leaf.offset);
    out_.leaves.push_back(leaf);
    Py_INCREF(object);
    out_.objects.push_back(object);
  }

  // Elements that share a byte; exact for expanded tensors, and a bound (by size) for exotic strides.
  static bool overlaps(const TensorFields& fields, uint64_t nbytes) {
    int64_t low, high;
    if (nbytes == 0) return false;
    for (int i = 0; i < fields.ndim; ++i)
      if (fields.shape[i] > 1 && fields.strides[i] == 0) return true;
    return !byte_span(fields.shape, fields.strides, fields.ndim, static_cast<int64_t>(itemsize(fields.dtype)), &low,
                      &high) ||
           nbytes > static_cast<uint64_t>(high - low);
  }

  // The leaf that this tensor repeats: the same object, or the same memory, layout and framework (tied weights). An
  // open-addressed table by address, which small messages go without. Records the next leaf where there is none.
  uint32_t find(const PackedLeaf& leaf, const TensorFields& fields, PyObject* tensor) {
    const auto next = static_cast<uint32_t>(out_.leaves.size());
    const void* id = leaf.nbytes ? static_cast<const void*>(leaf.data) : tensor;  // empty tensors have no address
    out_.ids.push_back(id);
    if (next < 8) {
      for (uint32_t i = 0; i < next; ++i)
        if (out_.ids[i] == id && same_layout(out_.leaves[i], leaf, fields)) return out_.ids.pop_back(), i;
      return Tree::nil;
    }
    if (out_.slots.size() < 2 * out_.ids.size()) grow();
    for (size_t at = slot(id);; at = (at + 1) & (out_.slots.size() - 1)) {
      if (out_.slots[at] == Tree::nil) return out_.slots[at] = next, Tree::nil;
      const uint32_t i = out_.slots[at];
      if (out_.ids[i] == id && same_layout(out_.leaves[i], leaf, fields)) return out_.ids.pop_back(), i;
    }
  }

  size_t slot(const void* id) const {
    return static_cast<size_t>((reinterpret_cast<uintptr_t>(id) >> 4) * 0x9e3779b97f4a7c15ull >> 20) &
           (out_.slots.size() - 1);
  }

  void grow() {
    out_.slots.assign(out_.slots.empty() ? 64 : out_.slots.size() * 4, Tree::nil);
    for (uint32_t i = 0; i + 1 < out_.ids.size(); ++i) {
      size_t at = slot(out_.ids[i]);
      while (out_.slots[at] != Tree::nil) at = (at + 1) & (out_.slots.size() - 1);
      out_.slots[at] = i;
    }
  }

  bool same_layout(const PackedLeaf& a, const PackedLeaf& b, const TensorFields& fields) const {
    const size_t bytes = sizeof(int64_t) * a.ndim;
    return a.dtype == b.dtype && a.framework == b.framework && a.ndim == b.ndim &&
           std::memcmp(out_.shape(a), fields.shape, bytes) == 0 &&
           std::memcmp(out_.strides(a), fields.strides, bytes) == 0;
  }

  std::string path() const {
    std::string text = "obj";
    for (const Step& step : path_) {
      nb::object key = step.key ? nb::borrow(step.key) : nb::object(nb::int_(step.index));
      if (!step.key && PyDict_Check(step.container)) break;  // the key itself is at fault
      nb::object shown = nb::steal(PyObject_ASCII(key.ptr()));
      if (!shown.is_valid()) throw nb::python_error();
      text += "[" + std::string(nb::str(shown).c_str()) + "]";
    }
    return text;
  }

  [[noreturn]] void fail(PyObject* type, const char* format, const char* name) {
    const std::string where = path();
    nb::object text = nb::steal(PyUnicode_FromFormat(format, name));
    if (text.is_valid()) PyErr_Format(type, "%s: %U", where.c_str(), text.ptr());
    throw nb::python_error();
  }

  Packed& out_;
  Writer writer_;
  const bool writable_;
  std::vector<Step> path_;
  std::unordered_map<PyObject*, PyObject*> adapted_;
};

}  // namespace

std::unique_ptr<Packed> pack(PyObject* object, bool writable) {
  auto packed = std::make_unique<Packed>();
  Packer(*packed, writable).run(object);
  return packed;
}

}  // namespace tl::python
