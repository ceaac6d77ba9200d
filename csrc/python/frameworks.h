// numpy and torch through their C structures, with no link to either. Everything needs the GIL.
#pragma once
#include <nanobind/nanobind.h>

#include "dtype.h"
#include "meta.h"
#include "python/codec.h"

namespace tl::python {

// What a tensor object refers to; the arrays belong to the object or, where strides are computed, to `buffer`.
struct TensorFields {
  const char* data;
  int ndim;
  DType dtype;
  Framework framework;
  bool writable;
  const int64_t* shape;
  int64_t strides[max_rank];  // bytes
  int64_t shape_buffer[max_rank];
};

void prefetch_tensor(PyObject* object);  // a hint to the processor, for an object of any type

enum class Leaf { no, yes, special };  // special: a tensor of these types that needs the Python adapter

// Reads an exact numpy.ndarray, torch.Tensor or torch.nn.Parameter.
Leaf read_tensor(PyObject* object, TensorFields& fields);

// A capsule that holds `keep` until numpy drops the last array on it.
PyObject* keep_capsule(const Keep& keep);

// New references; null: a Python error is set. `strides` in bytes, null: dense. `base` is shared by many arrays.
PyObject* numpy_view(DType dtype, int ndim, const int64_t* shape, const int64_t* strides, const char* data,
                     PyObject* base);
PyObject* torch_view(DType dtype, int ndim, const int64_t* shape, const int64_t* strides, const char* data,
                     const Keep& keep);

// Makes torch views that share one `keep`; what torch wants to own of each lies together for many of them, since an
// allocation each would cost as much as all else here.
class TorchViews {
 public:
  explicit TorchViews(const Keep& keep) : keep_(keep) {}
  ~TorchViews();
  TorchViews(const TorchViews&) = delete;
  PyObject* make(DType dtype, int ndim, const int64_t* shape, const int64_t* strides, const char* data);  // as torch_view

 private:
  const Keep& keep_;
  struct ViewChunk* chunk_ = nullptr;  // the one in use, and how many of its places are
  uint32_t used_ = 0;
};
bool torch_can_view(DType dtype, int ndim, const int64_t* shape, const int64_t* strides);

// A private dense tensor, not initialised; `*data` is where its bytes go.
PyObject* new_tensor(Framework framework, DType dtype, int ndim, const int64_t* shape, uint64_t nbytes, char** data);

bool torch_available();               // imports it if it is installed
void torch_by_attributes(bool only);  // for tests: as with a torch that has no C exchange API

// The parts of the above that know one framework.
bool is_numpy(PyTypeObject* type);
bool is_torch(PyTypeObject* type);
bool load_torch();  // false: nobody has imported it
Leaf read_numpy(PyObject* object, TensorFields& fields);
Leaf read_torch(PyObject* object, TensorFields& fields);
PyObject* new_numpy(DType dtype, int ndim, const int64_t* shape, char** data);
PyObject* new_torch(DType dtype, int ndim, const int64_t* shape, uint64_t nbytes, char** data);

int dtype_named(std::string_view name);  // -1: none of ours
nanobind::object attribute(const char* module, const char* name);

// A function or type of a module, imported once and kept; throws nanobind::python_error.
PyObject* imported(const char* module, const char* name, PyObject** cache);

}  // namespace tl::python
