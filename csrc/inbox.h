// Messages that have arrived, and who waits for them.
//
// Per pair of incarnations messages carry sequence numbers, whichever carrier takes them: they are delivered in order,
// and one that comes twice is dropped. Matching follows MPI: per (source, tag) nothing overtakes; a posted receive takes
// the first message that fits, in the order of posting; `tag` matches only itself.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "flight.h"
#include "holds.h"

namespace tl {

class Connection;

using SourceId = uint32_t;
constexpr SourceId kAnySource = ~SourceId{0};

// One frame: this header, then tag, meta, descriptor and payload. Little-endian, as all hosts we run on are.
struct FrameHeader {
  static constexpr uint32_t kMagic = 0x314d4c54;  // "TLM1"
  uint32_t magic;
  uint16_t tag_size;
  uint16_t is_void;  // only stands for its number: its message was given up on the way, and what follows must not wait
  uint32_t meta_size;
  uint32_t descriptor_size;
  uint64_t payload_size;
  uint64_t sequence;
};

struct Message {
  SourceId source = 0;
  uint64_t incarnation = 0;
  uint64_t sequence = 0;
  uint64_t arrival = 0;
  std::unique_ptr<char[]> bytes;
  uint64_t size = 0;
  uint32_t tag_at = 0, tag_size = 0, meta_at = 0, meta_size = 0, descriptor_at = 0, descriptor_size = 0;
  uint64_t payload_at = 0, payload_size = 0;
  bool is_void = false;
  std::shared_ptr<Connection> carrier;  // maps what is offered; null where it came over gRPC and no connection stands
  bool owes_credit = false;             // the carrier gets credit back once the application has it

  std::string_view tag() const { return {bytes.get() + tag_at, tag_size}; }
  std::string_view meta() const { return {bytes.get() + meta_at, meta_size}; }
  std::string_view descriptor() const { return {bytes.get() + descriptor_at, descriptor_size}; }
  const char* payload() const { return bytes.get() + payload_at; }

  // The frame that takes the place of another one.
  static std::string void_frame(std::string_view frame);
  // Copies and checks a frame that a peer wrote; throws Fault::corrupt.
  static std::unique_ptr<Message> parse(const char* frame, uint64_t n);
};

// A frame for a carrier that may change bytes, with its CRC32C behind it; and the size of the frame in such bytes, which throws
// Fault::corrupt when they were changed.
std::string with_checksum(std::string frame);
uint64_t checked_size(const char* frame, uint64_t n);

// A receive that was posted before its message came.
struct Posted {
  SourceId source;
  std::string tag;
  std::unique_ptr<Message> message;  // set once, under the inbox's lock
  bool lost = false;                 // its source went down
  bool lapsed = false;               // or others took this process for lost
  bool done = false;                 // has its message, was lost, or was collected: nothing more will happen to it
  std::unique_ptr<Operation> operation;  // of one that is awaited
};

class Inbox {
 public:
  SourceId source(const std::string& name);
  std::string name(SourceId source);

  // In order of (source, incarnation, sequence); returns false for one that was there before. Throws Fault::no_room, corrupt: the
  // source sends more than is kept for it; nothing has changed.
  bool deliver(std::unique_ptr<Message> message);
  std::unique_ptr<Message> take(SourceId source, std::string_view tag);
  // Undoes a take: the message is again the first of its source and tag.
  void put_back(std::unique_ptr<Message> message);

  std::shared_ptr<Posted> post(SourceId source, std::string tag);
  bool complete(const Posted& posted);
  // Whether its message has come, and what that offers is still on another host.
  bool is_far(const Posted& posted);
  // From now on it is in flight, until it has ended.
  bool is_awaited(const Posted& posted);
  void awaited(Posted& posted, const std::shared_ptr<Flight>& flight, const Doing& doing);
  // Takes the outcome: a message, or null when the posted receive was still waiting (it is then withdrawn).
  std::unique_ptr<Message> collect(const std::shared_ptr<Posted>& posted);

  void set_down(SourceId source, bool down);
  bool is_down(SourceId source);
  uint64_t downs(SourceId source);  // how often it went down: it may be back before a waiter looks
  // Others took this process for lost, and may have given up what was meant for it: who waits for one of them in particular learns
  // of it.
  void lapse();
  uint64_t lapses() const { return lapses_.load(std::memory_order_acquire); }
  uint64_t completions() const { return completions_.load(std::memory_order_acquire); }
  bool has_posted() const { return posted_count_.load(std::memory_order_relaxed) != 0; }
  uint64_t queued();
  // The last sequence number that came from that incarnation, all before it included.
  uint64_t received(SourceId source, uint64_t incarnation);

 private:
  struct Stream {
    uint64_t last = 0;
    std::map<uint64_t, std::unique_ptr<Message>> early;
  };
  using Queue = std::deque<std::unique_ptr<Message>>;
  struct TagQueues {
    std::map<SourceId, Queue> by_source;
  };
  static constexpr size_t kMaxEarly = 1024;
  static constexpr uint64_t kMaxQueued = 256u << 20;  // bytes of one source: credit begins anew with each lane, and gRPC has none
  static constexpr size_t kMaxStreams = 8;  // of one source: of incarnations before them nothing more can be on its way
  void forget_streams(SourceId source);
  template <class Ends>
  void lose_posted(Ends ends);
  void match(std::unique_ptr<Message> message, bool front);
  void finish(Posted& posted);
  std::unique_ptr<Message> take_locked(SourceId source, std::string_view tag);

  std::mutex mutex_;
  std::unordered_map<std::string, TagQueues> tags_;
  std::list<std::shared_ptr<Posted>> posted_;
  std::map<std::pair<SourceId, uint64_t>, Stream> streams_;
  std::unordered_map<std::string, SourceId> ids_;
  std::vector<std::string> names_;
  std::vector<bool> down_;
  std::vector<uint64_t> downs_;
  std::vector<uint64_t> kept_;       // bytes of messages that nobody has taken
  std::vector<uint64_t> forgotten_;  // the last incarnation of which no stream is kept
  uint64_t arrivals_ = 0, queued_ = 0;
  std::string key_;  // reused, so that a look-up allocates nothing
  std::atomic<uint64_t> completions_{0}, lapses_{0};
  std::atomic<uint32_t> posted_count_{0};
};

}  // namespace tl
