#include "python/views.h"

#include "copy.h"
#include "python/wait.h"

namespace nb = nanobind;

namespace tl::python {

namespace {
// Below this a copy is cheaper than a mapped view, and does not pin a block.
constexpr uint64_t kViewFrom = 64u << 10;

// Runs a plan to its end, or until the flag or the deadline stops it: Fault::cancelled, timeout. Gives up the GIL meanwhile.
void finish(const FillPlan& plan, const Extent* extents, size_t count, const Stop* stop, int64_t deadline_ns) {
  static const std::atomic<bool> never{false};
  Outcome outcome;
  {
    nb::gil_scoped_release released;
    outcome = plan.run(extents, count, stop ? stop->flag : never, deadline_ns == INT64_MAX ? 0 : deadline_ns);
  }
  if (outcome == Outcome::stopped) throw Error(Fault::cancelled, "cancelled while the tensors were being filled");
  if (outcome == Outcome::timed_out) throw Error(Fault::timeout, "the deadline passed while the tensors were being filled");
}

}  // namespace

std::unique_ptr<View> View::open(Engine& engine, std::shared_ptr<Connection> connection, std::string_view bytes, double timeout_s) {
  Descriptor descriptor = Descriptor::decode(bytes);
  auto view = std::make_unique<View>();
  view->claim_ = descriptor.claim;
  view->count_ = descriptor.payload_count();
  view->meta_in_pool_ = descriptor.meta_in_pool;
  view->counted_ = descriptor.counted;
  for (size_t i = 0; i < view->count_; ++i) view->nbytes_ += descriptor.extents[i].nbytes;
  view->connection_ = std::move(connection);
  Connection& c = *view->connection_;
  view->lease_ = c.hold(descriptor.claim, std::move(descriptor.extents));
  int64_t deadline = deadline_of(timeout_s);
  constexpr int64_t kAskAgain = 100'000'000;
  while (!view->lease_->ready()) {
    uint32_t missing = view->lease_->missing();
    c.note(NoteKind::want, missing);
    bool refused = false;
    int64_t until = std::min(deadline, now_ns() + kAskAgain);
    wait_for(engine, [&] { return view->lease_->ready() || (refused = c.refused_segment(missing)) || c.gone(); }, until);
    if (view->lease_->ready()) break;
    if (refused) throw Error(Fault::stale, "the memory that the handle names was given back");
    if (c.gone()) throw Error(Fault::lost, c.peer.name + " went before its memory was mapped");
    if (now_ns() >= deadline) throw Error(Fault::timeout, c.peer.name + " did not hand over its memory in time");
  }
  return view;
}

std::string_view View::meta(std::string_view beside) {
  if (!meta_in_pool_) return beside;
  if (meta_.empty()) meta_.assign(lease_->shared(count_), lease_->extent(count_).nbytes);
  return meta_;
}

const std::vector<Extent>& View::payload() {
  if (payload_.size() != count_) {
    payload_.clear();
    for (size_t i = 0; i < count_; ++i) payload_.push_back({lease_->shared(i), lease_->extent(i).nbytes});
  }
  return payload_;
}

PyObject* View::unpack(std::string_view meta, PyObject* like, bool copy) { return read(build(meta, like, copy)); }

PyObject* View::read(PyObject* result) {
  connection_->counters.bytes_read.fetch_add(nbytes_, std::memory_order_relaxed);
  Descriptor::Count counted = std::exchange(counted_, Descriptor::none);
  if (counted != Descriptor::none) connection_->acknowledge(claim_);
  if (counted == Descriptor::tell) connection_->note(NoteKind::kick);
  return result;
}

PyObject* View::build(std::string_view meta, PyObject* like, bool copy) {
  uint8_t frameworks = meta_frameworks(meta.data(), meta.size(), like);
  Memory shared{payload().data(), count_, lease_};
  if (copy || nbytes_ < kViewFrom) return python::unpack(meta.data(), meta.size(), shared, nullptr, Mode::copy, like);
  std::vector<Extent> own;
  constexpr uint8_t kTorch = 2;
  if (frameworks & kTorch)
    for (size_t i = 0; i < count_; ++i) own.push_back({lease_->writable(i), lease_->extent(i).nbytes});
  Memory writable{own.data(), own.size(), lease_};
  return python::unpack(meta.data(), meta.size(), shared, own.empty() ? nullptr : &writable, Mode::view, like);
}

void View::copy_to(uintptr_t address, const Stop* stop) {
  constexpr uint64_t kPiece = 8u << 20;
  const std::vector<Extent>& spans = payload();
  nb::gil_scoped_release released;
  char* to = reinterpret_cast<char*>(address);
  for (const Extent& span : spans)
    for (uint64_t at = 0; at < span.nbytes; at += kPiece) {
      if (stop && stop->flag) throw Error(Fault::cancelled, "cancelled while bytes were being copied");
      uint64_t n = std::min(kPiece, span.nbytes - at);
      copy_bytes(to, span.data + at, n);
      to += n;
    }
}

PyObject* View::fill(std::string_view meta, PyObject* out, const Stop* stop, double timeout_s) {
  return read(fill_from(meta, payload().data(), count_, out, stop, timeout_s));
}

void View::refill(Refill& target, const Stop* stop, double timeout_s) {
  target.run(payload(), stop, timeout_s);
  read(nullptr);
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

void Refill::run(const std::vector<Extent>& extents, const Stop* stop, double timeout_s) {
  finish(*plan_, extents.data(), extents.size(), stop, deadline_of(timeout_s));
}

PyObject* fill_from(std::string_view meta, const Extent* extents, size_t count, PyObject* out, const Stop* stop, double timeout_s) {
  auto target = pack(out, true);
  FillPlan plan(meta.data(), meta.size(), *target);
  if (!plan.differences().empty()) raise("LayoutMismatchError", "out doesn't fit what arrived:\n" + plan.differences());
  finish(plan, extents, count, stop, deadline_of(timeout_s));
  return plan.result();
}

}  // namespace tl::python
