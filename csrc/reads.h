// Reads of a peer's memory over TCP: the reader's side. Any thread; each read has a stream to itself.
//
// The owner's progress thread answers (read_server.h). The reader receives straight into the memory that the bytes are
// for. A stream that breaks is replaced, and the read goes on from what has arrived; a read that is cancelled or too late
// ends its stream, so that nothing lands any more. Streams are kept for the next read.
#pragma once
#include <deque>
#include <set>
#include <vector>

#include "connection.h"
#include "descriptor.h"
#include "handshake.h"
#include "sink.h"

namespace tl {

struct ReadRequest {
  static constexpr uint32_t kMagic = 0x31524c54;  // "TLR1"
  enum Kind : uint16_t { read = 1, acknowledge = 2 };
  uint32_t magic;
  uint16_t kind, count;  // extents follow: u64 segment, offset, nbytes each
  ClaimId claim;
  Key key;
  uint64_t skip;   // bytes that the reader has already
  uint64_t token;  // acknowledge: tells one that is repeated
  uint32_t crc;    // CRC32C of all that, this field 0
  uint32_t zero;
};

struct ReadReply {  // and then the bytes
  static constexpr uint32_t kMagic = 0x31414c54;  // "TLA1"
  enum Status : uint16_t { ok = 0, stale = 1, corrupt = 2 };
  uint32_t magic;
  uint16_t status, zero;
  uint64_t nbytes;  // that follow
  uint32_t crc;
  uint32_t zero_too;
};

class Reads {
 public:
  static constexpr int kRetries = 3;  // without progress

  // `counters` and `outbound` live as long as this.
  Reads(Contact contact, Greeting greeting, Counters& counters, const Outbound& outbound);

  // Brings the extents of a claim, one after the other, into the sinks. Blocks. Throws Fault::stale, corrupt, lost, timeout,
  // cancelled, closed, and what `patience.look` throws. When it has returned or thrown, nothing lands any more.
  void read(const Descriptor& claim, const std::vector<Extent>& extents, const std::vector<Sink>& sinks, const Patience& patience);
  // Tells the owner that one read has succeeded; at the latest with the next read.
  void acknowledge(const Descriptor& claim);
  const Contact& contact() const { return contact_; }
  // Ends all reads in progress, with Fault::closed.
  void close();

 private:
  struct Stream {
    Fd socket;
    std::deque<ReadRequest> unconfirmed;  // acknowledgements after which nothing was heard
    bool used = false;
  };
  using StreamPtr = std::unique_ptr<Stream>;

  StreamPtr open(const Patience& patience);
  void give_back(StreamPtr stream);
  void give_up(Stream& stream);
  bool flush(Stream& stream);
  void attempt(Stream& stream, ReadRequest request, const std::vector<Extent>& extents, const std::vector<Sink>& sinks, uint64_t& done,
               const Patience& patience);
  void check(const Patience& patience) const;

  const Contact contact_;
  const Greeting greeting_;
  Counters& counters_;
  const Outbound& outbound_;
  std::mutex mutex_;
  std::vector<StreamPtr> idle_;
  std::set<int> active_;
  std::deque<ReadRequest> acks_;  // not sent yet
  uint64_t token_ = 0;
  std::atomic<bool> closed_{false};
};

uint32_t checksum(ReadRequest request, const char* extents);
uint32_t checksum(ReadReply reply);

}  // namespace tl
