#include "python/frameworks.h"

#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "python/dlpack_abi.h"

namespace nb = nanobind;

namespace tl::python {

namespace {

// The head of numpy's PyArrayObject and PyArray_Descr, equal in numpy 1 and 2.
struct NumpyArray {
  PyObject_HEAD
  char* data;
  int nd;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
};
struct NumpyDescr {
  PyObject_HEAD
  PyTypeObject* typeobj;
  char kind, type, byteorder, former_flags;
  int type_num;
};
constexpr int numpy_aligned = 0x100, numpy_writeable = 0x400;
constexpr int first_user_type = 256;  // types that extensions register, ml_dtypes' among them
static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "numpy's shapes are read as 64-bit integers");

// Everything that is looked up once. Lives as long as the process, like the types in it.
struct Numpy {
  PyTypeObject* array = nullptr;
  PyObject* (*new_from_descr)(PyTypeObject*, PyObject*, int, const Py_ssize_t*, const Py_ssize_t*, void*, int, PyObject*) = nullptr;
  int (*set_base)(PyObject*, PyObject*) = nullptr;
  PyObject* descr[dtype_count] = {};
  std::unordered_map<int, int> user_types;  // type number to DType, -1: none of ours
} numpy;

struct Torch {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  const dlpack::ExchangeApi* api = nullptr;
  PyObject *is_neg = nullptr, *is_conj = nullptr, *dtype_get = nullptr;  // descriptors of torch.Tensor
  PyObject *uint8 = nullptr, *int8 = nullptr;
  PyObject *fields = nullptr, *from_capsule = nullptr;                   // tensorlink.tensors, without the exchange API
  PyObject* dtypes[dtype_count] = {};
  bool attributes_only = false, missing = false;
} torch;

DType from_numpy_type(int type) {
  switch (type) {
    case 0: return DType::boolean;
    case 1: return DType::int8;
    case 2: return DType::uint8;
    case 3: return DType::int16;
    case 4: return DType::uint16;
    case 5: return DType::int32;
    case 6: return DType::uint32;
    case 7: return sizeof(long) == 8 ? DType::int64 : DType::int32;
    case 8: return sizeof(long) == 8 ? DType::uint64 : DType::uint32;
    case 9: return DType::int64;
    case 10: return DType::uint64;
    case 11: return DType::float32;
    case 12: return DType::float64;
    case 13: return DType::longdouble;
    case 14: return DType::complex64;
    case 15: return DType::complex128;
    case 16: return DType::clongdouble;
    case 23: return DType::float16;
    default: return DType::count;
  }
}

int dtype_named(std::string_view name) {
  for (int i = 0; i < dtype_count; ++i)
    if (name == dtype_table[i].name) return i;
  return -1;
}

nb::object attribute(const char* module, const char* name) { return nb::module_::import_(module).attr(name); }

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

// Without importing it: an object can only be a torch tensor where somebody else has.
bool load_torch() {
  if (torch.tensor) return true;
  PyObject* modules = PyImport_GetModuleDict();
  PyObject* module = PyDict_GetItemString(modules, "torch");
  if (!module || !PyObject_HasAttrString(module, "Tensor") || !PyObject_HasAttrString(module, "nn")) return false;
  nb::object t = nb::borrow(module), type = t.attr("Tensor");
  const auto forever = [](nb::object object) { return object.release().ptr(); };
  torch.is_neg = forever(type.attr("is_neg"));
  torch.is_conj = forever(type.attr("is_conj"));
  torch.dtype_get = forever(type.attr("dtype"));
  torch.uint8 = forever(t.attr("uint8"));
  torch.int8 = forever(t.attr("int8"));
  torch.fields = forever(attribute("tensorlink.tensors", "torch_fields"));
  torch.from_capsule = forever(attribute("tensorlink.tensors", "torch_from_capsule"));
  if (PyObject* capsule = PyObject_GetAttrString(type.ptr(), "__dlpack_c_exchange_api__")) {
    auto* api = static_cast<dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    while (api && api->version.major != dlpack::major_version) api = api->previous;
    if (api && api->borrow) torch.api = api;
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  torch.parameter = reinterpret_cast<PyTypeObject*>(forever(t.attr("nn").attr("Parameter")));
  torch.tensor = reinterpret_cast<PyTypeObject*>(type.release().ptr());
  return true;
}

PyObject* numpy_descr(DType dtype) {  // borrowed
  PyObject*& known = numpy.descr[static_cast<int>(dtype)];
  if (!known) known = attribute("tensorlink.tensors", "numpy_dtype")(info(dtype).name).release().ptr();
  return known;
}

bool truth(PyObject* method, PyObject* object) {
  PyObject* result = PyObject_CallOneArg(method, object);
  if (!result) throw nb::python_error();
  Py_DECREF(result);
  return result == Py_True;
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
  std::memcpy(fields.strides, array->strides, sizeof(int64_t) * static_cast<size_t>(array->nd));
  return Leaf::yes;
}

Leaf read_torch_attributes(PyObject* object, TensorFields& fields) {
  nb::object result = nb::steal(PyObject_CallOneArg(torch.fields, object));
  if (!result.is_valid()) throw nb::python_error();
  if (result.is_none()) return Leaf::special;
  fields.data = reinterpret_cast<const char*>(nb::cast<uintptr_t>(result[0]));
  const int dtype = dtype_named(nb::str(nb::object(result[1])).c_str());
  nb::object shape = result[2], strides = result[3];
  fields.ndim = static_cast<int>(nb::len(shape));
  if (dtype < 0 || fields.ndim > max_rank) return Leaf::special;
  fields.dtype = static_cast<DType>(dtype);
  for (int i = 0; i < fields.ndim; ++i) {
    fields.shape_buffer[i] = nb::cast<int64_t>(shape[i]);
    fields.strides[i] = nb::cast<int64_t>(strides[i]) * static_cast<int64_t>(itemsize(fields.dtype));
  }
  fields.shape = fields.shape_buffer;
  return Leaf::yes;
}

DType from_dlpack(const dlpack::DataType& type) {
  for (int i = 0; i < dtype_count; ++i)
    if (dtype_table[i].dl_code == type.code && dtype_table[i].dl_bits == type.bits) return static_cast<DType>(i);
  return DType::count;
}

Leaf read_torch(PyObject* object, TensorFields& fields) {
  fields.framework = Framework::torch;
  fields.writable = true;
  if (!torch.api || torch.attributes_only) return read_torch_attributes(object, fields);
  dlpack::Tensor tensor;
  if (torch.api->borrow(object, &tensor) != 0) {  // sparse, meta, quantized, ...: the adapter says which
    PyErr_Clear();
    return Leaf::special;
  }
  if (tensor.device.type != dlpack::device_cpu && tensor.device.type != dlpack::device_cuda_host) return Leaf::special;
  static DType by_type[32][256];  // DLPack code and bits to DType
  static const bool filled = [] {
    for (int code = 0; code < 32; ++code)
      for (int bits = 0; bits < 256; ++bits)
        by_type[code][bits] = from_dlpack({static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1});
    return true;
  }();
  (void)filled;
  if (tensor.dtype.lanes != 1 || tensor.dtype.code >= 32 || tensor.ndim > max_rank) return Leaf::special;
  fields.dtype = by_type[tensor.dtype.code][tensor.dtype.bits];
  if (fields.dtype == DType::count) return Leaf::special;
  // The API exports uint1 ... uint7 and int1 ... int7 as whole bytes, and lazily conjugated or negated tensors without a word.
  if (fields.dtype == DType::uint8 || fields.dtype == DType::int8) {
    PyObject* dtype = Py_TYPE(torch.dtype_get)->tp_descr_get(torch.dtype_get, object, reinterpret_cast<PyObject*>(Py_TYPE(object)));
    if (!dtype) throw nb::python_error();
    Py_DECREF(dtype);
    if (dtype != torch.uint8 && dtype != torch.int8) return Leaf::special;
  }
  if (truth(torch.is_neg, object) || (info(fields.dtype).dl_code == 5 && truth(torch.is_conj, object))) return Leaf::special;
  fields.data = static_cast<const char*>(tensor.data) + (tensor.data ? tensor.byte_offset : 0);
  fields.ndim = tensor.ndim;
  fields.shape = tensor.shape;
  const auto item = static_cast<int64_t>(itemsize(fields.dtype));
  bool empty = false;
  for (int i = 0; i < tensor.ndim; ++i) {
    fields.strides[i] = tensor.strides ? tensor.strides[i] * item : 0;
    empty |= tensor.shape[i] == 0;
  }
  if (!tensor.strides && tensor.ndim) dense_strides(tensor.shape, tensor.ndim, item, fields.strides);
  return tensor.data || empty ? Leaf::yes : Leaf::special;  // no memory: fake, functional and other wrapped tensors
}

// What a tensor built here owns. One allocation: the structure, its shape and strides, and for a private one its bytes.
struct Holder {
  dlpack::ManagedVersioned managed;
  Keep keep;
  void* bytes;  // to free; null: inline or somebody else's
};

constexpr uint64_t inline_nbytes = 4096, huge_page = 2 << 20;

char* allocate(uint64_t nbytes) {
  if (nbytes < 2 * huge_page) return static_cast<char*>(std::aligned_alloc(64, (nbytes + 63) & ~uint64_t{63}));
  const uint64_t size = (nbytes + huge_page - 1) & ~(huge_page - 1);
  if (size < nbytes) return nullptr;
  char* bytes = static_cast<char*>(std::aligned_alloc(huge_page, size));
#ifdef MADV_HUGEPAGE
  if (bytes) madvise(bytes, size, MADV_HUGEPAGE);  // page faults cost more than the copy that follows
#endif
  return bytes;
}

void delete_holder(dlpack::ManagedVersioned* managed) {  // any thread, no GIL
  auto* holder = static_cast<Holder*>(managed->context);
  std::free(holder->bytes);
  holder->~Holder();
  std::free(holder);
}

Holder* make_holder(DType dtype, int ndim, const int64_t* shape, const int64_t* strides, uint64_t room) {
  const size_t dims_at = (sizeof(Holder) + 7) & ~size_t{7};
  const size_t data_at = (dims_at + sizeof(int64_t) * 2 * static_cast<size_t>(ndim) + 63) & ~size_t{63};
  const size_t size = (data_at + room + 63) & ~size_t{63};
  char* raw = static_cast<char*>(room ? std::aligned_alloc(64, size) : std::malloc(size));
  if (!raw) {
    PyErr_NoMemory();
    return nullptr;
  }
  auto* holder = new (raw) Holder{};
  auto* dims = reinterpret_cast<int64_t*>(raw + dims_at);
  const auto item = static_cast<int64_t>(itemsize(dtype));
  std::memcpy(dims, shape, sizeof(int64_t) * static_cast<size_t>(ndim));
  if (strides)
    for (int i = 0; i < ndim; ++i) dims[ndim + i] = strides[i] / item;
  else
    dense_strides(shape, ndim, 1, dims + ndim);
  const DTypeInfo& type = info(dtype);
  holder->managed.version = {dlpack::major_version, 0};
  holder->managed.context = holder;
  holder->managed.deleter = delete_holder;
  holder->managed.tensor = {room ? raw + data_at : nullptr, {dlpack::device_cpu, 0}, ndim, {type.dl_code, type.dl_bits, 1},
                            dims, dims + ndim, 0};
  return holder;
}

void drop_capsule(PyObject* capsule) {
  auto* managed = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule, "dltensor"));
  if (managed) managed->deleter(managed);
  else PyErr_Clear();  // used: renamed by its consumer
}

