#include "python/bind.h"

namespace tl::python {
void bind_codec(nanobind::module_&) {}
}  // namespace tl::python
