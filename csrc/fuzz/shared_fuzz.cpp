// Memory that a hostile process writes while we use it: rings, holds, boards. The first byte says which; a script follows.
#include "../board.h"
#include "../holds.h"
#include "../ring.h"
#include "fuzz.h"

using namespace tl;
using fuzz::Bytes;

namespace {

class Script {
 public:
  explicit Script(std::string_view text) : text_(text) {}
  bool over() const { return text_.empty(); }
  uint64_t take(size_t nbytes) {  // 0 bits where it ends
    uint64_t value = 0;
    nbytes = std::min(nbytes, text_.size());
    std::memcpy(&value, text_.data(), nbytes);
    text_.remove_prefix(nbytes);
    return value;
  }
  std::string_view rest() const { return text_; }

 private:
  std::string_view text_;
};

constexpr uint64_t kRing = 256;

struct Memory {
  RingHeader header{};
  char data[kRing] = {};
};

void consume(Script script) {
  auto memory = std::make_unique<Memory>();
  Ring ring(memory.get(), kRing);
  while (!script.over()) {
    const uint64_t at = script.take(1) % (kRing / 8), word = script.take(1);
    const uint64_t value = word == 0xff ? Ring::kSkip : word == 0xfe ? script.take(8) : word;
    std::memcpy(memory->data + 8 * at, &value, 8);
    const uint64_t step = script.take(1);
    memory->header.tail = step == 0xff ? script.take(8) : memory->header.tail + 8 * step;
    uint64_t n;
    for (int i = 0; const char* frame = ring.front(n); ++i) {
      EXPECT(i < 64 && frame >= memory->data && frame + n <= memory->data + kRing && n <= ring.max_frame());
      fuzz::touch({frame, n});
      ring.pop(n);
    }
  }
}

void produce(Script script) {
  auto memory = std::make_unique<Memory>();
  Ring ring(memory.get(), kRing);
  while (!script.over()) {
    const uint64_t n = script.take(1) % (ring.max_frame() + 1), step = script.take(1);
    memory->header.head = step == 0xff ? script.take(8) : memory->header.head + step;
    if (char* frame = ring.reserve(n)) {
      EXPECT(frame >= memory->data && frame + n <= memory->data + kRing);
      std::memset(frame, 1, n);
      ring.publish();
    }
  }
}

void hold(Script script) {
  static std::vector<Generation> generations(kSlots);
  static const auto table = std::make_unique<HoldTableHeader>();  // half a MiB: made once
  std::memset(static_cast<void*>(table.get()), 0, sizeof *table);
  HoldsOfReader owner(table.get());
  HoldsOfMine reader(table.get());
  std::vector<uint32_t> taken;
  for (int steps = 0; !script.over() && steps < 256; ++steps) {
    const uint64_t what = script.take(1), value = script.take(what & 0x80 ? 8 : 2);
    bool stale;
    switch (what & 7) {
      case 0: table->used = static_cast<uint32_t>(value); break;
      case 1: table->entries[value % HoldTableHeader::kEntries] = value; break;
      case 2: table->acked = value; break;
      case 3: table->drained = value; break;
      case 4: generations[slot_of(value)] = generation_of(value); break;
      case 5:
        if (uint32_t entry = reader.take(value, generations.data(), stale); entry != HoldsOfMine::kNone) {
          EXPECT(entry < HoldTableHeader::kEntries && standing(value));
          taken.push_back(entry);
        }
        break;
      case 6:
        reader.acknowledge(value);
        if (!taken.empty()) reader.clear(taken.back()), taken.pop_back();
        break;
      default:
        uint64_t seen = 0;
        owner.drain_acks([&](ClaimId) { ++seen; });
        EXPECT(seen <= HoldTableHeader::kAcks);
    }
  }
  uint64_t seen = 0;
  owner.scan([&](ClaimId) { ++seen; });
  EXPECT(seen <= HoldTableHeader::kEntries);
}

void look(Script script) {
  auto board = std::make_unique<Board>();
  const std::string wanted(1 + script.take(1) % 4, 'x');
  const std::string_view bytes = script.rest();
  std::memcpy(static_cast<void*>(board.get()), bytes.data(), std::min(bytes.size(), sizeof *board));
  Notice notice;
  for (const BoardSlot& slot : board->slots)
    if (slot.read(notice)) EXPECT(notice.descriptor.size() <= BoardSlot::kDescriptor);
  const BoardSlot* slot = board->find(wanted);
  EXPECT(!slot || (slot >= board->slots && slot < board->slots + Board::kSlots));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const Bytes bytes(data + 1, size - 1);
  constexpr void (*uses[])(Script) = {consume, produce, hold, look};
  fuzz::good([&] { uses[data[0] % 4](Script(bytes.view())); });
  return 0;
}
