// A ring between two threads, and against a peer that writes what it likes.
#include "ring.h"

#include <thread>
#include <vector>

#include "check.h"

using namespace tl;
using test::Random;

namespace {

constexpr uint64_t kCapacity = 1u << 12;

struct Memory {
  alignas(64) char bytes[Ring::bytes_for(kCapacity)] = {};
  char guard[4096] = {};  // AddressSanitizer sees less than this: a read here fails the checks of the frames
  RingHeader& header() { return *reinterpret_cast<RingHeader*>(bytes); }
};

char byte_of(uint64_t frame, uint64_t i) { return static_cast<char>(frame * 31 + i); }

// Millions of frames of random sizes, the empty and the largest among them: all arrive, in order, whole.
void frames_arrive_in_order() {
  auto memory = std::make_unique<Memory>();
  const uint64_t frames = test::scaled(3'000'000);
  std::thread producer([&] {
    Ring ring(memory->bytes, kCapacity);
    Random random(1);
    for (uint64_t f = 0; f < frames; ++f) {
      uint64_t n = random.below(64) ? random.below(40) : random.below(ring.max_frame() + 1);
      char* to;
      while (!(to = ring.reserve(n))) std::this_thread::yield();
      for (uint64_t i = 0; i < n; ++i) to[i] = byte_of(f, i);
      ring.publish();
    }
  });
  Ring ring(memory->bytes, kCapacity);
  Random random(1);
  for (uint64_t f = 0; f < frames; ++f) {
    uint64_t want = random.below(64) ? random.below(40) : random.below(ring.max_frame() + 1);
    uint64_t n;
    const char* frame;
    while (!(frame = ring.front(n))) std::this_thread::yield();
    CHECK(n == want);
    for (uint64_t i = 0; i < n; ++i) CHECK(frame[i] == byte_of(f, i));
    ring.pop(n);
  }
  CHECK(ring.empty());
  producer.join();
}

void a_full_ring_has_no_room() {
  Memory memory;
  Ring producer(memory.bytes, kCapacity), consumer(memory.bytes, kCapacity);
  int frames = 0;
  while (producer.reserve(100)) producer.publish(), ++frames;
  CHECK(frames == kCapacity / Ring::padded(100));
  uint64_t n;
  CHECK(consumer.front(n) && n == 100);
  consumer.pop(n);
  CHECK(consumer.front(n));
  consumer.pop(n);
  CHECK(producer.reserve(100));
}

void put(Memory& memory, uint64_t at, uint64_t length) { std::memcpy(memory.bytes + sizeof(RingHeader) + at, &length, 8); }

void impossible_indices_are_corrupt() {
  uint64_t n;
  for (uint64_t tail : {kCapacity + 8, uint64_t{12}, ~uint64_t{0}, uint64_t{1} << 63}) {
    Memory memory;
    memory.header().tail = tail;
    Ring ring(memory.bytes, kCapacity);
    CHECK_FAULT(ring.front(n), Fault::corrupt);
  }
  Memory memory;
  memory.header().head = 8;  // read before it was written
  Ring ring(memory.bytes, kCapacity);
  char* room = ring.reserve(900);
  while (room) {
    ring.publish();
    try {
      room = ring.reserve(900);
    } catch (const Error& error) {
      CHECK(error.fault == Fault::corrupt);
      break;
    }
  }
}

void impossible_lengths_are_corrupt() {
  uint64_t n;
  for (uint64_t length : {uint64_t{kCapacity / 4 + 1}, uint64_t{100}, ~uint64_t{0} - 1, ~uint64_t{7}, Ring::kSkip}) {
    Memory memory;
    put(memory, 0, length);
    memory.header().tail = 64;
    Ring ring(memory.bytes, kCapacity);
    CHECK_FAULT(ring.front(n), Fault::corrupt);
  }
}

// A peer that only ever skips must not keep its reader in a loop.
void endless_skips_are_corrupt() {
  Memory memory;
  put(memory, 0, Ring::kSkip);
  memory.header().tail = kCapacity;
  Ring ring(memory.bytes, kCapacity);
  uint64_t n;
  CHECK_FAULT(ring.front(n), Fault::corrupt);
}

// Random bytes all over the ring, with a tail that moves while it is read: an error or a frame inside, never anything else.
void noise_stays_inside() {
  auto memory = std::make_unique<Memory>();
  Random random(7);
  const char* start = memory->bytes + sizeof(RingHeader);
  for (uint64_t round = 0; round < test::scaled(100'000); ++round) {
    for (int i = 0; i < 8; ++i) put(*memory, random.below(kCapacity / 8) * 8, random.below(4) ? random.below(600) : random.next());
    put(*memory, 0, random.below(2) ? random.below(600) : Ring::kSkip);
    memory->header().tail = random.below(8) ? random.below(kCapacity / 8 + 1) * 8 : random.next();
    Ring ring(memory->bytes, kCapacity);
    try {
      uint64_t n;
      while (const char* frame = ring.front(n)) {
        CHECK(frame >= start + 8 && n <= ring.max_frame() && frame + n <= start + kCapacity);
        ring.pop(n);
      }
    } catch (const Error& error) {
      CHECK(error.fault == Fault::corrupt);
    }
  }
}

}  // namespace

void tl::test::ring_tests() {
  frames_arrive_in_order();
  a_full_ring_has_no_room();
  impossible_indices_are_corrupt();
  impossible_lengths_are_corrupt();
  endless_skips_are_corrupt();
  noise_stays_inside();
}
