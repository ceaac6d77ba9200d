#include "python/frameworks.h"

namespace nb = nanobind;

namespace tl::python {

int dtype_named(std::string_view name) {
  for (int i = 0; i < dtype_count; ++i)
    if (name == dtype_table[i].name) return i;
  return -1;
}

nb::object attribute(const char* module, const char* name) {
  return nb::module_::import_(module).attr(name);
}

Leaf read_tensor(PyObject* object, TensorFields& fields) {
  PyTypeObject* type = Py_TYPE(object);
  if (is_torch(type)) return read_torch(object, fields);
  if (is_numpy(type)) return read_numpy(object, fields);
  // Without importing it: an object can only be a torch tensor where somebody else has.
  return load_torch() && is_torch(type) ? read_torch(object, fields) : Leaf::no;
}

PyObject* new_tensor(Framework framework, DType dtype, int ndim, const int64_t* shape, uint64_t nbytes, char** data) {
  return framework == Framework::numpy ? new_numpy(dtype, ndim, shape, data)
                                       : new_torch(dtype, ndim, shape, nbytes, data);
}

PyObject* imported(const char* module, const char* name, PyObject** cache) {
  if (!*cache) *cache = attribute(module, name).release().ptr();
  return *cache;
}

}  // namespace tl::python
