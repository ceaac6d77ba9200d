// The binding layer: the only sources that include Python. Each function adds one group of names to the module.
#pragma once
#include <nanobind/nanobind.h>

namespace tl::python {

void bind_codec(nanobind::module_& module);   // objects <-> meta and payload
void bind_digest(nanobind::module_& module);  // checksums and authentication
void bind_flight(nanobind::module_& module);  // the flight recorder
void bind_engine(nanobind::module_& module);  // pool, connections, messages

}  // namespace tl::python
