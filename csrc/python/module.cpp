#include "python/bind.h"

NB_MODULE(_core, module) {
  nanobind::set_leak_warnings(false);  // views may outlive the interpreter, by design
  module.doc() = "TensorLink's native core: memory, messages and copies. Private; use `tensorlink`.";
  tl::python::bind_codec(module);
  tl::python::bind_digest(module);
  tl::python::bind_flight(module);
  tl::python::bind_engine(module);
}
