// Objects in a peer's pool, opened here: mapped where its memory can be (mapped_view.h), else brought over (remote_view.h).
#pragma once
#include <nanobind/nanobind.h>

#include "descriptor.h"
#include "engine.h"
#include "python/codec.h"

namespace tl::python {

class Refill;

// How long a call may take, and what ends it. Without `stop` and with a negative time it ends only when all is done.
struct Limit {
  Stop* stop = nullptr;
  double timeout_s = -1;
};

// An object that a peer keeps readable for us, until this and all views built from it are gone.
class View {
 public:
  // Throws Fault::stale, lost, timeout.
  static std::unique_ptr<View> open(Engine& engine, const std::shared_ptr<Connection>& connection, std::string_view descriptor, double timeout_s);
  virtual ~View() = default;

  uint64_t nbytes() const { return nbytes_; }
  // The meta: the one that came beside the descriptor, or a copy of the one in the pool (its owner could still write it).
  virtual std::string_view meta(std::string_view beside, const Limit& limit) = 0;
  // Address and size of each extent of the payload, read-only; checked, if there is a checksum.
  virtual const std::vector<Extent>& payload(const Limit& limit) = 0;
  // Called before it is looked at: while this view lives, other hosts may read from here what was read. False: they need not.
  virtual bool pass_on() { return false; }
  // All count as the one read of this view, once they succeed. Throw what opening it may throw.
  virtual PyObject* unpack(std::string_view beside, PyObject* like, bool copy, const Limit& limit) = 0;
  virtual PyObject* fill(std::string_view beside, PyObject* out, const Limit& limit);
  virtual void refill(Refill& target, bool through, const Limit& limit);  // what prepare() of it compared
  // Throws Fault::cancelled, and nothing is written after it returns.
  virtual void copy_to(uintptr_t address, const Limit& limit);

 protected:
  View(Engine& engine, const std::shared_ptr<Connection>& connection, Descriptor descriptor);
  // From here on this thread copies the payload: told where that takes a while.
  void copying(Activity& activity) const;
  // Throws Fault::corrupt: these, and the meta if it lies in the pool, aren't what the checksum was made of.
  void verify(const std::vector<Extent>& spans, std::string_view meta) const;
  void read();

  Engine& engine_;
  std::shared_ptr<Connection> connection_;
  Descriptor descriptor_;  // `counted`: and not yet acknowledged
  uint64_t nbytes_ = 0;
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
  void run(const std::vector<Extent>& extents, const Limit& limit);
  const FillPlan& plan() const { return *plan_; }

 private:
  nanobind::object target_;
  std::unique_ptr<Packed> packed_;
  std::string meta_;
  std::unique_ptr<FillPlan> plan_;  // refers to `meta_` and `*packed_`
};

// Fills `out` from extents; raises LayoutMismatchError, TransferCancelledError, TransferTimeoutError. Nothing is written after it returns.
PyObject* fill_from(std::string_view meta, const Extent* extents, size_t count, PyObject* out, const Limit& limit);

}  // namespace tl::python
