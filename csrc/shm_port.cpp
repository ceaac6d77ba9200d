#include "shm_port.h"

#include <poll.h>
#include <sys/epoll.h>

#include "engine.h"
#include "point.h"

namespace tl {

namespace {

Map make_half(Fd& fd) {
  uint64_t nbytes = round_up(sizeof(Half), kPage);
  fd = make_memfd("tensorlink-half", nbytes);
  return Map(fd.get(), nbytes, PROT_READ | PROT_WRITE, MAP_SHARED);
}

}  // namespace

ShmPort::ShmPort(Engine& engine, std::string path, Key key) : engine_(engine), path_(std::move(path)), key_(key) {
  sockaddr_un address = unix_address(path_);
  listener_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_) throw_errno("cannot make the engine's socket");
  if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) throw_errno("cannot bind " + path_);
  if (::listen(listener_.get(), 512) != 0) throw_errno("cannot listen on " + path_);
}

void ShmPort::start() { engine_.watch_fd(listener_.get(), EPOLLIN); }

void ShmPort::close() {
  ::unlink(path_.c_str());
  listener_.reset();
  pending_.clear();
}

bool ShmPort::on_event(int fd, uint32_t) {
  if (fd == listener_.get()) return accept_all(), true;
  if (pending_.count(fd)) return on_hello(fd), true;
  return false;
}

int64_t ShmPort::on_tick(int64_t now) {
  for (auto it = pending_.begin(); it != pending_.end();) it = it->second.deadline_ns < now ? pending_.erase(it) : std::next(it);
  return INT64_MAX;
}

void ShmPort::accept_all() {
  for (;;) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    ucred credentials{};
    socklen_t size = sizeof credentials;
    bool ours = ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 &&
                (credentials.uid == ::geteuid() || credentials.uid == 0);
    if (!ours || pending_.size() >= kMaxPending) continue;
    int fd = socket.get();
    engine_.watch_fd(fd, EPOLLIN);
    pending_[fd] = {std::move(socket), now_ns() + kHelloTimeout};
  }
}

void ShmPort::on_hello(int fd) {
  Note hello;
  Received received = Received::end;
  std::string refusal;
  try {
    received = receive_note(fd, hello);
    if (received == Received::nothing) return;  // the event was for what had this number before
    if (received == Received::note && hello.kind != NoteKind::hello) refusal = "the greeting cannot be read";
  } catch (const Error& error) {
    refusal = error.what();
  }
  Fd socket = std::move(pending_.extract(fd).mapped().socket);
  engine_.unwatch_fd(fd);
  if (!refusal.empty()) {
    send_note(fd, NoteKind::refused, 0, 0, refusal);
  } else if (received == Received::note) {
    try {
      welcome(std::move(socket), hello);
    } catch (const Error&) {  // what it sent along is not what it should be; the socket closes
    }
  }
}

void ShmPort::welcome(Fd socket, Note& hello) {
  auto refuse = [&](const char* why) { send_note(socket.get(), NoteKind::refused, 0, 0, why); };
  if (hello.text.size() < key_.size()) return;
  uint8_t differ = 0;
  for (size_t i = 0; i < key_.size(); ++i) differ |= static_cast<uint8_t>(hello.text[i]) ^ key_[i];
  if (differ) return refuse("the key is wrong");
  std::string names = hello.text.substr(key_.size());
  size_t end = names.find('\0');
  if (end == std::string::npos || end == 0) return refuse("the greeting cannot be read");
  Identity peer{names.substr(0, end), hello.a};
  if (names.substr(end + 1) != engine_.name() || hello.b != engine_.incarnation()) return refuse("restarted");
  point("handshake", "heard");
  Fd half_fd;
  Map half = make_half(half_fd);
  int half_number = half_fd.get(), socket_number = socket.get();
  Fd control = read_only(engine_.control_fd());
  auto connection = make(hello, std::move(socket), std::move(half_fd), std::move(half), peer);
  add(connection);
  send_note(socket_number, NoteKind::welcome, engine_.incarnation(), 0, {}, {half_number, engine_.doorbell_fd().get(), control.get()});
  engine_.ring();
}

void ShmPort::on_connection(const std::shared_ptr<Connection>& any, int fd, uint32_t) {
  auto connection = std::static_pointer_cast<ShmConnection>(any);
  if (fd != connection->socket()) return engine_.lose(connection, false);  // its pidfd: the process has ended
  try {
    Note note;
    for (;;) {
      Received received = receive_note(fd, note);
      if (received == Received::nothing) return;
      if (received == Received::end) return engine_.lose(connection, true);
      on_note(connection, note);
    }
  } catch (const Error&) {  // it sends nonsense: as good as gone
    engine_.lose(connection, true);
  }
}

