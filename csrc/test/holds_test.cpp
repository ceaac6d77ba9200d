// Claims, holds and arena together: a reader that got a hold never sees what came into the block afterwards.
#include <memory>
#include <thread>
#include <vector>

#include "arena.h"
#include "check.h"
#include "claims.h"

using namespace tl;
using test::Random;

namespace {

constexpr int kReaders = 2;
constexpr int kCells = 4;          // claims that stand at a time
constexpr uint64_t kBytes = 1024;  // of each block that is filled and checked

struct Table {
  HoldTableHeader* header = static_cast<HoldTableHeader*>(std::calloc(1, sizeof(HoldTableHeader) + 64));
  ~Table() { std::free(header); }
};

struct Shared {
  std::unique_ptr<Generation[]> generations{new Generation[kSlots]()};
  Table tables[kReaders];
  // What a handle says: the id, and where its bytes are. Readers may see an old pair, as with a real handle.
  struct Cell {
    std::atomic<ClaimId> id{0};
    std::atomic<const char*> data{nullptr};
    std::atomic<uint64_t> sequence{0};
  } cells[kCells];
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> reads{0}, stales{0};
};

void fill(char* data, ClaimId id) {
  auto* words = reinterpret_cast<uint64_t*>(data);
  for (uint64_t i = 0; i < kBytes / 8; ++i) words[i] = id ^ (i * 0x9e3779b97f4a7c15u);
}

bool filled(const char* data, ClaimId id) {
  auto* words = reinterpret_cast<const uint64_t*>(data);
  for (uint64_t i = 0; i < kBytes / 8; ++i)
    if (words[i] != (id ^ (i * 0x9e3779b97f4a7c15u))) return false;
  return true;
}

void read(Shared& shared, int reader) {
  HoldsOfMine holds(shared.tables[reader].header);
  Random random(reader + 10);
  struct Held {
    uint32_t entry;
    ClaimId id;
    const char* data;
  };
  std::vector<Held> held;
  auto drop = [&](size_t i) {
    CHECK(filled(held[i].data, held[i].id));
    holds.clear(held[i].entry);
    held.erase(held.begin() + static_cast<long>(i));
  };
  while (!shared.stop) {
    Shared::Cell& cell = shared.cells[random.below(kCells)];
    uint64_t before = cell.sequence.load();
    ClaimId id = cell.id.load();
    const char* data = cell.data.load();
    if ((before & 1) || cell.sequence.load() != before || !id) continue;
    bool stale;
    uint32_t entry = holds.take(id, shared.generations.get(), stale);
    if (entry == HoldsOfMine::kNone) {
      CHECK(stale);
      ++shared.stales;
      continue;
    }
    ++shared.reads;
    held.push_back({entry, id, data});
    CHECK(filled(data, id));
    if (held.size() > 3) drop(random.below(held.size()));
  }
  while (!held.empty()) drop(0);
  CHECK(holds.count() == 0);
}

// The owner ends claims and fills recycled blocks while readers take and clear holds of them.
void readers_see_one_generation() {
  Shared shared;
  auto arena = std::make_shared<Arena>(64 * kPage);
  std::vector<HoldsOfReader> tables;
  for (Table& table : shared.tables) tables.emplace_back(table.header);
  Claims claims(shared.generations.get(), [&](const Claims::Visit& visit) {
    for (HoldsOfReader& table : tables) table.scan(visit);
  });
  std::vector<std::thread> readers;
  for (int r = 0; r < kReaders; ++r) readers.emplace_back(read, std::ref(shared), r);
  Random random(1);
  uint64_t rounds = 0;
  for (uint64_t published = 0; published < test::scaled(40'000); ++rounds) {
    Shared::Cell& cell = shared.cells[random.below(kCells)];
    if (ClaimId old = cell.id.load()) {
      CHECK(claims.end(old));
      CHECK(!claims.end(old));
    }
    cell.sequence.fetch_add(1);
    cell.id = 0;
    if (auto block = arena->allocate(kBytes)) {
      Claim claim;
      claim.blocks.push_back(block);
      char* data = block->data();
      block.reset();
      ClaimId id = claims.add(std::move(claim));
      CHECK(id && standing(id));
      fill(data, id);
      cell.data = data;
      cell.id = id;
      ++published;
    }
    cell.sequence.fetch_add(1);
    if (rounds % 16 == 0) claims.sweep(0);
  }
  shared.stop = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(shared.reads > 0);
  for (Shared::Cell& cell : shared.cells)
    if (ClaimId id = cell.id.load()) CHECK(claims.end(id));
  claims.sweep(0);
  CHECK(!claims.any_parked() && claims.standing_count() == 0);
  CHECK(arena->used() == 0 && arena->blocks() == 0);
}

void a_hold_parks_and_its_end_frees() {
  Shared shared;
  auto arena = std::make_shared<Arena>(kPage);
  HoldsOfReader table(shared.tables[0].header);
  Claims claims(shared.generations.get(), [&](const Claims::Visit& visit) { table.scan(visit); });
  HoldsOfMine holds(shared.tables[0].header);
  auto add = [&] {
    Claim claim;
    claim.blocks.push_back(arena->allocate(1));
    CHECK(claim.blocks.front());
    return claims.add(std::move(claim));
  };
  ClaimId first = add();
  bool stale;
  uint32_t entry = holds.take(first, shared.generations.get(), stale);
  CHECK(entry != HoldsOfMine::kNone);
  CHECK(claims.end(first) && claims.any_parked() && !arena->allocate(1));
  CHECK(holds.take(first, shared.generations.get(), stale) == HoldsOfMine::kNone && stale);
  claims.sweep(0);
  CHECK(claims.any_parked());
  holds.clear(entry);
  claims.sweep(0);
  CHECK(!claims.any_parked());
  ClaimId second = add();
  CHECK(second != first && slot_of(second) == slot_of(first) && generation_of(second) == generation_of(first) + 2);
  CHECK(holds.take(first, shared.generations.get(), stale) == HoldsOfMine::kNone && stale);
  CHECK(holds.take(make_id(slot_of(second), generation_of(second) + 1), shared.generations.get(), stale) == HoldsOfMine::kNone && stale);
  CHECK(claims.end(second));
}

// Reads are counted by acknowledgements, time by the clock, and a reader's own claims end with it.
void claims_end_by_themselves() {
  Shared shared;
  HoldsOfReader table(shared.tables[0].header);
  HoldsOfMine holds(shared.tables[0].header);
  Claims claims(shared.generations.get(), [&](const Claims::Visit& visit) { table.scan(visit); });
  Claim twice, brief, private_one;
  twice.counted = true, twice.reads_left = 2;
  brief.expires_ns = 100;
  private_one.reader = 5;
  ClaimId a = claims.add(std::move(twice)), b = claims.add(std::move(brief)), c = claims.add(std::move(private_one));
  CHECK(claims.restless() && claims.standing_count() == 3);
  for (int i = 0; i < 2; ++i) {
    CHECK(claims.standing_count() == 3);
    CHECK(holds.acknowledge(a) && holds.acknowledge(0xdead));
    table.drain_acks([&](ClaimId id) { claims.acknowledged(id, 1); });
  }
  CHECK(!claims.end(a));
  claims.sweep(99);
  CHECK(claims.standing_count() == 2);
  claims.sweep(100);
  CHECK(!claims.end(b));
  claims.reader_gone(4);
  CHECK(claims.standing_count() == 1);
  claims.reader_gone(5);
  CHECK(!claims.end(c) && !claims.restless());
}

// A reader writes into its table what it likes: the owner visits what is there, and no more than there can be.
void a_hostile_table_harms_only_its_reader() {
  Table memory;
  HoldsOfReader table(memory.header);
  memory.header->used = ~0u;
  for (auto& entry : memory.header->entries) entry = ~0ull;
  uint64_t visited = 0;
  table.scan([&](ClaimId) { ++visited; });
  CHECK(visited == HoldTableHeader::kEntries);
  for (uint64_t acked : {uint64_t{HoldTableHeader::kAcks} * 3, ~uint64_t{0}, uint64_t{1}, uint64_t{1} << 63}) {
    memory.header->acked = acked;
    visited = 0;
    table.drain_acks([&](ClaimId) { ++visited; });
    CHECK(visited <= HoldTableHeader::kAcks);
  }
}

void the_table_has_an_end() {
  Table memory;
  std::unique_ptr<Generation[]> generations(new Generation[kSlots]());
  generations[0] = 1;
  HoldsOfMine holds(memory.header);
  bool stale;
  std::vector<uint32_t> entries;
  for (uint32_t i = 0; i < HoldTableHeader::kEntries; ++i) entries.push_back(holds.take(make_id(0, 1), generations.get(), stale));
  CHECK(entries.back() != HoldsOfMine::kNone);
  CHECK(holds.take(make_id(0, 1), generations.get(), stale) == HoldsOfMine::kNone && !stale);
  holds.clear(entries[7]);
  CHECK(holds.take(make_id(0, 1), generations.get(), stale) == entries[7]);
}

}  // namespace

void tl::test::holds_tests() {
  a_hold_parks_and_its_end_frees();
  claims_end_by_themselves();
  a_hostile_table_harms_only_its_reader();
  the_table_has_an_end();
  readers_see_one_generation();
}
