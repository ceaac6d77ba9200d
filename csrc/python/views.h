// Objects in a peer's pool, opened here under a hold.
#pragma once
#include <nanobind/nanobind.h>

#include "descriptor.h"
#include "engine.h"
#include "python/codec.h"

namespace tl::python {

// Set by another thread to stop a fill.
struct Stop {
  std::atomic<bool> flag{false};
};

class Refill;

// An object that a peer keeps readable for us, until this and all views built from it are gone.
class View {
 public:
  // Takes the hold and waits for the mappings. Throws Fault::stale, lost, timeout.
  static std::unique_ptr<View> open(Engine& engine, std::shared_ptr<Connection> connection, std::string_view descriptor, double timeout_s);

  // The meta: the one that came beside the descriptor, or a copy of the one in the pool (its owner could still write it).
  std::string_view meta(std::string_view beside);
  uint64_t nbytes() const { return nbytes_; }
  // Both count as the one read of this view, once they succeed.
  PyObject* unpack(std::string_view meta, PyObject* like, bool copy);
  PyObject* fill(std::string_view meta, PyObject* out, const Stop* stop, double timeout_s);
  void refill(Refill& target, const Stop* stop, double timeout_s);  // what prepare() of it compared
  const std::shared_ptr<Connection>& connection() const { return connection_; }
  // Stops between pieces of 8 MiB: Fault::cancelled, and nothing is written after it returns.
  void copy_to(uintptr_t address, const Stop* stop);
  // Address and size of each extent of the payload, read-only.
  const std::vector<Extent>& payload();

 private:
  PyObject* build(std::string_view meta, PyObject* like, bool copy);
  PyObject* read(PyObject* result);

  std::shared_ptr<Connection> connection_;
  std::shared_ptr<Lease> lease_;
  ClaimId claim_ = 0;
  size_t count_ = 0;  // extents of the payload
  bool meta_in_pool_ = false;
  Descriptor::Count counted_ = Descriptor::none;  // and not yet acknowledged
  uint64_t nbytes_ = 0;
  std::vector<Extent> payload_;
  std::string meta_;
};

// Fills one object again and again, from objects that mostly have one layout: their trees are compared once.
//
// The object is taken apart anew each time, which costs a fraction of the comparison: its tensors may have moved.
class Refill {
 public:
  explicit Refill(nanobind::object target);
  // The next run() copies what `meta` describes. Raises: LayoutMismatchError, TypeError, CorruptTransferError.
  void prepare(std::string_view meta);
  // Without `stop` and with a negative time it ends only when all is copied.
  void run(const std::vector<Extent>& extents, const Stop* stop, double timeout_s);

 private:
  nanobind::object target_;
  std::unique_ptr<Packed> packed_;
  std::string meta_;
  std::unique_ptr<FillPlan> plan_;  // refers to `meta_` and `*packed_`
};

// Fills `out` from extents; raises LayoutMismatchError, TransferCancelledError, TransferTimeoutError. Nothing is written after it returns.
PyObject* fill_from(std::string_view meta, const Extent* extents, size_t count, PyObject* out, const Stop* stop, double timeout_s);

}  // namespace tl::python
