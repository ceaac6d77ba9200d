#include "python/bind.h"

namespace tl::python {
void bind_engine(nanobind::module_&) {}
}  // namespace tl::python
