#include "flight.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "point.h"

namespace tl {

namespace {

// Mappings of files, for a forked child: it must not write into its parent's.
constexpr size_t kMostFiles = 64;
std::atomic<char*> mapped_files[kMostFiles];

// Runs in a forked child, where nothing but system calls is safe.
void leave_files() {
  for (auto& file : mapped_files)
    if (char* data = file.exchange(nullptr)) ::mmap(data, Flight::kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

std::atomic<char*>* register_file(char* data) {
  static const int once = ::pthread_atfork(nullptr, nullptr, leave_files);
  static_cast<void>(once);
  for (auto& file : mapped_files) {
    char* nobody = nullptr;
    if (file.compare_exchange_strong(nobody, data)) return &file;
  }
  return nullptr;
}

uint32_t thread_id() {
  static thread_local const uint32_t id = static_cast<uint32_t>(::syscall(SYS_gettid));
  return id;
}

template <size_t N>
void fill(char (&empty)[N], std::string_view text) {
  std::memcpy(empty, text.data(), std::min(N, text.size()));
}

template <size_t N>
void set(char (&field)[N], std::string_view text) {
  std::memset(field, 0, N);
  fill(field, text);
}

uint64_t start_ticks() {
  char text[1024] = {};
  std::FILE* file = std::fopen("/proc/self/stat", "re");
  if (!file) return 0;
  size_t n = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  const char* at = ::strrchr(text, ')');  // the name before it may hold anything
  for (int field = 2; at && n && field < 22; ++field) at = std::strchr(at + 1, ' ');
  return at ? std::strtoull(at, nullptr, 10) : 0;
}

thread_local Operation* current_operation = nullptr;
thread_local FlightRecord last_record;  // of the operation that this thread ended last
thread_local int64_t last_ended = 0;

}  // namespace

FlightRecord::FlightRecord(const Doing& doing) : since_ns(now_ns()), news_ns(doing.news_ns), total(doing.total), incarnation(doing.incarnation), thread(thread_id()) {
  fill(what, doing.what);
  fill(transport, doing.transport);
  fill(phase, doing.phase);
  fill(peer, doing.peer);
  fill(note, doing.note);
}

void FlightRecord::change(const Doing& doing) {
  set(phase, doing.phase);
  if (*doing.transport) set(transport, doing.transport);
  if (!doing.peer.empty()) set(peer, doing.peer), incarnation = doing.incarnation;
  if (!doing.note.empty()) set(note, doing.note);
  if (doing.total) done = 0, total = doing.total;
  if (doing.news_ns) news_ns = doing.news_ns;
}

void FlightSlot::write(const FlightRecord& record, uint64_t sequence) {
  words[0].store(kWriting, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  const char* from = reinterpret_cast<const char*>(&record);
  for (size_t i = 1; i < kWords; ++i) {
    uint64_t word;
    std::memcpy(&word, from + 8 * i, 8);
    words[i].store(word, std::memory_order_relaxed);
  }
  words[0].store(sequence, std::memory_order_release);
}

bool FlightSlot::read(FlightRecord& record) const {
  uint64_t copy[kWords];
  copy[0] = words[0].load(std::memory_order_acquire);
  if (copy[0] == 0 || copy[0] == kWriting) return false;
  for (size_t i = 1; i < kWords; ++i) copy[i] = words[i].load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (words[0].load(std::memory_order_relaxed) != copy[0]) return false;
  std::memcpy(static_cast<void*>(&record), copy, sizeof record);
  return true;
}

// ----- the recorder

Flight::Flight(const std::string& name, const std::string& path) : pid_(::getpid()) {
  if (path.empty() || !make_file(path)) {
    void* memory = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<char*>(memory);
  }
  describe(name);
}

bool Flight::make_file(const std::string& path) {
  int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  int code = fd < 0 ? errno : ::posix_fallocate(fd, 0, kSize);  // a write to a page with no room behind it would be a SIGBUS
  void* memory = MAP_FAILED;
  if (code == 0) {
    memory = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (memory == MAP_FAILED) code = errno;
  }
  if (code == 0 && !(registered_ = register_file(static_cast<char*>(memory)))) code = EMFILE, ::munmap(memory, kSize);
  if (fd >= 0) ::close(fd);
  if (fd >= 0 && code) ::unlink(path.c_str());
  if (code) return error_ = "cannot make " + path + ": " + std::strerror(code), false;
  data_ = static_cast<char*>(memory);
  path_ = path;
  return true;
}

void Flight::describe(const std::string& name) {
  FlightHeader& head = header();
  head.version = FlightHeader::kVersion;
  head.header_size = kHeader, head.record_size = sizeof(FlightSlot), head.operations = kOperations, head.events = kEvents;
  head.pid = static_cast<uint32_t>(pid_);
  head.start_ticks = start_ticks();
  timespec real;
  ::clock_gettime(CLOCK_REALTIME, &real);
  head.made_real_ns = int64_t{real.tv_sec} * 1'000'000'000 + real.tv_nsec;
  head.made_ns = now_ns();
  head.alive_ns = head.made_ns;
  set(head.name, name);
  if (std::FILE* boot = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
    [[maybe_unused]] size_t n = std::fread(head.boot, 1, 36, boot);
    std::fclose(boot);
  }
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(head.magic, FlightHeader::kMagic, sizeof head.magic);
}

Flight::~Flight() {
  if (::getpid() == pid_ && registered_) registered_->store(nullptr);
  ::munmap(data_, kSize);
}

void Flight::close() {
  if (::getpid() != pid_ || header().closed.exchange(1)) return;
  if (!path_.empty() && header().failures == 0) ::unlink(path_.c_str());
}

void Flight::append(FlightRecord& record, int64_t now) {
  record.news_ns = now;
  uint64_t number = header().next.fetch_add(1, std::memory_order_relaxed);
  FlightSlot& slot = events()[number % kEvents];
  // A writer that stood still while the ring went round once has this record: then the event is lost, and not both of them.
  if (slot.words[0].exchange(FlightSlot::kWriting, std::memory_order_acquire) == FlightSlot::kWriting)
    header().dropped.fetch_add(1, std::memory_order_relaxed);
  else
    slot.write(record, number + 1);
  if (record.failed) header().failures.fetch_add(1, std::memory_order_relaxed);
}

void Flight::note(const Doing& doing, std::string_view outcome, bool failed) {
  FlightRecord record(doing);
  set(record.outcome, outcome);
  record.failed = failed;
  point(doing.what, outcome);
  append(record, record.since_ns);
}

void Flight::failed(const Doing& doing, std::string_view error, bool late) {
  constexpr int64_t kJust = 100'000'000;
  FlightRecord record(doing);
  const int64_t now = record.since_ns;
  const std::string peer(record.peer, ::strnlen(record.peer, sizeof record.peer));
  const bool ours = Activity::latest(record) && (current_operation || now - last_ended < kJust) &&
                    (peer.empty() || peer == std::string(record.peer, ::strnlen(record.peer, sizeof record.peer)));
  if (ours && record.failed) return;  // it was told when the operation ended
  if (late && ours && now - record.since_ns < kLook) return;
  if (!ours) record = FlightRecord(doing);
  set(record.outcome, error);
  record.failed = 1;
  append(record, now);
}

bool Flight::find(uint32_t thread, FlightRecord& record) const {
  for (uint32_t i = 0; i < kOperations; ++i)
    if (taken_[i].load(std::memory_order_relaxed) && operations()[i].read(record) && record.thread == thread) return true;
  return false;
}

int Flight::take() {
  static thread_local uint32_t hint = thread_id();
  for (uint32_t i = 0; i < kOperations; ++i) {
    uint32_t at = (hint + i) % kOperations;
    if (!taken_[at].load(std::memory_order_relaxed) && !taken_[at].exchange(true, std::memory_order_acquire)) return hint = at, static_cast<int>(at);
  }
  return -1;
}

// ----- operations

Operation::Operation(std::shared_ptr<Flight> flight, const Doing& doing) : flight_(std::move(flight)), record_(doing), slot_(flight_->take()) {
  point(doing.what, doing.phase);
  if (slot_ >= 0) flight_->operations()[slot_].write(record_, flight_->next_serial());
}

void Operation::change(const Doing& doing) {
  point(doing.what, doing.phase);
  record_.change(doing);
  if (slot_ >= 0) flight_->operations()[slot_].write(record_, flight_->next_serial());
}

void Operation::moved(uint64_t done, int64_t now) {
  record_.done = done;
  if (slot_ >= 0) flight_->operations()[slot_].words[FlightSlot::kDone].store(done, std::memory_order_relaxed);
  heard(now);
}

void Operation::heard(int64_t when) {
  record_.news_ns = when;
  if (slot_ >= 0) flight_->operations()[slot_].words[FlightSlot::kNews].store(static_cast<uint64_t>(when), std::memory_order_relaxed);
}

int64_t Operation::end(std::string_view outcome, bool failed) {
  const int64_t now = now_ns();
  if (std::exchange(ended_, true)) return now;
  if (slot_ >= 0) {
    flight_->operations()[slot_].words[0].store(0, std::memory_order_release);
    flight_->taken_[slot_].store(false, std::memory_order_release);
  }
  slot_ = -1;
  const bool unwinds = !failed && std::uncaught_exceptions() > 0;  // the error will be told of
  if (unwinds || (!failed && record_.total < Flight::kLarge && now - record_.since_ns < Flight::kLong)) return now;
  set(record_.outcome, outcome.empty() ? "done" : outcome);
  record_.failed = failed;
  FlightRecord event = record_;
  flight_->append(event, now);
  return now;
}

void Activity::begin(const Doing& doing) {
  if (operation_) return operation_->change(doing);
  thread_ = thread_id();
  if (!current_operation) {
    own_.emplace(flight_, doing);
    current_operation = &*own_;
  } else {
    current_operation->change(doing);
  }
  operation_ = current_operation;
}

bool Activity::here() const { return !operation_ || thread_ == thread_id(); }

void Activity::turned_out(std::string_view outcome, bool failed) {
  outcome_ = outcome;
  failed_ = failed;
}

Activity::~Activity() {
  if (!own_) return;
  current_operation = nullptr;
  last_ended = own_->end(outcome_, failed_);
  last_record = own_->record();
}

bool Activity::latest(FlightRecord& record) {
  if (!current_operation && last_ended == 0) return false;
  record = current_operation ? current_operation->record() : last_record;
  return true;
}

void Activity::moved(uint64_t done) {
  if (current_operation) current_operation->moved(done, now_ns());
}

}  // namespace tl
