// Reads of a peer's memory over TCP: the reader's side. Any thread; each read has a stream to itself.
//
// The owner's progress thread answers (read_server.h). The reader receives straight into the memory that the bytes are
// for. A stream that breaks is replaced, and the read goes on from what has arrived; a read that is cancelled or too late
// ends its stream, so that nothing lands any more. Streams are kept for the next read.
//
// Where many want the same, the owner may send a reader on to another one, who passes on what it gets (chain.h).
#pragma once
#include <deque>
#include <set>
#include <vector>

#include "claims.h"
#include "connection.h"
#include "descriptor.h"
#include "flight.h"
#include "handshake.h"
#include "sink.h"

namespace tl {

struct ReadRequest {
  static constexpr uint32_t kMagic = 0x31524c54;  // "TLR1"
  enum Kind : uint16_t { read = 1, acknowledge = 2, pull = 3 };
  uint32_t magic;
  uint16_t kind, count;  // extents follow: u64 segment, offset, nbytes each; with `pull` a RelayOffer, and its extents
  ClaimId claim;
  Key key;
  uint64_t skip;   // bytes that the reader has already
  uint64_t token;  // acknowledge: tells one that is repeated
  uint32_t crc;    // CRC32C of all that, this field 0
  uint32_t zero;
};

struct RelayOffer {  // with `pull`: what the reader will have itself, in as many extents of the same sizes
  ClaimId claim;
  Key masked_key;
  uint64_t failed;  // the hop that did not serve it, or 0
};

struct ReadReply {  // and then the bytes
  static constexpr uint32_t kMagic = 0x31414c54;  // "TLA1"
  enum Status : uint16_t { ok = 0, stale = 1, corrupt = 2, redirect = 3 };
  uint32_t magic;
  uint16_t status, zero;
  uint64_t nbytes;  // that follow
  uint32_t crc;
  uint32_t zero_too;
};

struct Redirect {  // with the status `redirect`: then name, host and extents
  uint64_t id, depth;
  ClaimId claim;
  Key masked_key, masked_contact_key;
  uint64_t incarnation;
  uint16_t port, name_size, host_size, count;
  uint32_t crc;  // CRC32C of all that, this field 0
  uint32_t zero;
};

// What a reader passes on while it gets it: a claim over the memory that the sinks are, one block that begins with the first.
struct Relay {
  Descriptor descriptor;
  std::shared_ptr<Filling> filling;
  std::function<void()> advanced;  // somebody waits for more
  void advance(uint64_t done) const;  // bytes of its extents, one after the other
  void fail() const;
};

struct RedirectTarget {
  uint64_t id = 0, depth = 0;
  Identity peer;
  Contact contact;
  Descriptor claim;
};

class Reads {
 public:
  static constexpr int kRetries = 3;  // without progress

  // `counters` and `outbound` live as long as this.
  Reads(Contact contact, Greeting greeting, std::shared_ptr<const Tls> tls, Counters& counters, const Outbound& outbound, std::shared_ptr<Flight> flight);

  // Brings the extents of a claim, one after the other, into the sinks. Blocks. Throws Fault::stale, corrupt, lost, timeout,
  // cancelled, closed, and what `patience.look` throws. When it has returned or thrown, nothing lands any more. With `relay` the
  // bytes may come from another reader, and go on to others.
  void read(const Descriptor& claim, const std::vector<Extent>& extents, const std::vector<Sink>& sinks, const Patience& patience,
            const Relay* relay = nullptr);
  // Tells the owner that one read has succeeded; at the latest with the next read.
  void acknowledge(const Descriptor& claim);
  const Contact& contact() const { return contact_; }
  // Ends all reads in progress, with Fault::closed.
  void close();

 private:
  struct Stream {
    Socket socket;
    Digest secret;
    std::deque<ReadRequest> unconfirmed;  // acknowledgements after which nothing was heard
    bool used = false;
  };
  using StreamPtr = std::unique_ptr<Stream>;

  StreamPtr open(const Patience& patience);
  void give_back(StreamPtr stream);
  void give_up(Stream& stream);
  bool flush(Stream& stream);
  struct Work {  // one read, over all its streams
    const std::vector<Sink>& sinks;
    const Relay* relay;
    Activity& activity;
    uint64_t total = 0, done = 0;
  };
  using Target = RedirectTarget;

  void attempt(Stream& stream, ReadRequest request, const std::vector<Extent>& extents, Work& work, uint64_t failed, Target& target,
               const Patience& patience);
  void receive(Stream& stream, Work& work, const Patience& patience);
  Target receive_redirect(Stream& stream, uint64_t nbytes, const Patience& patience);
  bool follow(const Target& target, Work& work, const Patience& patience);
  void check(const Patience& patience) const;
  void retried(const std::string& why) const;
  Doing doing(const char* phase) const { return {"read", phase, greeting_.to.name, greeting_.to.incarnation, "tcp"}; }

  const Contact contact_;
  const Greeting greeting_;
  const std::shared_ptr<const Tls> tls_;
  Counters& counters_;
  const Outbound& outbound_;
  const std::shared_ptr<Flight> flight_;
  std::mutex mutex_;
  std::vector<StreamPtr> idle_;
  std::set<int> active_;
  std::deque<ReadRequest> acks_;  // not sent yet
  uint64_t token_ = 0;
  std::atomic<bool> closed_{false};
};

uint32_t checksum(ReadRequest request, std::string_view rest);
uint32_t checksum(ReadReply reply);

// ----- what comes from peers, taken apart. All throw Fault::corrupt; `secret` is that of the stream.

std::string encode(ReadRequest request, const std::vector<Extent>& extents, const std::string& more = {});
// Takes the next request out of `in`, and what follows its head. False: not all of it is there.
bool take_request(std::string& in, ReadRequest& request, std::string& text);
// What follows the extents of a `pull`: what the reader will have, and the hop that failed it.
Descriptor parse_offer(const ReadRequest& request, std::string_view text, const Digest& secret, uint64_t& failed);
std::string encode(const RedirectTarget& target, const Digest& secret);
RedirectTarget parse_redirect(std::string body, const Digest& secret);  // Throws Fault::lost too: it changed on its way

}  // namespace tl
