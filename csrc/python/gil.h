// Giving up the interpreter's lock for a while, also where the interpreter ends meanwhile.
#pragma once
#include <nanobind/nanobind.h>

#include <cxxabi.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tl::python {

// Others may run Python while this lives. Before 3.14 Python ends a daemon thread that wants the lock after the interpreter's end, by an
// unwinding that destructors and bindings turn into an abort. So the thread stays here, until the process has gone.
class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  ~Released() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) ::pause();
    }
  }
  Released(const Released&) = delete;

 private:
  PyThreadState* state_;
};

inline bool in_main_thread() { return ::syscall(SYS_gettid) == ::getpid(); }

// In the main thread, while the lock is given up: lets handlers of signals run. Throws what they raise, so Ctrl-C ends a wait.
inline void look_for_signals() {
  nanobind::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

}  // namespace tl::python