// For a torch without the exchange API: DLPack of a plain type of that size, then `view(dtype)` on torch's side.
PyObject* import_by_capsule(Holder* holder, DType dtype) {
  auto* managed = static_cast<dlpack::Managed*>(std::malloc(sizeof(dlpack::Managed)));
  if (!managed) {
    delete_holder(&holder->managed);
    return PyErr_NoMemory();
  }
  *managed = {holder->managed.tensor, holder, [](dlpack::Managed* self) {
                delete_holder(&static_cast<Holder*>(self->context)->managed);
                std::free(self);
              }};
  const uint8_t item = info(dtype).itemsize;
  managed->tensor.dtype = item == 16 ? dlpack::DataType{5, 128, 1} : dlpack::DataType{static_cast<uint8_t>(item == 1), static_cast<uint8_t>(item * 8), 1};
  nb::object capsule = nb::steal(PyCapsule_New(managed, "dltensor", drop_capsule));
  if (!capsule.is_valid()) {
    managed->deleter(managed);
    return nullptr;
  }
  PyObject* name = PyUnicode_FromString(info(dtype).name);
  PyObject* result = name ? PyObject_CallFunctionObjArgs(torch.from_capsule, capsule.ptr(), name, nullptr) : nullptr;
  Py_XDECREF(name);
  return result;
}

