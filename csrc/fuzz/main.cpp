// All harnesses with a driver of our own, for compilers that bring none: replays a corpus, then changes what is in it for a while.
// It knows nothing of coverage: what a better one has found it replays.
//
//   fuzz NAME SECONDS SEED FILE...     an input that ends the program is left in ./crash-NAME
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iterator>

// What the harnesses include stands here too: below they are in namespaces, which is not where a header may come first.
#include "../board.h"
#include "../holds.h"
#include "../notes.h"
#include "../record.h"
#include "../ring.h"
#include "../test/random.h"
#include "core.cpp"
#include "fuzz.h"

namespace harness_descriptor {
#define LLVMFuzzerTestOneInput fuzz_descriptor
#include "descriptor_fuzz.cpp"
#undef LLVMFuzzerTestOneInput
}
namespace harness_frame {
#define LLVMFuzzerTestOneInput fuzz_frame
#include "frame_fuzz.cpp"
#undef LLVMFuzzerTestOneInput
}
namespace harness_handshake {
#define LLVMFuzzerTestOneInput fuzz_handshake
#include "handshake_fuzz.cpp"
#undef LLVMFuzzerTestOneInput
}
namespace harness_meta {
#define LLVMFuzzerTestOneInput fuzz_meta
#include "meta_fuzz.cpp"
#undef LLVMFuzzerTestOneInput
}
namespace harness_note {
#define LLVMFuzzerTestOneInput fuzz_note
#include "note_fuzz.cpp"
#undef LLVMFuzzerTestOneInput
}
namespace harness_reads {
#define LLVMFuzzerTestOneInput fuzz_reads
#include "reads_fuzz.cpp"
#undef LLVMFuzzerTestOneInput
}
namespace harness_record {
#define LLVMFuzzerTestOneInput fuzz_record
#include "record_fuzz.cpp"
#undef LLVMFuzzerTestOneInput
}
namespace harness_shared {
#define LLVMFuzzerTestOneInput fuzz_shared
#include "shared_fuzz.cpp"
#undef LLVMFuzzerTestOneInput
}

namespace {

const struct {
  const char* name;
  int (*run)(const uint8_t* data, size_t size);
} harnesses[] = {
    {"descriptor", harness_descriptor::fuzz_descriptor},
    {"frame", harness_frame::fuzz_frame},
    {"handshake", harness_handshake::fuzz_handshake},
    {"meta", harness_meta::fuzz_meta},
    {"note", harness_note::fuzz_note},
    {"reads", harness_reads::fuzz_reads},
    {"record", harness_record::fuzz_record},
    {"shared", harness_shared::fuzz_shared},
};

constexpr size_t kMost = 4096;  // bytes of an input that was changed
constexpr unsigned kTooLongS = 20;

// ----- what is being tried, for whoever looks after the end

std::string trying, crash_file;

void keep() {
  int fd = ::open(crash_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd >= 0 && ::write(fd, trying.data(), trying.size()) >= 0) ::close(fd);
}

void too_long(int) {
  keep();
  static constexpr char kText[] = "an input takes too long\n";
  if (::write(STDERR_FILENO, kText, sizeof kText - 1) < 0) ::_exit(3);
  ::_exit(2);
}

template <class Run>
void attempt(Run run, const std::string& input) {
  trying = input;
  ::alarm(kTooLongS);
  const tl::fuzz::Bytes exact(input);
  run(reinterpret_cast<const uint8_t*>(exact.view().data()), exact.size());
}

// ----- changes

// Sizes, counts and offsets are where it hurts: their ends, powers of two, and what stands just beside them.
using tl::test::Random;

uint64_t interesting(Random& random) {
  const uint64_t power = uint64_t{1} << random.below(64);
  const uint64_t numbers[] = {0, power, power - 1, power + 1, ~uint64_t{0} - random.below(16), random.below(300), random.next()};
  return numbers[random.below(sizeof numbers / sizeof *numbers)];
}

void change(std::string& input, const std::vector<std::string>& corpus, Random& random) {
  const size_t size = input.size(), at = random.below(size + 1), n = random.below(std::min<size_t>(size - at, 64) + 1);
  switch (random.below(size ? 8 : 1)) {
    case 0: {  // a piece of another one
      const std::string& other = corpus[random.below(corpus.size())];
      const size_t from = random.below(other.size() + 1);
      input = input.substr(0, at) + other.substr(from, random.below(other.size() - from + 1)) + input.substr(random.below(2) ? at : size);
      break;
    }
    case 1: input.resize(at); break;
    case 2: input.erase(at, n); break;
    case 3: input.insert(at, input.substr(random.below(size), n)); break;
    case 4: input[random.below(size)] ^= static_cast<char>(1u << random.below(8)); break;
    case 5: input[random.below(size)] = static_cast<char>(random.next()); break;
    default: {  // a number of 1, 2, 4 or 8 bytes, mostly where one stands
      const size_t width = size_t{1} << random.below(4), place = random.below(size) & ~(random.below(4) ? width - 1 : 0);
      const uint64_t number = interesting(random);
      std::memcpy(input.data() + place, &number, std::min(width, size - place));
    }
  }
  if (input.size() > kMost) input.resize(kMost);
}

std::string content(const char* file) {
  std::ifstream stream(file, std::ios::binary);
  EXPECT(stream);
  return {std::istreambuf_iterator<char>(stream), {}};
}

}  // namespace

extern "C" void __sanitizer_set_death_callback(void (*callback)());
// A length that nobody checked shows as a block that is much too large.
extern "C" const char* __asan_default_options() { return "handle_abort=1:max_allocation_size_mb=64:allocator_may_return_null=0"; }

int main(int count, char** words) {
  if (count < 5) return std::fprintf(stderr, "usage: fuzz NAME SECONDS SEED FILE...\n"), 2;
  int (*run)(const uint8_t*, size_t) = nullptr;
  for (const auto& harness : harnesses)
    if (std::strcmp(harness.name, words[1]) == 0) run = harness.run;
  if (!run) return std::fprintf(stderr, "there is no harness %s\n", words[1]), 2;
  crash_file = std::string("crash-") + words[1];
  __sanitizer_set_death_callback(keep);
  ::signal(SIGALRM, too_long);
  std::vector<std::string> corpus{""};
  for (int i = 4; i < count; ++i) corpus.push_back(content(words[i]));
  for (const std::string& input : corpus) attempt(run, input);

  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(words[2]));
  Random random(std::strtoull(words[3], nullptr, 10));
  uint64_t runs = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    std::string input = corpus[random.below(corpus.size())];
    for (uint64_t changes = 1 + random.below(5); changes > 0; --changes) change(input, corpus, random);
    attempt(run, input);
  }
  std::printf("%s: %zu files, %llu runs\n", words[1], corpus.size() - 1, static_cast<unsigned long long>(runs));
}
