#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "python/frameworks.h"

namespace nb = nanobind;

namespace tl::python {

namespace {

// The head of numpy's PyArrayObject and PyArray_Descr, equal in numpy 1 and 2.
struct NumpyArray {
  PyObject_HEAD char* data;
  int nd;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
};
struct NumpyDescr {
  PyObject_HEAD PyTypeObject* typeobj;
  char kind, type, byteorder, former_flags;
  int type_num;
};
constexpr int numpy_aligned = 0x100, numpy_writeable = 0x400;
constexpr int first_user_type = 256;  // types that extensions register, ml_dtypes' among them
static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "numpy's shapes are read as 64-bit integers");

// Looked up once; lives as long as the process, like the types in it.
struct Numpy {
  PyTypeObject* array = nullptr;
  PyObject* (*new_from_descr)(PyTypeObject*, PyObject*, int, const Py_ssize_t*, const Py_ssize_t*, void*, int,
                              PyObject*) = nullptr;
  int (*set_base)(PyObject*, PyObject*) = nullptr;
  PyObject* descr[dtype_count] = {};
  std::unordered_map<int, int> user_types;  // type number to DType, -1: none of ours
} numpy;

DType from_numpy_type(int type) {
  switch (type) {
    case 0:
      return DType::boolean;
    case 1:
      return DType::int8;
    case 2:
      return DType::uint8;
    case 3:
      return DType::int16;
    case 4:
      return DType::uint16;
    case 5:
      return DType::int32;
    case 6:
      return DType::uint32;
    case 7:
      return sizeof(long) == 8 ? DType::int64 : DType::int32;
    case 8:
      return sizeof(long) == 8 ? DType::uint64 : DType::uint32;
    case 9:
      return DType::int64;
    case 10:
      return DType::uint64;
    case 11:
      return DType::float32;
    case 12:
      return DType::float64;
    case 13:
      return DType::longdouble;
    case 14:
      return DType::complex64;
    case 15:
      return DType::complex128;
    case 16:
      return DType::clongdouble;
    case 23:
      return DType::float16;
    default:
      return DType::count;
  }
}

void load_numpy() {
  if (numpy.array) return;
  nb::object capsule;
  try {
    capsule = attribute("numpy._core._multiarray_umath", "_ARRAY_API");
  } catch (nb::python_error& error) {
    capsule = attribute("numpy.core._multiarray_umath", "_ARRAY_API");  // numpy 1
  }
  // Positions in the table are part of numpy's ABI.
  auto** table = static_cast<void**>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (!table) throw nb::python_error();
  numpy.new_from_descr = reinterpret_cast<decltype(numpy.new_from_descr)>(table[94]);
  numpy.set_base = reinterpret_cast<decltype(numpy.set_base)>(table[282]);
  numpy.array = static_cast<PyTypeObject*>(table[2]);
}

PyObject* numpy_descr(DType dtype) {  // borrowed
  PyObject*& known = numpy.descr[static_cast<int>(dtype)];
  if (!known) known = attribute("tensorlink.tensors", "numpy_dtype")(info(dtype).name).release().ptr();
  return known;
}

}  // namespace

bool is_numpy(PyTypeObject* type) {
  load_numpy();
  return type == numpy.array;
}

Leaf read_numpy(PyObject* object, TensorFields& fields) {
  const auto* array = reinterpret_cast<const NumpyArray*>(object);
  const auto* descr = reinterpret_cast<const NumpyDescr*>(array->descr);
  if (descr->byteorder == '>') return Leaf::special;
  fields.dtype = from_numpy_type(descr->type_num);
  if (descr->type_num >= first_user_type) {
    auto found = numpy.user_types.find(descr->type_num);
    if (found == numpy.user_types.end()) {
      nb::str name(nb::borrow(array->descr).attr("name"));
      found = numpy.user_types.emplace(descr->type_num, dtype_named(name.c_str())).first;
    }
    if (found->second >= 0) fields.dtype = static_cast<DType>(found->second);
  }
  if (fields.dtype == DType::count || array->nd > max_rank) return Leaf::special;
  fields.framework = Framework::numpy;
  fields.data = array->data;
  fields.ndim = array->nd;
  fields.writable = array->flags & numpy_writeable;
  fields.shape = reinterpret_cast<const int64_t*>(array->dimensions);
  std::copy_n(array->strides, array->nd, fields.strides);  // null where there are no dimensions
  return Leaf::yes;
}

PyObject* keep_capsule(const Keep& keep) {
  auto* held = new Keep(keep);
  PyObject* capsule = PyCapsule_New(held, "tensorlink.keep", [](PyObject* self) {
    delete static_cast<Keep*>(PyCapsule_GetPointer(self, "tensorlink.keep"));
  });
  if (!capsule) delete held;
  return capsule;
}

PyObject* numpy_view(DType dtype, int ndim, const int64_t* shape, const int64_t* strides, const char* data,
                     PyObject* base) {
  load_numpy();
  PyObject* descr = numpy_descr(dtype);
  Py_INCREF(descr);
  const uint64_t alignment = itemsize(dtype) < 16 ? itemsize(dtype) : 16;
  const int flags = reinterpret_cast<uintptr_t>(data) % alignment == 0 ? numpy_aligned : 0;
  static char nothing[64];  // numpy allocates where it is given no address
  PyObject* array = numpy.new_from_descr(numpy.array, descr, ndim, reinterpret_cast<const Py_ssize_t*>(shape),
                                         reinterpret_cast<const Py_ssize_t*>(strides),
                                         const_cast<char*>(data ? data : nothing), flags, nullptr);
  if (!array || !base) return array;
  Py_INCREF(base);
  if (numpy.set_base(array, base) == 0) return array;  // it took the reference over, even in failure
  Py_DECREF(array);
  return nullptr;
}

PyObject* new_numpy(DType dtype, int ndim, const int64_t* shape, char** data) {
  load_numpy();
  PyObject* descr = numpy_descr(dtype);
  Py_INCREF(descr);
  PyObject* array = numpy.new_from_descr(numpy.array, descr, ndim, reinterpret_cast<const Py_ssize_t*>(shape), nullptr,
                                         nullptr, 0, nullptr);
  if (array) *data = reinterpret_cast<NumpyArray*>(array)->data;
  return array;
}

}  // namespace tl::python
