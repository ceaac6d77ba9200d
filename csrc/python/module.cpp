#include "python/bind.h"

NB_MODULE(_core, module) {
  module.doc() = "TensorLink's native core: memory, messages and copies. Private; use `tensorlink`.";
  tl::python::bind_codec(module);
  tl::python::bind_engine(module);
}
