// Reads of this process's memory by peers on other hosts: the owner's side. Progress thread only, unless said.
//
// A read is answered straight from the memory of its claim, with no copy on the way. What is being sent keeps its blocks, so
// a claim that ends meanwhile changes nothing. Streams take turns, and a peer may be held to a rate.
#pragma once
#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <string>

#include "chain.h"
#include "claims.h"
#include "flight.h"
#include "reads.h"

namespace tl {

class Engine;

class ReadServer {
 public:
  explicit ReadServer(Engine& engine) : engine_(engine) {}

  void adopt(Socket socket, const Greeting& greeting, const Digest& secret);
  bool on_event(int fd, uint32_t events);
  // Sends what there is to send, a piece of each stream; returns when to be called next.
  int64_t on_tick(int64_t now);
  void close();
  // Bytes per second to one peer at most; 0: as fast as it goes. Any thread.
  void limit(uint64_t bytes_per_s) { limit_ = bytes_per_s; }
  // Readers aren't sent on to that peer any more: it has gone, or will soon. Any thread.
  void avoid(const Identity& peer);
  // Whether memory is being sent, which keeps it. Any thread.
  bool lending() const { return lent_ != 0; }
  // Reads in progress and their bytes, by peer. Any thread.
  std::map<std::string, std::pair<uint64_t, uint64_t>> borrowers();
  // Streams of all readers of that name.
  size_t streams_of(const std::string& name) const {
    return std::count_if(streams_.begin(), streams_.end(), [&](auto& entry) { return entry.second.peer.name == name; });
  }
  uint64_t sent_bytes() const { return sent_; }

 private:
  struct Stream {
    Socket socket;
    Identity peer;
    Contact contact;
    Digest secret;
    std::string in;                                // requests that have arrived
    std::string head;                              // of the answer
    std::vector<std::shared_ptr<Block>> blocks;    // what is being sent
    std::vector<Span> spans;
    size_t at = 0;                                 // the next byte: of `head`, then of spans[at - 1]
    uint64_t offset = 0;
    std::shared_ptr<Filling> filling;              // what is being sent is still being received
    bool busy = false, ready = false;
    std::unique_ptr<Operation> operation;          // where it is worth telling of
    uint64_t taken = 0;                            // bytes that the reader has then
  };
  struct Bucket {  // of tokens; one a byte
    double bytes = 0;
    int64_t since = 0;
  };
  enum class Turn { more, idle, blocked, awaiting, ended };

  Turn serve(Stream& stream, uint64_t budget, uint64_t& sent);
  bool take_request(Stream& stream);
  void answer(Stream& stream, const ReadRequest& request, std::string_view text);
  std::string redirect(Stream& stream, const ReadRequest& request, std::string_view text);
  size_t next_parts(Stream& stream, uint64_t most, iovec* parts, uint64_t& total);
  void done(Stream& stream);
  void drop(int fd);
  uint64_t allowance(const std::string& peer, int64_t now);

  Engine& engine_;
  std::map<int, Stream> streams_;
  std::deque<int> ready_, awaiting_;
  Chains chains_;
  std::map<std::string, Bucket> buckets_;
  std::atomic<uint64_t> limit_{0}, sent_{0};
  std::atomic<int> lent_{0};
  std::mutex avoided_mutex_;
  std::vector<Identity> avoided_;  // and not yet taken out of the chains
  std::mutex borrowers_mutex_;
  std::map<int, std::pair<std::string, uint64_t>> borrowers_;
};

}  // namespace tl
