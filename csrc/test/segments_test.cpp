// A reader's mappings: private spans are one view's own, and give back what their user wrote.
#include "segments.h"

#include <thread>
#include <vector>

#include "check.h"

using namespace tl;
using test::Random;

namespace {

constexpr uint64_t kSegment = 64 * kPage;

struct Owner {
  Fd fd = make_memfd("tensorlink-test", kSegment);
  Map map{fd.get(), kSegment, PROT_READ | PROT_WRITE, MAP_SHARED};
  void add_to(Segments& segments, uint32_t id) { segments.add(id, read_only(fd), sealed_size(fd.get())); }
};

void private_spans_forget_what_was_written() {
  Owner owner;
  Segments segments;
  owner.add_to(segments, 1);
  Extent extent{1, 4 * kPage, 3 * kPage};
  for (char generation = 1; generation < 50; ++generation) {
    std::memset(owner.map.data(), generation, kSegment);
    Lent one = segments.lend(extent), other = segments.lend(extent);
    CHECK(one.data != other.data && one.mapping != other.mapping);
    CHECK(one.data[0] == generation && one.data[3 * kPage - 1] == generation);
    std::memset(one.data, 99, 3 * kPage);
    other.data[kPage] = 98;
    CHECK(owner.map.data()[4 * kPage] == generation && other.data[0] == generation);
    CHECK(segments.shared(extent)[0] == generation);
    segments.give_back(one);
    segments.give_back(other);
  }
}

void extents_outside_are_corrupt() {
  Owner owner;
  Segments segments;
  owner.add_to(segments, 1);
  for (Extent bad : {Extent{1, kSegment + 1, 0}, Extent{1, 0, kSegment + 1}, Extent{1, kPage, kSegment}, Extent{1, ~0ull, 1}, Extent{1, 1, ~0ull}}) {
    CHECK_FAULT(segments.shared(bad), Fault::corrupt);
    CHECK_FAULT(segments.lend(bad), Fault::corrupt);
  }
  CHECK_FAULT(segments.lend({1, 8, 8}), Fault::corrupt);  // not on a page
  CHECK_FAULT(segments.shared({2, 0, 8}), Fault::stale);
}

void a_forgotten_segment_lives_as_long_as_its_views() {
  Owner owner;
  Segments segments;
  owner.add_to(segments, 1);
  CHECK(segments.use(1) && segments.use(1) && !segments.use(2));
  segments.forget(1);
  CHECK(!segments.use(1) && segments.shared({1, 0, 8}));
  segments.unuse(1);
  CHECK(segments.shared({1, 0, 8}));
  segments.unuse(1);
  CHECK(!segments.known(1));
}

void only_sealed_memory_is_taken() {
  Fd open(::memfd_create("tensorlink-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(::ftruncate(open.get(), kPage) == 0);
  CHECK_FAULT(sealed_size(open.get()), Fault::corrupt);
  Fd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  CHECK_FAULT(sealed_size(null.get()), Fault::corrupt);
  Owner owner;
  Fd reader = read_only(owner.fd);
  CHECK(::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, reader.get(), 0) == MAP_FAILED);
}

// Threads borrow, write and return overlapping spans: each sees the owner's bytes and its own, nobody else's.
void borrowers_race() {
  Owner owner;
  std::memset(owner.map.data(), 1, kSegment);
  Segments segments;
  owner.add_to(segments, 1);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      Random random(t + 1);
      for (uint64_t round = 0; round < test::scaled(4'000); ++round) {
        uint64_t page = random.below(60), pages = 1 + random.below(4);
        CHECK(segments.use(1));
        Lent lent = segments.lend({1, page * kPage, pages * kPage});
        for (uint64_t i = 0; i < pages * kPage; i += 512) CHECK(lent.data[i] == 1);
        for (uint64_t i = 0; i < pages * kPage; i += 1024) lent.data[i] = static_cast<char>(10 + t);
        for (uint64_t i = 0; i < pages * kPage; i += 512) CHECK(lent.data[i] == (i % 1024 ? 1 : 10 + t));
        segments.give_back(lent);
        segments.unuse(1);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

void tl::test::segments_tests() {
  private_spans_forget_what_was_written();
  extents_outside_are_corrupt();
  a_forgotten_segment_lives_as_long_as_its_views();
  only_sealed_memory_is_taken();
  borrowers_race();
}