void ShmPort::on_note(const std::shared_ptr<ShmConnection>& connection, Note& note) {
  switch (note.kind) {
    case NoteKind::want: {
      if (!connection->announce(*engine_.arena(), static_cast<uint32_t>(note.a))) connection->note(NoteKind::no_segment, note.a);
      return;
    }
    case NoteKind::segment:
      if (note.fds.size() != 1) throw Error(Fault::corrupt, "a segment came without its descriptor");
      connection->add_segment(static_cast<uint32_t>(note.a), std::move(note.fds[0]));
      return engine_.ring();
    case NoteKind::no_segment:
      connection->no_segment(static_cast<uint32_t>(note.a));
      return engine_.ring();
    case NoteKind::forget:
      return connection->drop_segment(static_cast<uint32_t>(note.a));
    case NoteKind::ack:
      if (engine_.claims().acknowledged(note.a, connection->reader())) engine_.ring();
      return engine_.sweep();
    case NoteKind::kick:
      engine_.pump(true);
      if (engine_.claims().restless()) engine_.sweep();
      return;
    case NoteKind::bye:
      engine_.lose(connection, false);
      if (note.a != kNoMoreWrites) connection->finish();  // else what it had offered may still be opened
      return;
    default:
      throw Error(Fault::corrupt, "a note of an unknown kind");
  }
}

// A connection from what its peer sent and what we made; throws Fault::corrupt when the descriptors aren't what they should be.
std::shared_ptr<ShmConnection> ShmPort::make(Note& note, Fd socket, Fd half_fd, Map half, Identity peer) {
  if (note.fds.size() != 3) throw Error(Fault::corrupt, "a peer sent the wrong number of descriptors");
  auto map = [&](int i, uint64_t nbytes, int protection) {
    if (sealed_size(note.fds[i].get()) != round_up(nbytes, kPage)) throw Error(Fault::corrupt, "a peer sent shared memory of a wrong size");
    return Map(note.fds[i].get(), round_up(nbytes, kPage), protection, MAP_SHARED);
  };
  ShmConnection::Parts parts;
  parts.their_half = map(0, sizeof(Half), PROT_READ | PROT_WRITE);
  parts.their_doorbell = map(1, sizeof(Doorbell), PROT_READ | PROT_WRITE);
  parts.their_control = map(2, sizeof(Control), PROT_READ);
  parts.my_half = std::move(half);
  parts.my_half_fd = std::move(half_fd);
  ucred credentials{};
  socklen_t size = sizeof credentials;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size);
  parts.socket = std::move(socket);
  return std::make_shared<ShmConnection>(engine_.next_serial(), peer, credentials.pid, std::move(parts), engine_.outbound(peer));
}

void ShmPort::add(const std::shared_ptr<ShmConnection>& connection) {
  std::vector<Watched> fds{{connection->socket(), EPOLLIN | EPOLLRDHUP}};
  Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, connection->pid, 0)));
  if (pidfd) fds.push_back({pidfd.get(), EPOLLIN});  // a forked child may keep the socket open, so its end alone would not tell of the death
  connection->keep_pidfd(std::move(pidfd));
  engine_.add(connection, *this, fds);
}

std::shared_ptr<Connection> ShmPort::connect(const std::string& path, Key key, const Identity& peer, int64_t deadline_ns, const Stop* stop) {
  constexpr int64_t kSliceMs = 100;
  Activity activity(engine_.flight(), {"connect", "handshake", peer.name, peer.incarnation, "shm"});
  sockaddr_un address = unix_address(path);
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_errno("cannot make a socket");
  while (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    if (errno != EAGAIN && errno != EINTR) throw Error(Fault::lost, "cannot connect to " + peer.name + ": " + std::strerror(errno), errno);
    if (now_ns() > deadline_ns) throw Error(Fault::timeout, peer.name + " accepts no connection");
    if (stop && stop->flag) throw Error(Fault::cancelled, "cancelled");
    ::poll(nullptr, 0, 1);  // its queue of connections is full
  }
  Fd half_fd;
  Map half = make_half(half_fd);
  std::string text(reinterpret_cast<const char*>(key.data()), key.size());
  text += engine_.name() + '\0' + peer.name;
  Fd control = read_only(engine_.control_fd());
  if (!send_note(socket.get(), NoteKind::hello, engine_.incarnation(), peer.incarnation, text, {half_fd.get(), engine_.doorbell_fd().get(), control.get()}))
    throw Error(Fault::lost, peer.name + " closed the connection");
  point("handshake", "greeted");
  Note answer;
  for (;;) {
    Received received = receive_note(socket.get(), answer);
    if (received == Received::note) break;
    if (received == Received::end) throw Error(Fault::lost, peer.name + " closed the connection");
    int64_t left = deadline_ns - now_ns();
    if (left <= 0) throw Error(Fault::timeout, peer.name + " does not answer");
    if (stop && stop->flag) throw Error(Fault::cancelled, "cancelled");
    pollfd poll{socket.get(), POLLIN, 0};
    if (::poll(&poll, 1, static_cast<int>(std::min(left / 1'000'000 + 1, kSliceMs))) < 0 && errno == EINTR)
      throw Error(Fault::interrupted, "interrupted");
  }
  if (answer.kind != NoteKind::welcome) throw Error(Fault::refused, answer.text);
  auto connection = make(answer, std::move(socket), std::move(half_fd), std::move(half), peer);
  add(connection);
  return connection;
}

}  // namespace tl
