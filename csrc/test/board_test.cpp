// The board's seqlock: a reader gets one whole notice or none.
#include "board.h"

#include <memory>
#include <thread>
#include <vector>

#include "check.h"

using namespace tl;

namespace {

std::string text_of(uint64_t version) { return std::string(1 + version % BoardSlot::kDescriptor, static_cast<char>('a' + version % 26)); }

void notices_are_never_torn() {
  auto board = std::make_unique<Board>();
  const uint64_t versions = test::scaled(60'000);
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r)
    readers.emplace_back([&] {
      Notice notice;
      for (uint64_t last = 0; last < versions;) {
        const BoardSlot* slot = board->find("weights/policy");
        if (!slot || !slot->read(notice)) {
          std::this_thread::yield();
          continue;
        }
        CHECK(notice.version >= last && notice.descriptor == text_of(notice.version));
        last = notice.version;
      }
    });
  BoardSlot* slot = board->claim("weights/policy");
  for (uint64_t version = 1; version <= versions; ++version) slot->write(version, text_of(version));
  for (std::thread& reader : readers) reader.join();
}

// Names appear while others look for them.
void slots_appear_whole() {
  auto board = std::make_unique<Board>();
  auto name = [](size_t i) { return "name/" + std::string(i % 7, 'x') + std::to_string(i); };
  std::thread reader([&] {
    for (size_t i = 0; i < Board::kSlots; ++i) {
      const BoardSlot* slot;
      Notice notice;
      while (!(slot = board->find(name(i))) || !slot->read(notice)) std::this_thread::yield();
      CHECK(notice.version == i + 1 && notice.descriptor == text_of(i));
    }
  });
  for (size_t i = 0; i < Board::kSlots; ++i) {
    BoardSlot* slot = board->claim(name(i));
    CHECK(slot);
    slot->write(i + 1, text_of(i));
    CHECK(board->claim(name(i)) == slot);
  }
  reader.join();
  CHECK(!board->claim("one too many") && !board->find("one too many"));
}

// A hostile publisher: sizes beyond the field, a name with no end.
void a_hostile_board_is_read_safely() {
  auto board = std::make_unique<Board>();
  BoardSlot& slot = board->slots[3];
  std::memset(slot.name, 'x', sizeof slot.name);
  slot.sequence = 2;
  slot.size = 1u << 30;
  Notice notice;
  CHECK(board->find(std::string(BoardSlot::kName, 'x')) == &slot);
  CHECK(!board->find("x") && !slot.read(notice));
}

}  // namespace

void tl::test::board_tests() {
  notices_are_never_torn();
  slots_appear_whole();
  a_hostile_board_is_read_safely();
}
