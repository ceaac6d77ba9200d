// Notes: what two connected processes say over their unix socket, which also carries descriptors and whose end tells
// that the other side has gone. Notes are rare; messages ride the ring. One packet a note.
#pragma once
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "memory.h"

namespace tl {

using Key = std::array<uint8_t, 16>;

// With `bye`: the whole engine has closed, so its memory will never change again and new holds of it are safe for ever.
constexpr uint64_t kNoMoreWrites = 1;

enum class NoteKind : uint32_t { hello = 1, welcome, refused, want, segment, no_segment, forget, kick, ack, bye };

struct Note {
  static constexpr uint32_t kVersion = 1;
  static constexpr size_t kMaxText = 1024;
  static constexpr size_t kMaxFds = 4;

  NoteKind kind{};
  uint64_t a = 0, b = 0;
  std::string text;
  std::vector<Fd> fds;  // received; the receiver owns them
};

struct NoteHead {  // of a packet; the text follows
  uint32_t version, kind;
  uint64_t a, b;
};

// Sends without blocking and without SIGPIPE. False when the other side has gone or its buffer is full.
inline bool send_note(int socket, NoteKind kind, uint64_t a = 0, uint64_t b = 0, const std::string& text = {},
                      std::initializer_list<int> fds = {}) {
  NoteHead head{Note::kVersion, static_cast<uint32_t>(kind), a, b};
  iovec parts[2] = {{&head, sizeof head}, {const_cast<char*>(text.data()), text.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * Note::kMaxFds)] = {};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  if (fds.size()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::copy(fds.begin(), fds.end(), reinterpret_cast<int*>(CMSG_DATA(c)));
  }
  ssize_t n;
  do n = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  return n >= 0;
}

// Reads all but the descriptors. Throws Fault::corrupt, refused: another version.
inline void parse_note(std::string_view packet, Note& note) {
  NoteHead head;
  if (packet.size() < sizeof head) throw Error(Fault::corrupt, "a peer sent a note of a wrong length");
  std::memcpy(&head, packet.data(), sizeof head);
  if (head.version != Note::kVersion) throw Error(Fault::refused, "the peer speaks another version of the protocol");
  note.kind = static_cast<NoteKind>(head.kind);
  note.a = head.a;
  note.b = head.b;
  note.text = packet.substr(sizeof head);
}

enum class Received { note, nothing, end };

// Takes one note if there is one. Throws Fault::corrupt on one that cannot be read.
inline Received receive_note(int socket, Note& note) {
  char packet[sizeof(NoteHead) + Note::kMaxText];
  iovec part{packet, sizeof packet};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * Note::kMaxFds)];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t n;
  do n = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  while (n < 0 && errno == EINTR);
  if (n < 0) return errno == EAGAIN ? Received::nothing : Received::end;
  note.fds.clear();
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
    if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
      for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) note.fds.emplace_back(reinterpret_cast<int*>(CMSG_DATA(c))[i]);
  if (n == 0) return Received::end;
  if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) throw Error(Fault::corrupt, "a peer sent a note of a wrong length");
  parse_note({packet, static_cast<size_t>(n)}, note);
  return Received::note;
}

inline sockaddr_un unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    throw Error(Fault::transport, "the socket path " + path + " is longer than the 107 bytes that the system allows");
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

}  // namespace tl
