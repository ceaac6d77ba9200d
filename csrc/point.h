// Named points of the code at which a test has this process killed or stopped, at the n-th time that a thread comes there.
//
// All that the flight recorder tells of is a point too: an operation or a phase of it as `what.phase` (`read.bytes`,
// `connect.handshake`, `join.coordinator`), an event as `what.outcome` (`lane.up`, `lane.broke`, `read.retry`). Those that
// are named in the code lie where nothing is told, since nobody waits there:
//
//   join.answered        the coordinator has given the incarnation, the engine doesn't run yet
//   handshake.greeted    the dialling side has shown that it knows the key
//   handshake.heard      the other side has checked that, and not answered
//   claim.stored         the bytes are in the pool and may be read, nobody has been told
//   message.sent         a message is in the ring, or in the socket; nobody has acknowledged it
//   message.taken        the inbox has it; its sender doesn't know
//   hold.taken           a reader's hold stands
//   read.part            the reader has some of the bytes
//   served.part          the owner has sent some of the bytes
//   read.acknowledge     a read is over, its owner doesn't know
//   version.stored       a version can be read, it is on no board
//
// Unless something is armed, a point costs one relaxed load.
#pragma once
#include <atomic>
#include <string>
#include <string_view>

namespace tl {

namespace points {
extern std::atomic<bool> armed;
void reached(std::string_view what, std::string_view phase);

// What is to happen: `NAME:kill@N` or `NAME:stop@N`, several with commas between; `@N` may be left out and is then 1. Replaces
// what was armed; nothing: disarms. Throws std::invalid_argument.
void arm(const std::string& plan);
// The same from the environment variable TENSORLINK_TEST_POINT, once for each value of it.
void arm_from_environment();
}  // namespace points

inline void point(std::string_view what, std::string_view phase) {
  if (points::armed.load(std::memory_order_relaxed)) points::reached(what, phase);
}

}  // namespace tl
