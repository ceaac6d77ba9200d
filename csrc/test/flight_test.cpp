// The flight recorder: records are whole or not there, however many write; a forked child leaves its parent's file alone.
#include "flight.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <set>
#include <thread>
#include <vector>

#include "check.h"

using namespace tl;

namespace {

struct File {
  std::string path = "/tmp/tlflight" + std::to_string(::getpid()) + "-" + std::to_string(++count);
  static inline int count = 0;
  ~File() { ::unlink(path.c_str()); }
  bool exists() const { return ::access(path.c_str(), F_OK) == 0; }
  // A copy of the bytes, as a reader sees them.
  std::string bytes() const {
    std::string data(Flight::kSize + 1, '\0');
    std::FILE* file = std::fopen(path.c_str(), "rb");
    CHECK(file);
    data.resize(std::fread(data.data(), 1, data.size(), file));
    std::fclose(file);
    return data;
  }
};

const FlightHeader& header(const std::string& bytes) { return *reinterpret_cast<const FlightHeader*>(bytes.data()); }
const FlightSlot* slots(const std::string& bytes) { return reinterpret_cast<const FlightSlot*>(bytes.data() + Flight::kHeader); }

std::string text(const char* field, size_t n) { return std::string(field, ::strnlen(field, n)); }

// A record whose fields belong together.
bool fits(const FlightRecord& record) {
  std::string peer = text(record.peer, sizeof record.peer);
  return peer == std::string(1 + record.incarnation % 40, static_cast<char>('a' + record.incarnation % 26)) && record.total == record.incarnation * 3;
}

Doing doing(const char* what, uint64_t i) {
  Doing made{what, "phase", std::string(1 + i % 40, static_cast<char>('a' + i % 26)), i, "tcp"};
  made.total = i * 3;
  return made;
}

void events_are_never_torn() {
  File file;
  const uint64_t each = test::scaled(100'000);
  std::atomic<bool> stop{false};
  {
    Flight flight("a", file.path);
    CHECK(flight.path() == file.path && flight.error().empty());
    std::vector<std::thread> writers;
    for (int w = 0; w < 3; ++w)
      writers.emplace_back([&, w] {
        for (uint64_t i = 0; i < each; ++i) flight.note(doing("event", i * 3 + static_cast<uint64_t>(w)), "done");
      });
    std::thread reader([&] {
      int fd = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
      void* map = ::mmap(nullptr, Flight::kSize, PROT_READ, MAP_SHARED, fd, 0);
      CHECK(map != MAP_FAILED);
      auto* ring = reinterpret_cast<const FlightSlot*>(static_cast<const char*>(map) + Flight::kHeader) + Flight::kOperations;
      FlightRecord record;
      while (!stop)
        for (uint32_t i = 0; i < Flight::kEvents; ++i)
          if (ring[i].read(record)) CHECK(fits(record) && text(record.what, sizeof record.what) == "event");
      ::munmap(map, Flight::kSize);
      ::close(fd);
    });
    for (std::thread& writer : writers) writer.join();
    stop = true;
    reader.join();
  }
  std::string bytes = file.bytes();
  CHECK(bytes.size() == Flight::kSize && header(bytes).next == 3 * each);
  std::set<uint64_t> numbers;
  FlightRecord record;
  for (uint32_t i = 0; i < Flight::kEvents; ++i)
    if (slots(bytes)[Flight::kOperations + i].read(record)) {
      CHECK(fits(record) && (record.sequence - 1) % Flight::kEvents == i);
      numbers.insert(record.sequence);
    }
  CHECK(numbers.size() == Flight::kEvents);
}

void operations_come_and_go() {
  auto flight = std::make_shared<Flight>("a", "");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      FlightRecord record;
      const auto id = static_cast<uint32_t>(::syscall(SYS_gettid));
      for (uint64_t i = 0; i < test::scaled(20'000); ++i) {
        uint64_t n = i * 4 + static_cast<uint64_t>(t);
        {
          Activity activity(flight, doing("recv", n));
          activity->moved(n, now_ns());
          CHECK(flight->find(id, record) && fits(record) && record.done == n);
          Activity inner(flight, {"read", "bytes"});  // a phase of the same operation
          CHECK(flight->find(id, record) && fits(record) && text(record.phase, 16) == "bytes" && text(record.what, 12) == "recv");
        }
        CHECK(!flight->find(id, record));
        CHECK(Activity::latest(record) && fits(record));
      }
    });
  for (std::thread& thread : threads) thread.join();
}

void a_full_table_loses_nothing_else() {
  auto flight = std::make_shared<Flight>("a", "");
  std::vector<std::unique_ptr<Operation>> many;
  for (uint64_t i = 0; i < Flight::kOperations + 10; ++i) many.push_back(std::make_unique<Operation>(flight, doing("recv", i)));
  many.back()->change({"recv", "bytes"});
  many.back()->moved(7, 1);
  CHECK(many.back()->record().done == 7);
  many.clear();
  FlightRecord record;
  CHECK(!flight->find(static_cast<uint32_t>(::syscall(SYS_gettid)), record));
}

void a_child_leaves_the_file_alone() {
  File file;
  auto flight = std::make_shared<Flight>("parent", file.path);
  flight->note(doing("event", 1), "done");
  Activity activity(flight, doing("recv", 2));
  std::string before = file.bytes();
  pid_t child = ::fork();
  if (child == 0) {
    flight->note(doing("child", 3), "failed", true);
    activity->moved(5, 5);
    { Operation operation(flight, doing("child", 4)); }
    flight->close();
    flight.reset();
    std::_Exit(0);
  }
  int status;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  CHECK(file.bytes() == before);
  flight->note(doing("event", 3), "done");
  CHECK(header(file.bytes()).next == 2);
}

void a_file_goes_unless_something_failed() {
  File calm, failed;
  Flight a("a", calm.path), b("b", failed.path);
  a.note(doing("peer", 1), "up");
  b.note(doing("read", 1), "retry", true);
  a.close(), b.close();
  CHECK(!calm.exists() && failed.exists() && header(failed.bytes()).closed == 1);
}

void no_file_is_no_failure() {
  auto flight = std::make_shared<Flight>(std::string(3000, 'n'), "/nonexistent/flight");
  CHECK(flight->path().empty() && !flight->error().empty());
  Doing long_words = doing("a name that is far too long for its field", 1);
  long_words.note.assign(500, 'x');
  flight->note(long_words, std::string(100, 'y'));
  Operation operation(flight, long_words);
  FlightRecord record;
  CHECK(flight->find(static_cast<uint32_t>(::syscall(SYS_gettid)), record));
}

}  // namespace

void tl::test::flight_tests() {
  events_are_never_torn();
  operations_come_and_go();
  a_full_table_loses_nothing_else();
  a_child_leaves_the_file_alone();
  a_file_goes_unless_something_failed();
  no_file_is_no_failure();
}
