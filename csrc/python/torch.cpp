#include <algorithm>
#include <cstdlib>
#include <cstring>
#ifdef __linux__
#include <dlfcn.h>
#include <sys/mman.h>
#endif

#include "python/dlpack_abi.h"
#include "python/frameworks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tl::python {

namespace {

// Looked up once; lives as long as the process, like the types in it.
struct Torch {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  const dlpack::ExchangeApi* api = nullptr;
  PyObject *is_neg = nullptr, *is_conj = nullptr, *dtype_get = nullptr;  // descriptors of torch.Tensor
  bool (*native_is_neg)(const void*) = nullptr, (*native_is_conj)(const void*) = nullptr;  // of an at::Tensor
  PyObject *uint8 = nullptr, *int8 = nullptr;
  PyObject *fields = nullptr, *from_capsule = nullptr;  // tensorlink.tensors, without the exchange API
  PyObject* dtypes[dtype_count] = {};
  bool attributes_only = false, missing = false;
} torch;

bool truth(PyObject* method, PyObject* object) {
  PyObject* result = PyObject_CallOneArg(method, object);
  if (!result) throw nb::python_error();
  Py_DECREF(result);
  return result == Py_True;
}

// The at::Tensor (a pointer) in a torch.Tensor.
const void* inner(PyObject* object) {
  return reinterpret_cast<const char*>(object) + sizeof(PyObject);
}

// The Python methods give up the lock of the interpreter for each tensor, which costs more than all else that is asked.
// So torch's functions behind them are looked for, and used if they say what the methods say.
void find_native_checks(nb::object module) try {
#ifdef __linux__
  void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return;
  const auto find = [library](const char* name) { return reinterpret_cast<bool (*)(const void*)>(dlsym(library, name)); };
  const auto is_neg = find("_ZN2at6native6is_negERKNS_6TensorE");
  const auto is_conj = find("_ZN2at6native7is_conjERKNS_6TensorE");
  dlclose(library);  // torch keeps it
  if (!is_neg || !is_conj) return;
  nb::object plain = module.attr("zeros")(1, "dtype"_a = module.attr("complex64"), "device"_a = "cpu");
  nb::object conjugate = plain.attr("conj")(), negative = module.attr("_neg_view")(plain);
  for (const nb::object& tensor : {plain, conjugate, negative}) {
    const void* impl = *static_cast<void* const*>(inner(tensor.ptr()));
    if (reinterpret_cast<uintptr_t>(impl) != nb::cast<uintptr_t>(tensor.attr("_cdata"))) return;
    if (is_neg(inner(tensor.ptr())) != tensor.is(negative) || is_conj(inner(tensor.ptr())) != tensor.is(conjugate)) return;
  }
  torch.native_is_neg = is_neg;
  torch.native_is_conj = is_conj;
#endif
} catch (const std::exception&) {  // then the methods do
}

bool negative(PyObject* object) {
  return torch.native_is_neg ? torch.native_is_neg(inner(object)) : truth(torch.is_neg, object);
}

bool conjugate(PyObject* object) {
  return torch.native_is_conj ? torch.native_is_conj(inner(object)) : truth(torch.is_conj, object);
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

// Fills all but what owns it and its data; `dims` has room for the shape and the strides.
void describe(dlpack::ManagedVersioned& managed, DType dtype, int ndim, const int64_t* shape, const int64_t* strides,
              int64_t* dims) {
  const auto item = static_cast<int64_t>(itemsize(dtype));
  std::copy_n(shape, ndim, dims);
  if (strides)
    for (int i = 0; i < ndim; ++i) dims[ndim + i] = strides[i] / item;
  else
    dense_strides(shape, ndim, 1, dims + ndim);
  managed.version = {dlpack::major_version, 0};
  managed.flags = 0;
  managed.tensor = {nullptr, {dlpack::device_cpu, 0}, ndim, {info(dtype).dl_code, info(dtype).dl_bits, 1}, dims, dims + ndim, 0};
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
  describe(holder->managed, dtype, ndim, shape, strides, reinterpret_cast<int64_t*>(raw + dims_at));
  holder->managed.context = holder;
  holder->managed.deleter = delete_holder;
  holder->managed.tensor.data = room ? raw + data_at : nullptr;
  return holder;
}

void drop_capsule(PyObject* capsule) {
  auto* managed = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule, "dltensor"));
  if (managed)
    managed->deleter(managed);
  else
    PyErr_Clear();  // used: renamed by its consumer
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
  managed->tensor.dtype = item == 16
                              ? dlpack::DataType{5, 128, 1}
                              : dlpack::DataType{static_cast<uint8_t>(item == 1), static_cast<uint8_t>(item * 8), 1};
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

bool by_api() {
  return torch.api && !torch.attributes_only;
}

PyObject* import_managed(dlpack::ManagedVersioned* managed) {
  void* object = nullptr;
  return torch.api->import_managed(managed, &object) == 0 ? static_cast<PyObject*>(object) : nullptr;
}

PyObject* import_torch_tensor(Holder* holder, DType dtype) {
  return by_api() ? import_managed(&holder->managed) : import_by_capsule(holder, dtype);
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

bool is_torch(PyTypeObject* type) {
  return torch.tensor && (type == torch.tensor || type == torch.parameter);
}

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
  if (torch.api) find_native_checks(t);
  torch.parameter = reinterpret_cast<PyTypeObject*>(forever(t.attr("nn").attr("Parameter")));
  torch.tensor = reinterpret_cast<PyTypeObject*>(type.release().ptr());
  return true;
}

void prefetch_tensor(PyObject* object) {
  if (!torch.native_is_neg || !is_torch(Py_TYPE(object))) return;
  const char* impl = *static_cast<const char* const*>(inner(object));
  for (int line = 0; line < 256; line += 64) __builtin_prefetch(impl + line);
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
  // The API exports uint1 ... uint7 and int1 ... int7 as whole bytes, and lazily conjugated or negated tensors without
  // a word.
  if (fields.dtype == DType::uint8 || fields.dtype == DType::int8) {
    PyObject* dtype =
        Py_TYPE(torch.dtype_get)->tp_descr_get(torch.dtype_get, object, reinterpret_cast<PyObject*>(Py_TYPE(object)));
    if (!dtype) throw nb::python_error();
    Py_DECREF(dtype);
    if (dtype != torch.uint8 && dtype != torch.int8) return Leaf::special;
  }
  if (negative(object) || (info(fields.dtype).dl_code == 5 && conjugate(object))) return Leaf::special;
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

PyObject* torch_view(DType dtype, int ndim, const int64_t* shape, const int64_t* strides, const char* data,
                     const Keep& keep) {
  if (!torch_has(dtype)) return nullptr;
  Holder* holder = make_holder(dtype, ndim, shape, strides, 0);
  if (!holder) return nullptr;
  holder->managed.tensor.data = const_cast<char*>(data);
  holder->keep = keep;
  return import_torch_tensor(holder, dtype);
}

// Gone with the last of its views, and with the TorchViews that fills it.
struct ViewChunk {
  static constexpr uint32_t places = 64;
  static constexpr int rank = 4;
  struct View {
    dlpack::ManagedVersioned managed;
    int64_t dims[2 * rank];
  };
  Keep keep;
  std::atomic<uint32_t> left{places};
  View views[places];

  void drop(uint32_t count) {
    if (left.fetch_sub(count, std::memory_order_acq_rel) == count) delete this;
  }
};

TorchViews::~TorchViews() {
  if (chunk_ && used_ < ViewChunk::places) chunk_->drop(ViewChunk::places - used_);
}

PyObject* TorchViews::make(DType dtype, int ndim, const int64_t* shape, const int64_t* strides, const char* data) {
  if (!by_api() || ndim > ViewChunk::rank) return torch_view(dtype, ndim, shape, strides, data, keep_);
  if (!torch_has(dtype)) return nullptr;
  if (!chunk_ || used_ == ViewChunk::places) {
    chunk_ = new ViewChunk;
    chunk_->keep = keep_;
    used_ = 0;
  }
  ViewChunk::View& view = chunk_->views[used_++];
  describe(view.managed, dtype, ndim, shape, strides, view.dims);
  view.managed.context = chunk_;
  view.managed.deleter = [](dlpack::ManagedVersioned* self) { static_cast<ViewChunk*>(self->context)->drop(1); };  // any thread
  view.managed.tensor.data = const_cast<char*>(data);
  return import_managed(&view.managed);
}

bool torch_can_view(DType dtype, int ndim, const int64_t* shape, const int64_t* strides) {
  const auto item = static_cast<int64_t>(itemsize(dtype));
  for (int i = 0; i < ndim; ++i)
    if (strides[i] % item != 0 || (strides[i] < 0 && shape[i] > 1)) return false;
  return true;
}

PyObject* new_torch(DType dtype, int ndim, const int64_t* shape, uint64_t nbytes, char** data) {
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

void torch_by_attributes(bool only) {
  torch.attributes_only = only;
}

}  // namespace tl::python
