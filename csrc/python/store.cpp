#include "python/store.h"

#include "copy.h"
#include "crc32c.h"
#include "descriptor.h"
#include "point.h"
#include "python/wait.h"

namespace nb = nanobind;

namespace tl::python {

namespace {

Claim make_claim(std::vector<std::shared_ptr<Block>> blocks, uint64_t reads, double ttl_s, uint64_t reader) {
  Claim claim;
  claim.blocks = std::move(blocks);
  claim.counted = reads > 0;
  claim.reads_left = reads;
  claim.expires_ns = ttl_s > 0 ? deadline_of(ttl_s) : 0;
  claim.reader = reader;
  return claim;
}

// Makes the claim that the descriptor names.
std::unique_ptr<Stored> seal(Engine& engine, Descriptor descriptor, std::string_view meta, Claim claim) {
  descriptor.key = claim.key;
  descriptor.claim = engine.claim(std::move(claim));
  return std::make_unique<Stored>(engine, descriptor, std::string(meta), descriptor.claim);
}

// Where an object lies in its block: the payload behind the meta, if that is there too, so that whoever reads along has the meta first.
// The payload begins on a page, since readers map it copy-on-write.
struct Room {
  uint64_t payload_at, nbytes;
  Room(const Packed& packed, bool beside)
      : payload_at(beside ? 0 : round_up(packed.meta.size(), kPage)), nbytes(payload_at + packed.nbytes) {}
};

// Who waits for room waits for the one that holds most.
Doing room(Engine& engine, uint64_t nbytes, const char* what) {
  Doing doing{what, "room"};
  uint64_t most = 0;
  for (auto& connection : engine.connections()) {
    uint64_t held = 0;
    connection->visit_holds([&](ClaimId id) { held += engine.claims().nbytes(id); });
    if (held > most) most = held, doing.peer = connection->peer.name, doing.incarnation = connection->peer.incarnation, doing.transport = connection->carrier();
  }
  doing.total = nbytes;
  return doing;
}

// The memory that a tensor's elements span: negative strides reach below its address.
std::pair<const char*, uint64_t> span_of(const Packed& packed, const PackedLeaf& leaf) {
  if (leaf.dense) return {leaf.data, leaf.nbytes};
  int64_t low = 0, high = 0;
  uint64_t count = 1;
  for (int d = 0; d < leaf.ndim; ++d) {
    int64_t reach = (packed.shape(leaf)[d] - 1) * packed.strides(leaf)[d];
    (reach < 0 ? low : high) += reach;
    count *= static_cast<uint64_t>(packed.shape(leaf)[d]);
  }
  uint64_t itemsize = count ? leaf.nbytes / count : 0;
  return {leaf.data + low, static_cast<uint64_t>(high - low) + itemsize};
}

}  // namespace

std::shared_ptr<Block> allocate(Engine& engine, uint64_t nbytes, double timeout_s, const char* what) {
  // First take back what readers have dropped: a warm block is worth far more than the look costs.
  if (engine.restless()) engine.sweep();
  std::shared_ptr<Block> block = engine.arena()->allocate(nbytes);
  if (block || nbytes > engine.arena()->budget()) return block;
  if (!engine.restless()) return nullptr;  // no reader will free anything: waiting could only time out
  Engine::RoomWaiter waiter(engine);
  wait_for(engine, [&] { return engine.sweep(), (block = engine.arena()->allocate(nbytes)) != nullptr; }, deadline_of(timeout_s), [&] { return room(engine, nbytes, what); });
  return block;
}

Stored::~Stored() {
  if (!filling_) return;
  filling_->failed = true;
  engine_.nudge();
}

void Stored::fill_later(const Packed& packed, std::shared_ptr<Block> block, std::shared_ptr<Filling> filling) {
  packed_ = &packed;
  block_ = std::move(block);
  filling_ = std::move(filling);
}

void Stored::fill() {
  if (!filling_) return;
  const Room room(*packed_, !descriptor_.meta_in_pool);
  copy_bytes(block_->data(), packed_->meta.data(), room.payload_at ? packed_->meta.size() : 0);
  copy_payload(*packed_, block_->data() + room.payload_at, [&](uint64_t nbytes) {
    if (filling_->advance(room.payload_at + nbytes)) engine_.nudge();
  });
  if (filling_->advance(UINT64_MAX)) engine_.nudge();
  engine_.claims().filled(claim_);
  filling_.reset();
  block_.reset();
}

std::unique_ptr<Stored> store(Engine& engine, const Packed& packed, uint64_t reads, double ttl_s, uint64_t reader, uint64_t inline_meta, double timeout_s,
                              bool checksum, bool later) {
  constexpr uint64_t kLaterFrom = 1u << 20;  // below it the copy is over before anybody could read along
  const bool beside = packed.meta.size() <= inline_meta, checked = checksum || engine.verifies();
  later &= !checked && packed.nbytes >= kLaterFrom;
  const Room room(packed, beside);
  auto block = allocate(engine, room.nbytes, timeout_s, reader ? "send" : "put");
  if (!block) return nullptr;
  const tl::Extent extent = block->extent();
  char* data = block->data();
  Descriptor descriptor;
  {
    Released released;
    engine.arena()->warm(*block);
    if (!later) {
      if (!beside) copy_bytes(data, packed.meta.data(), packed.meta.size());
      copy_payload(packed, data + room.payload_at);
    }
    if (checked) {
      descriptor.crc = crc32c(0, data + room.payload_at, packed.nbytes);
      if (!beside) descriptor.crc = crc32c(descriptor.crc, packed.meta.data(), packed.meta.size());
    }
  }
  descriptor.checked = checked;
  descriptor.extents.push_back({extent.segment, extent.offset + room.payload_at, packed.nbytes});
  if (!beside) descriptor.extents.push_back({extent.segment, extent.offset, packed.meta.size()});
  descriptor.meta_in_pool = !beside;
  descriptor.counted = reads == 0 ? Descriptor::none : reader ? Descriptor::acknowledge : Descriptor::tell;
  Claim claim = make_claim({block}, reads, ttl_s, reader);
  auto filling = claim.filling = later ? std::make_shared<Filling>() : nullptr;
  auto stored = seal(engine, std::move(descriptor), beside ? std::string_view(packed.meta) : std::string_view(), std::move(claim));
  point("claim", "stored");
  if (later) stored->fill_later(packed, std::move(block), std::move(filling));
  return stored;
}

nb::object expose(Engine& engine, uintptr_t address, uint64_t nbytes) {
  const char* data = reinterpret_cast<const char*>(address);
  auto block = engine.arena()->find(data, nbytes);
  Descriptor descriptor;
  if (block) {
    const tl::Extent& extent = block->extent();
    descriptor.extents.push_back({extent.segment, extent.offset + static_cast<uint64_t>(data - block->data()), nbytes});
  } else {
    if (!(block = allocate(engine, nbytes, 0, "expose"))) return nb::none();
    Released released;
    engine.arena()->warm(*block);
    copy_bytes(block->data(), data, nbytes);
    descriptor.extents.push_back({block->extent().segment, block->extent().offset, nbytes});
  }
  std::string bytes = seal(engine, std::move(descriptor), {}, make_claim({std::move(block)}, 0, 0, 0))->descriptor();
  return nb::bytes(bytes.data(), bytes.size());
}

std::unique_ptr<Stored> claim_in_place(Engine& engine, const Packed& packed, uint64_t reads, double ttl_s, bool checksum) {
  std::vector<std::shared_ptr<Block>> blocks;
  std::vector<Extent> spans;
  Descriptor descriptor;
  for (const PackedLeaf& leaf : packed.leaves) {
    if (leaf.nbytes == 0) continue;
    auto [start, nbytes] = span_of(packed, leaf);
    auto block = engine.arena()->find(start, nbytes);
    if (!block) return nullptr;
    if (std::find(blocks.begin(), blocks.end(), block) != blocks.end()) continue;
    const tl::Extent& extent = block->extent();
    descriptor.extents.push_back(extent);
    spans.push_back({block->data(), extent.nbytes});
    blocks.push_back(std::move(block));
  }
  std::string meta = blocks.empty() || blocks.size() > UINT16_MAX ? std::string() : packed.meta_in_place(spans.data(), spans.size());
  if (meta.empty()) return nullptr;
  if ((descriptor.checked = checksum || engine.verifies())) {
    Released released;
    for (const Extent& span : spans) descriptor.crc = crc32c(descriptor.crc, span.data, span.nbytes);
  }
  descriptor.counted = reads > 0 ? Descriptor::tell : Descriptor::none;
  return seal(engine, std::move(descriptor), meta, make_claim(std::move(blocks), reads, ttl_s, 0));
}

}  // namespace tl::python
