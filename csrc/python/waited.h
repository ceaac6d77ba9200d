// The flight recorder, as Python sees it: records are bytes, which tensorlink/recording.py reads.
#pragma once
#include <nanobind/nanobind.h>

namespace tl::python {

// What this thread waits for, or waited for last, in one sentence: for errors. None: nothing.
nanobind::object waited();

}  // namespace tl::python
