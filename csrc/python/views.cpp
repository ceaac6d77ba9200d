#include "python/views.h"

#include "copy.h"
#include "crc32c.h"
#include "python/mapped_view.h"
#include "python/remote_view.h"
#include "python/wait.h"

namespace nb = nanobind;

namespace tl::python {

namespace {

// Runs a plan to its end, or until the flag or the deadline stops it: Fault::cancelled, timeout. Gives up the GIL meanwhile.
void finish(const FillPlan& plan, const Extent* extents, size_t count, const Limit& limit) {
  static const std::atomic<bool> never{false};
  int64_t deadline = deadline_of(limit.timeout_s);
  Outcome outcome;
  {
    Released released;
    outcome = plan.run(extents, count, limit.stop ? limit.stop->flag : never, deadline == INT64_MAX ? 0 : deadline);
  }
  if (outcome == Outcome::stopped) throw Error(Fault::cancelled, "cancelled while the tensors were being filled");
  if (outcome == Outcome::timed_out) throw Error(Fault::timeout, "the deadline passed while the tensors were being filled");
}

}  // namespace

std::unique_ptr<View> View::open(Engine& engine, const std::shared_ptr<Connection>& connection, std::string_view bytes, double timeout_s) {
  Descriptor descriptor = Descriptor::decode(bytes);
  if (auto tcp = std::dynamic_pointer_cast<TcpConnection>(connection)) return std::make_unique<RemoteView>(engine, tcp, std::move(descriptor));
  return std::make_unique<MappedView>(engine, std::static_pointer_cast<ShmConnection>(connection), std::move(descriptor), timeout_s);
}

View::View(Engine& engine, const std::shared_ptr<Connection>& connection, Descriptor descriptor)
    : engine_(engine), connection_(connection), descriptor_(std::move(descriptor)) {
  for (size_t i = 0; i < descriptor_.payload_count(); ++i) nbytes_ += descriptor_.extents[i].nbytes;
}

void View::copying(Activity& activity) const {
  if (nbytes_ < Flight::kLarge) return;
  activity.begin({"get", "copy", connection_->peer.name, connection_->peer.incarnation, connection_->carrier(), {}, nbytes_});
}

void View::verify(const std::vector<Extent>& spans, std::string_view meta) const {
  if (!descriptor_.checked) return;
  uint32_t crc = 0;
  {
    Released released;
    for (const Extent& span : spans) crc = crc32c(crc, span.data, span.nbytes);
    if (descriptor_.meta_in_pool) crc = crc32c(crc, meta.data(), meta.size());
  }
  if (crc != descriptor_.crc) throw Error(Fault::corrupt, "the bytes that arrived aren't those that were put: their checksum differs");
}

void View::read() {
  if (connection_->pid) connection_->counters.bytes_read.fetch_add(nbytes_, std::memory_order_relaxed);
  if (descriptor_.counted == Descriptor::none) return;
  connection_->acknowledge(descriptor_);
  descriptor_.counted = Descriptor::none;
}

PyObject* View::fill(std::string_view beside, PyObject* out, const Limit& limit) {
  const std::vector<Extent>& spans = payload(limit);
  Activity activity(engine_.flight());
  copying(activity);
  PyObject* result = fill_from(meta(beside, limit), spans.data(), spans.size(), out, limit);
  read();
  return result;
}

void View::refill(Refill& target, bool through, const Limit& limit) {
  const std::vector<Extent>& spans = payload(limit);
  Activity activity(engine_.flight());
  copying(activity);
  target.run(spans, through ? limit : Limit{});
  read();
}

void View::copy_to(uintptr_t address, const Limit& limit) {
  constexpr uint64_t kPiece = 8u << 20;
  const std::vector<Extent>& spans = payload(limit);
  Activity activity(engine_.flight());
  copying(activity);
  Released released;
  char* to = reinterpret_cast<char*>(address);
  for (const Extent& span : spans)
    for (uint64_t at = 0; at < span.nbytes; at += kPiece) {
      if (limit.stop && limit.stop->flag) throw Error(Fault::cancelled, "cancelled while bytes were being copied");
      uint64_t n = std::min(kPiece, span.nbytes - at);
      copy_bytes(to, span.data + at, n);
      to += n;
      if (activity.begun()) activity->moved(at + n, now_ns());
    }
}

Refill::Refill(nb::object target) : target_(std::move(target)), packed_(pack(target_.ptr(), true)) {}

void Refill::prepare(std::string_view meta) {
  auto packed = pack(target_.ptr(), true);
  const bool same = plan_ && packed->meta == packed_->meta && meta == meta_;
  if (same) {
    plan_->retarget(*packed);
  } else {
    plan_.reset();
    meta_ = meta;
    auto plan = std::make_unique<FillPlan>(meta_.data(), meta_.size(), *packed, Wording{"state_dict", "is published", "into"});
    if (!plan->differences().empty())
      raise("LayoutMismatchError", "into doesn't fit what is published:\n" + plan->differences());
    plan_ = std::move(plan);
  }
  packed_ = std::move(packed);
}

void Refill::run(const std::vector<Extent>& extents, const Limit& limit) { finish(*plan_, extents.data(), extents.size(), limit); }

PyObject* fill_from(std::string_view meta, const Extent* extents, size_t count, PyObject* out, const Limit& limit) {
  auto target = pack(out, true);
  FillPlan plan(meta.data(), meta.size(), *target);
  if (!plan.differences().empty()) raise("LayoutMismatchError", "out doesn't fit what arrived:\n" + plan.differences());
  finish(plan, extents, count, limit);
  return plan.result();
}

}  // namespace tl::python