PyObject* import_torch_tensor(Holder* holder, DType dtype) {
  if (!torch.api || torch.attributes_only) return import_by_capsule(holder, dtype);
  void* object = nullptr;
  if (torch.api->import_managed(&holder->managed, &object) != 0) return nullptr;
  return static_cast<PyObject*>(object);
}

bool torch_has(DType dtype) {
  PyObject*& known = torch.dtypes[static_cast<int>(dtype)];
  if (known) return true;
  nb::object module = nb::module_::import_("torch");
  if (info(dtype).dl_bits && PyObject_HasAttrString(module.ptr(), info(dtype).name)) {
    known = nb::object(module.attr(info(dtype).name)).release().ptr();
    return true;
  }
  PyErr_Format(PyExc_TypeError, "torch has no dtype %s; receive with like=\"numpy\"", info(dtype).name);
  return false;
}

}  // namespace

Leaf read_tensor(PyObject* object, TensorFields& fields) {
  PyTypeObject* type = Py_TYPE(object);
  if (type == torch.tensor || type == torch.parameter) return read_torch(object, fields);
  if (!numpy.array) load_numpy();
  if (type == numpy.array) return read_numpy(object, fields);
  if (!torch.tensor && load_torch() && (type == torch.tensor || type == torch.parameter)) return read_torch(object, fields);
  return Leaf::no;
}

