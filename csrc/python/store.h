// Objects into the pool of this process.
#pragma once
#include <nanobind/nanobind.h>

#include "engine.h"
#include "python/codec.h"

namespace tl::python {

// Frames up to this size carry their payload; larger objects are offered from the pool.
constexpr uint64_t kEagerLimit = 32u << 10;

// Waits for room while readers may still make some; null: none before the deadline. `what` wants it, to the flight recorder.
std::shared_ptr<Block> allocate(Engine& engine, uint64_t nbytes, double timeout_s, const char* what);

// (claim, descriptor, meta beside it), or None. `reads` and `ttl_s`: 0: no limit; `reader`: of a connection, 0: anyone.
// `checksum`: also where the engine doesn't make one for all.
nanobind::object store(Engine& engine, const Packed& packed, uint64_t reads, double ttl_s, uint64_t reader, uint64_t inline_meta, double timeout_s,
                         bool checksum);
nanobind::object expose(Engine& engine, uintptr_t address, uint64_t nbytes);
nanobind::object claim_in_place(Engine& engine, const Packed& packed, uint64_t reads, double ttl_s, bool checksum);

}  // namespace tl::python
