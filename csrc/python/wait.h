// Waiting from Python: a few polls with the GIL, since giving it up while another Python thread is busy costs milliseconds;
// then without it, in slices, so that Ctrl-C ends every wait.
#pragma once
#include <nanobind/nanobind.h>

#include <type_traits>

#include "engine.h"
#include "python/gil.h"

namespace tl::python {

inline int64_t deadline_of(double timeout_s) {
  return timeout_s < 0 || timeout_s > 1e9 ? INT64_MAX : now_ns() + static_cast<int64_t>(timeout_s * 1e9);
}

// Whether ready() came to hold before the deadline. Throws python_error on a signal whose handler raised, Fault::closed.
// `describe()` tells the flight recorder what is being waited for, and is called only where the thread is going to sleep; null: that
// is told elsewhere.
template <class Ready, class Describe = std::nullptr_t>
bool wait_for(Engine& engine, Ready ready, int64_t deadline_ns, Describe describe = nullptr) {
  constexpr int kPolls = 200;
  constexpr int64_t kSlice = 50'000'000;
  for (int i = 0; i < kPolls; ++i) {
    engine.pump();
    if (ready()) return true;
    if (engine.closed()) break;
    cpu_relax();
  }
  Activity activity(engine.flight());
  for (const int64_t began = now_ns();;) {
    bool done;
    {
      Released released;
      int64_t now = now_ns();
      [[maybe_unused]] bool told = false;  // once a slice, so that the last news are fresh
      done = engine.wait(ready, deadline_ns - now < kSlice ? deadline_ns : now + kSlice, [&] {
        if constexpr (!std::is_null_pointer_v<Describe>)
          if (!std::exchange(told, true)) activity.begin(describe());
      });
    }
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
    if (done) return true;
    if (engine.closed()) throw Error(Fault::closed, "the endpoint was shut down");
    if (now_ns() >= deadline_ns) {
      if (deadline_ns - began >= Flight::kLook) activity.turned_out("timeout", true);
      return false;
    }
  }
}

}  // namespace tl::python
