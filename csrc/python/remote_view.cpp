#include "python/remote_view.h"

#include "python/store.h"
#include "python/wait.h"

namespace nb = nanobind;

namespace tl::python {

namespace {
// Below this the bytes are brought into memory of their own: a block of the pool is worth more.
constexpr uint64_t kPoolFrom = 64u << 10;
constexpr uint64_t kAlign = 64;
}  // namespace

RemoteView::RemoteView(Engine& engine, const std::shared_ptr<TcpConnection>& connection, Descriptor descriptor)
    : View(engine, connection, std::move(descriptor)), tcp_(connection) {}

RemoteView::~RemoteView() {
  if (relay_.descriptor.claim) engine_.release(relay_.descriptor.claim);
}

// Makes a claim over the memory that the payload is brought to.
void RemoteView::begin_relay() {
  if (!passes_on_ || !block_ || relay_.descriptor.claim) return;
  Claim claim;
  claim.blocks.push_back(block_);
  claim.filling = relay_.filling = std::make_shared<Filling>();
  relay_.descriptor.key = claim.key;
  relay_.advanced = [&engine = engine_] { engine.nudge(); };
  for (const Extent& span : payload_)
    relay_.descriptor.extents.push_back({block_->extent().segment, block_->extent().offset + static_cast<uint64_t>(span.data - block_->data()), span.nbytes});
  relay_.descriptor.claim = engine_.claim(std::move(claim));
}

void RemoteView::bring(const std::vector<tl::Extent>& extents, const std::vector<Sink>& sinks, const Limit& limit, const Relay* relay) {
  Patience patience{deadline_of(limit.timeout_s), limit.stop};
  if (in_main_thread()) patience.look = look_for_signals;
  Released released;
  try {
    tcp_->reads().read(descriptor_, extents, sinks, patience, relay);
  } catch (...) {
    if (relay) relay->fail();
    throw;
  }
}

std::string_view RemoteView::meta(std::string_view beside, const Limit& limit) {
  if (!descriptor_.meta_in_pool) return beside;
  if (meta_.empty()) descriptor_.checked ? static_cast<void>(payload(limit)) : bring_meta(limit);
  return meta_;
}

void RemoteView::bring_meta(const Limit& limit) {
  const tl::Extent& extent = descriptor_.extents.back();
  constexpr uint64_t kMost = 1u << 30;
  if (extent.nbytes > kMost) throw Error(Fault::corrupt, "a peer describes an object in more than a GiB");
  std::string meta(extent.nbytes, '\0');
  bring({extent}, {{meta.data(), meta.size()}}, limit);
  meta_ = std::move(meta);
}

std::vector<tl::Extent> RemoteView::payload_extents() const {
  return {descriptor_.extents.begin(), descriptor_.extents.begin() + static_cast<ptrdiff_t>(descriptor_.payload_count())};
}

void RemoteView::allocate(const Limit& limit) {
  if (keep_) return;
  uint64_t total = 0;
  for (const tl::Extent& extent : payload_extents()) {
    total = (total + kAlign - 1) / kAlign * kAlign;
    if (extent.nbytes > engine_.arena()->budget() - std::min(engine_.arena()->budget(), total)) break;
    total += extent.nbytes;
  }
  char* data;
  if (nbytes_ < kPoolFrom && total < kPoolFrom) {
    std::shared_ptr<char> own(static_cast<char*>(::operator new(total + kAlign, std::align_val_t{kAlign})),
                              [](char* p) { ::operator delete(p, std::align_val_t{kAlign}); });
    data = own.get();
    keep_ = std::move(own);
  } else {
    auto block = nbytes_ > engine_.arena()->budget() ? nullptr : python::allocate(engine_, total, limit.timeout_s < 0 ? 60 : limit.timeout_s, "read");
    if (!block) throw Error(Fault::no_room, "no room in the pool of this process for the " + std::to_string(nbytes_) + " bytes that are to be read");
    Released released;
    engine_.arena()->warm(*block);
    data = block->data();
    keep_ = block;
    block_ = std::move(block);
  }
  uint64_t at = 0;
  payload_.clear();
  for (const tl::Extent& extent : payload_extents()) {
    at = (at + kAlign - 1) / kAlign * kAlign;
    payload_.push_back({data + at, extent.nbytes});
    at += extent.nbytes;
  }
}

const std::vector<Extent>& RemoteView::payload(const Limit& limit) {
  if (here_) return payload_;
  allocate(limit);
  std::vector<Sink> sinks;
  for (const Extent& span : payload_) sinks.push_back({const_cast<char*>(span.data), span.nbytes});
  begin_relay();
  for (bool again = false;; again = true) {
    bring(payload_extents(), sinks, limit, again || !relay_.descriptor.claim ? nullptr : &relay_);
    if (descriptor_.checked && descriptor_.meta_in_pool) bring_meta(limit);
    try {
      verify(payload_, meta_);
    } catch (const Error&) {  // once more: the fault may have been on the way
      meta_.clear();
      if (again) throw;
      connection_->counters.retries.fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    here_ = true;
    return payload_;
  }
}

PyObject* RemoteView::unpack(std::string_view beside, PyObject* like, bool copy, const Limit& limit) {
  std::string_view meta = this->meta(beside, limit);
  meta_frameworks(meta.data(), meta.size(), like);
  payload(limit);
  Memory memory{payload_.data(), payload_.size(), keep_};
  bool own = copy || nbytes_ < kPoolFrom;
  PyObject* result = python::unpack(meta.data(), meta.size(), memory, own ? nullptr : &memory, own ? Mode::copy : Mode::view, like);
  read();
  return result;
}

// Straight into the tensors of a plan, if the layouts allow and nothing is to be checked first.
bool RemoteView::bring_into(const FillPlan& plan, const Limit& limit) {
  if (here_ || descriptor_.checked) return false;
  std::vector<tl::Extent> extents = payload_extents();
  std::vector<uint64_t> sizes;
  for (const tl::Extent& extent : extents) sizes.push_back(extent.nbytes);
  std::vector<Sink> sinks;
  if (!plan.sinks(sizes.data(), sizes.size(), sinks)) return false;
  bring(extents, sinks, limit);
  return true;
}

PyObject* RemoteView::fill(std::string_view beside, PyObject* out, const Limit& limit) {
  std::string_view meta = this->meta(beside, limit);
  auto target = pack(out, true);
  FillPlan plan(meta.data(), meta.size(), *target);
  if (!plan.differences().empty()) raise("LayoutMismatchError", "out doesn't fit what arrived:\n" + plan.differences());
  if (!bring_into(plan, limit)) return View::fill(beside, out, limit);
  PyObject* result = plan.result();
  read();
  return result;
}

void RemoteView::refill(Refill& target, bool through, const Limit& limit) {
  if (!through || !bring_into(target.plan(), limit)) return View::refill(target, through, limit);
  read();
}

void RemoteView::copy_to(uintptr_t address, const Limit& limit) {
  if (here_ || descriptor_.checked) return View::copy_to(address, limit);
  bring(payload_extents(), {{reinterpret_cast<char*>(address), nbytes_}}, limit);
}

}  // namespace tl::python
