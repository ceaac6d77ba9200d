// A connection between two hosts. Whoever dialled it sends messages over its lane; the other end acknowledges them, gives
// credit, and tells what it publishes. Reads of the peer's memory go over streams of their own (reads.h), so that a large
// one holds up no message, and one that is cancelled ends no lane.
//
// A lane that breaks loses nothing: what the peer has not acknowledged stays with the peer's Outbound, and goes over
// the next lane. So a broken lane is no lost peer.
#pragma once
#include <map>
#include <vector>

#include "connection.h"
#include "handshake.h"
#include "reads.h"
#include "record.h"

namespace tl {

class Engine;

// The way back to the engine, which may end before the last user of a connection.
struct Home {
  std::mutex mutex;
  Engine* engine;
  std::atomic<bool> unattended{false};  // the progress thread doesn't hear of what arrives over some connection
};

class TcpConnection : public Connection {
 public:
  struct Parts {
    Socket socket;
    bool dialled = false;
    Greeting greeting;           // ours, for further streams
    Contact contact;             // the peer's
    uint64_t received = 0;       // dialled: number of the last message that the peer has
    std::shared_ptr<const Tls> tls;  // for further streams
    std::shared_ptr<Home> home;
    std::shared_ptr<Flight> flight;
  };
  TcpConnection(uint64_t serial, Identity peer, Parts parts, std::shared_ptr<Outbound> outbound);

  bool try_send(const Outgoing& message) override;
  void receive(const Intake& intake) override;
  void credit(uint64_t frame_size) override;
  void report() override;
  bool notice(const std::string& name, Notice& notice) const override;
  void published(const std::string& name, const Notice& notice) override;
  void acknowledge(const Descriptor& descriptor) override { reads_.acknowledge(descriptor); }
  int socket() const override { return socket_.get(); }
  void distrust() override;
  void say_goodbye(bool whole) override;
  void finish() override;
  void close_streams() override { finish(); }

  Reads& reads() { return reads_; }
  bool polled() const override { return !dialled_; }
  void attend(bool on) override;
  uint32_t events() const;
  // One side has said that this is the end, and not an accident.
  bool ended() const { return ended_; }
  bool peer_closed() const { return peer_closed_; }
  // The socket takes bytes again.
  void on_writable();
  bool owes() const override;

 private:
  void on_record(RecordKind kind, std::string_view body, const Intake& intake);
  void on_ack(uint64_t sequence, uint64_t taken);
  void flush_messages();                  // under outbound_->mutex
  void write(std::string record);
  void flush_written();                   // under write_mutex_
  void broke();
  void block(bool on);
  void arm();
  void ring();

  Socket socket_;
  const bool dialled_;
  std::shared_ptr<Home> home_;
  std::mutex arm_mutex_;
  std::atomic<bool> attended_{true}, blocked_{false};
  Reads reads_;
  RecordReader reader_;                   // its user is serialised

  // As the sender of messages; under outbound_->mutex.
  size_t at_ = 0, offset_ = 0;            // the next byte to be sent: of outbound_->kept
  uint64_t sent_ = 0, taken_by_peer_ = 0;

  // As their receiver.
  uint64_t arrived_ = 0;                  // bytes of frames; serialised by receive()
  std::atomic<uint64_t> taken_{0}, last_{0}, reported_taken_{0}, reported_last_{0};

  std::mutex write_mutex_;                // records that no acknowledgement is kept for
  std::deque<std::string> written_;
  size_t written_offset_ = 0;

  mutable std::mutex notice_mutex_;
  std::map<std::string, Notice> notices_;
  std::atomic<bool> ended_{false}, peer_closed_{false};
};

}  // namespace tl
