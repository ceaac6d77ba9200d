// The flight recorder of an endpoint: its last events, and what it does at this moment, in a file that outlives a `kill -9`.
//
// The file has a fixed size: a header, a table of the operations in flight, and a ring of events. Both hold records of one form,
// which say in words what happened, so that a reader needs no table of numbers. Whoever writes a record marks it first, and gives
// it a number that was never used before when it is whole: a reader that sees one number before and after has seen one record.
// No lock and no system call: an event costs one look at the clock and some ten nanoseconds, and where nobody has to sleep nothing is
// written.
//
// Where there is no file, because nobody wants one or none can be made, all is the same in memory of the process alone: errors
// tell what was being waited for from the same table. A forked child gets empty memory in its place.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "doorbell.h"

namespace tl {

// What is told of an operation or an event. Only what a log may show: names, sizes, times; no keys and no data.
struct Doing {
  const char* what;             // recv, send, read, connect, ...
  const char* phase = "";       // what is being waited for: message, bytes, room, ...
  std::string peer = {};
  uint64_t incarnation = 0;
  const char* transport = "";
  std::string note = {};        // tag, name of weights, reason
  uint64_t total = 0;           // bytes, if they are known
  int64_t news_ns = 0;          // when the peer was last heard of; 0: never
};

struct FlightRecord {
  uint64_t sequence = 0;
  int64_t since_ns = 0;  // when it began; this and the next are of CLOCK_MONOTONIC
  int64_t news_ns = 0;   // operations: the last news; events: when it happened
  uint64_t done = 0, total = 0;
  uint64_t incarnation = 0;
  uint32_t thread = 0;
  uint32_t failed = 0;
  // Text that fills its field was cut.
  char what[12] = {}, outcome[20] = {}, transport[8] = {}, phase[16] = {}, peer[48] = {}, note[96] = {};

  FlightRecord() = default;
  explicit FlightRecord(const Doing& doing);
  // The next phase of the same operation; what is empty or 0 stays as it was.
  void change(const Doing& doing);
};

struct FlightSlot {
  static constexpr size_t kWords = sizeof(FlightRecord) / 8, kNews = 2, kDone = 3;
  static constexpr uint64_t kWriting = ~uint64_t{0};
  std::atomic<uint64_t> words[kWords];  // the first: `sequence`

  void write(const FlightRecord& record, uint64_t sequence);
  bool read(FlightRecord& record) const;  // false: empty, or being written
};
static_assert(sizeof(FlightRecord) == 256 && sizeof(FlightSlot) == sizeof(FlightRecord));

struct FlightHeader {
  static constexpr char kMagic[9] = "TLFLIGHT";
  static constexpr uint32_t kVersion = 1;
  char magic[8];
  uint32_t version, header_size, record_size, operations, events;
  uint32_t pid;
  uint64_t start_ticks;      // of the process since the boot, as in /proc/PID/stat: tells it from a later one with this pid
  int64_t made_real_ns, made_ns;  // one moment by both clocks
  std::atomic<uint64_t> incarnation;
  std::atomic<uint64_t> next;      // events so far
  std::atomic<int64_t> alive_ns;   // when the progress thread last ran
  std::atomic<uint64_t> failures, dropped, closed;
  char boot[40];             // identity of the boot
  char name[808];            // of the endpoint
};

class Flight {
 public:
  static constexpr uint32_t kOperations = 192, kEvents = 768;
  static constexpr uint64_t kHeader = 4096, kSize = kHeader + (kOperations + kEvents) * sizeof(FlightSlot);
  static constexpr uint64_t kLarge = 1u << 20;             // bytes; smaller transfers leave no event if all goes well
  static constexpr int64_t kLong = 1'000'000'000;          // and shorter waits neither
  static constexpr int64_t kLook = 250'000'000;            // shorter ones that end in vain are no failures

  // Makes the file; with no `path`, or where that fails, there is none. `error()` says why.
  Flight(const std::string& name, const std::string& path);
  ~Flight();
  Flight(const Flight&) = delete;
  const std::string& path() const { return path_; }  // empty: there is no file
  const std::string& error() const { return error_; }

  // ----- any thread
  void start(uint64_t incarnation) { header().incarnation = incarnation; }
  void beat(int64_t now) { header().alive_ns.store(now, std::memory_order_relaxed); }
  void note(const Doing& doing, std::string_view outcome, bool failed = false);
  // A failure that an error tells of: with what this thread was waiting for, if it is that.
  // `late`: its time was over, which after a short wait is no failure but the end of a look.
  void failed(const Doing& doing, std::string_view error, bool late = false);
  // What a thread of this process does now. False: nothing that is told here.
  bool find(uint32_t thread, FlightRecord& record) const;
  // The endpoint has left. The file goes too, unless something failed.
  void close();

 private:
  friend class Operation;
  FlightHeader& header() const { return *reinterpret_cast<FlightHeader*>(data_); }
  FlightSlot* operations() const { return reinterpret_cast<FlightSlot*>(data_ + kHeader); }
  FlightSlot* events() const { return operations() + kOperations; }
  bool make_file(const std::string& path);
  void describe(const std::string& name);
  void append(FlightRecord& record, int64_t now);
  int take();
  uint64_t next_serial() { return serials_.fetch_add(1, std::memory_order_relaxed) + 1; }

  const pid_t pid_;
  char* data_ = nullptr;
  std::atomic<char*>* registered_ = nullptr;
  std::string path_, error_;
  std::atomic<uint64_t> serials_{0};
  std::atomic<bool> taken_[kOperations] = {};
};

// Something in flight, from when it is made to its end. Used by one thread at a time.
class Operation {
 public:
  Operation(std::shared_ptr<Flight> flight, const Doing& doing);
  ~Operation() { end(); }
  Operation(const Operation&) = delete;
  void change(const Doing& doing);
  void moved(uint64_t done, int64_t now);  // bytes so far
  void heard(int64_t when);
  // Leaves an event if it was large or long, or has failed. Idempotent.
  // Returns the time.
  int64_t end(std::string_view outcome = {}, bool failed = false);
  const FlightRecord& record() const { return record_; }

 private:
  std::shared_ptr<Flight> flight_;
  FlightRecord record_;
  int slot_;  // -1: the table is full
  bool ended_ = false;
};

// What the calling thread does, for a while. Within another activity of the thread it is the next phase of that one's operation.
class Activity {
 public:
  explicit Activity(const std::shared_ptr<Flight>& flight) : flight_(flight) {}
  Activity(const std::shared_ptr<Flight>& flight, const Doing& doing) : flight_(flight) { begin(doing); }
  ~Activity();
  Activity(const Activity&) = delete;
  bool begun() const { return operation_ != nullptr; }
  void begin(const Doing& doing);  // the first time; later: change()
  Operation* operator->() { return operation_; }
  void turned_out(std::string_view outcome, bool failed);  // how it ends
  bool here() const;  // whether it began on this thread, and so may end here

  // What the thread does, or did last. False: nothing yet.
  static bool latest(FlightRecord& record);
  // Tells the activity of this thread, if it has one, of bytes that it has moved.
  static void moved(uint64_t done);

 private:
  const std::shared_ptr<Flight> flight_;
  std::optional<Operation> own_;
  Operation* operation_ = nullptr;
  std::string outcome_;
  bool failed_ = false;
  uint32_t thread_ = 0;
};

}  // namespace tl
