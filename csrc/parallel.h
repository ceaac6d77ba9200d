// One helper pool for the process, for copies that one core cannot feed.
#pragma once
#include <cstddef>
#include <functional>

namespace tl {

// Runs work(0) ... work(count - 1), each once, on this thread and on idle cores; returns when all are done. `work` must
// not throw. Where the pool serves another caller, or there is one core, this thread does it all. A forked child starts
// with no helpers and makes its own.
void parallel_for(size_t count, const std::function<void(size_t)>& work);

// Cores this process may run on.
int available_cores();

}  // namespace tl
