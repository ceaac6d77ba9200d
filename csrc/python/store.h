// Objects into the pool of this process.
#pragma once
#include <nanobind/nanobind.h>

#include "descriptor.h"
#include "engine.h"
#include "python/codec.h"

namespace tl::python {

// Frames up to this size carry their payload; larger objects are offered from the pool.
constexpr uint64_t kEagerLimit = 32u << 10;

// Waits for room while readers may still make some; null: none before the deadline. `what` wants it, to the flight recorder.
std::shared_ptr<Block> allocate(Engine& engine, uint64_t nbytes, double timeout_s, const char* what);

// An object in the pool, under a claim that is its user's to release. It may be claimed before its bytes are there: readers on other
// hosts can then begin, and follow its filling.
class Stored {
 public:
  Stored(Engine& engine, Descriptor descriptor, std::string meta, ClaimId claim)
      : engine_(engine), descriptor_(std::move(descriptor)), meta_(std::move(meta)), claim_(claim) {}
  ~Stored();  // what isn't there by now never will be
  ClaimId claim() const { return claim_; }
  std::string descriptor() const { return descriptor_.encode(); }
  const std::string& meta() const { return meta_; }  // empty: in the pool, behind the descriptor
  void fill_later(const Packed& packed, std::shared_ptr<Block> block, std::shared_ptr<Filling> filling);
  // Copies what isn't there yet. Needs no GIL.
  void fill();

 private:
  Engine& engine_;
  Descriptor descriptor_;
  std::string meta_;
  ClaimId claim_;
  const Packed* packed_ = nullptr;  // to be filled from
  std::shared_ptr<Block> block_;
  std::shared_ptr<Filling> filling_;
};

// Null: no room before the deadline. `reads` and `ttl_s`: 0: no limit; `reader`: of a connection, 0: anyone. `checksum`: also where the
// engine doesn't make one for all. `later`: its bytes come with fill(), as far as that is possible; `packed` must live until then.
std::unique_ptr<Stored> store(Engine& engine, const Packed& packed, uint64_t reads, double ttl_s, uint64_t reader, uint64_t inline_meta,
                              double timeout_s, bool checksum, bool later);
nanobind::object expose(Engine& engine, uintptr_t address, uint64_t nbytes);
// Null: some tensors lie elsewhere.
std::unique_ptr<Stored> claim_in_place(Engine& engine, const Packed& packed, uint64_t reads, double ttl_s, bool checksum);

}  // namespace tl::python