PyObject* keep_capsule(const Keep& keep) {
  auto* held = new Keep(keep);
  PyObject* capsule = PyCapsule_New(held, "tensorlink.keep", [](PyObject* self) {
    delete static_cast<Keep*>(PyCapsule_GetPointer(self, "tensorlink.keep"));
  });
  if (!capsule) delete held;
  return capsule;
}

PyObject* numpy_view(DType dtype, int ndim, const int64_t* shape, const int64_t* strides, const char* data, PyObject* base) {
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

PyObject* torch_view(DType dtype, int ndim, const int64_t* shape, const int64_t* strides, const char* data, const Keep& keep) {
  if (!torch_has(dtype)) return nullptr;
  Holder* holder = make_holder(dtype, ndim, shape, strides, 0);
  if (!holder) return nullptr;
  holder->managed.tensor.data = const_cast<char*>(data);
  holder->keep = keep;
  return import_torch_tensor(holder, dtype);
}

bool torch_can_view(DType dtype, int ndim, const int64_t* shape, const int64_t* strides) {
  const auto item = static_cast<int64_t>(itemsize(dtype));
  for (int i = 0; i < ndim; ++i)
    if (strides[i] % item != 0 || (strides[i] < 0 && shape[i] > 1)) return false;
  return true;
}

PyObject* new_tensor(Framework framework, DType dtype, int ndim, const int64_t* shape, uint64_t nbytes, char** data) {
  if (framework == Framework::numpy) {
    load_numpy();
    PyObject* descr = numpy_descr(dtype);
    Py_INCREF(descr);
    PyObject* array = numpy.new_from_descr(numpy.array, descr, ndim, reinterpret_cast<const Py_ssize_t*>(shape), nullptr,
                                           nullptr, 0, nullptr);
    if (array) *data = reinterpret_cast<NumpyArray*>(array)->data;
    return array;
  }
  if (!torch_has(dtype)) return nullptr;
  Holder* holder = make_holder(dtype, ndim, shape, nullptr, nbytes <= inline_nbytes ? nbytes : 0);
  if (!holder) return nullptr;
  if (nbytes > inline_nbytes) {
    holder->bytes = allocate(nbytes);
    if (!holder->bytes) {
      delete_holder(&holder->managed);
      return PyErr_NoMemory();
    }
    holder->managed.tensor.data = holder->bytes;
  }
  *data = static_cast<char*>(holder->managed.tensor.data);
  return import_torch_tensor(holder, dtype);
}

bool torch_available() {
  if (torch.tensor) return true;
  if (torch.missing) return false;
  PyObject* module = PyImport_ImportModule("torch");
  if (!module) {
    if (!PyErr_ExceptionMatches(PyExc_ImportError)) throw nb::python_error();
    PyErr_Clear();
    torch.missing = true;
    return false;
  }
  Py_DECREF(module);
  return load_torch();
}

void torch_by_attributes(bool only) { torch.attributes_only = only; }

PyObject* imported(const char* module, const char* name, PyObject** cache) {
  if (!*cache) *cache = attribute(module, name).release().ptr();
  return *cache;
}

}  // namespace tl::python
