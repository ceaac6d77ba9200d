#include "python/mapped_view.h"

#include "python/wait.h"

namespace tl::python {

namespace {
// Below this a copy is cheaper than a mapped view, and does not pin a block.
constexpr uint64_t kViewFrom = 64u << 10;
}  // namespace

MappedView::MappedView(Engine& engine, std::shared_ptr<ShmConnection> connection, Descriptor descriptor, double timeout_s)
    : View(engine, connection, std::move(descriptor)), lease_(connection->hold(descriptor_.claim, descriptor_.extents)) {
  if (!lease_->ready()) await_mappings(engine, *connection, timeout_s);
}

void MappedView::await_mappings(Engine& engine, ShmConnection& connection, double timeout_s) {
  constexpr int64_t kAskAgain = 100'000'000;
  Activity activity(engine.flight());  // one, however often it asks
  for (int64_t deadline = deadline_of(timeout_s);;) {
    uint32_t missing = lease_->missing();
    connection.note(NoteKind::want, missing);
    bool refused = false;
    int64_t until = std::min(deadline, now_ns() + kAskAgain);
    auto describe = [&] { return Doing{"get", "mapping", connection.peer.name, connection.peer.incarnation, connection.carrier(), {}, nbytes_}; };
    wait_for(engine, [&] { return lease_->ready() || (refused = connection.refused_segment(missing)) || connection.gone(); }, until, describe);
    if (lease_->ready()) return;
    if (refused) throw Error(Fault::stale, "the memory that the handle names was given back");
    if (connection.gone()) throw Error(Fault::lost, connection.peer.name + " went before its memory was mapped");
    if (now_ns() >= deadline) throw Error(Fault::timeout, connection.peer.name + " did not hand over its memory in time");
  }
}

std::string_view MappedView::meta(std::string_view beside, const Limit&) {
  if (!descriptor_.meta_in_pool) return beside;
  size_t last = descriptor_.payload_count();
  if (meta_.empty()) meta_.assign(lease_->shared(last), lease_->extent(last).nbytes);
  return meta_;
}

const std::vector<Extent>& MappedView::payload(const Limit&) {
  size_t count = descriptor_.payload_count();
  if (payload_.size() == count) return payload_;
  std::vector<Extent> spans;
  for (size_t i = 0; i < count; ++i) spans.push_back({lease_->shared(i), lease_->extent(i).nbytes});
  verify(spans, meta({}, {}));
  return payload_ = std::move(spans);
}

PyObject* MappedView::unpack(std::string_view beside, PyObject* like, bool copy, const Limit& limit) {
  const std::vector<Extent>& spans = payload(limit);
  std::string_view meta = this->meta(beside, limit);
  uint8_t frameworks = meta_frameworks(meta.data(), meta.size(), like);
  Memory shared{spans.data(), spans.size(), lease_};
  PyObject* result;
  if (copy || nbytes_ < kViewFrom) {
    result = python::unpack(meta.data(), meta.size(), shared, nullptr, Mode::copy, like);
  } else {
    std::vector<Extent> own;
    constexpr uint8_t kTorch = 2;
    if (frameworks & kTorch)
      for (size_t i = 0; i < spans.size(); ++i) own.push_back({lease_->writable(i), lease_->extent(i).nbytes});
    Memory writable{own.data(), own.size(), lease_};
    result = python::unpack(meta.data(), meta.size(), shared, own.empty() ? nullptr : &writable, Mode::view, like);
  }
  read();
  return result;
}

}  // namespace tl::python
