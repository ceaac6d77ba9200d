// The progress thread of the engine.
#include <sys/epoll.h>

#include <algorithm>

#include "engine.h"

namespace tl {

void Engine::run() {
  ::pthread_setname_np(::pthread_self(), "tensorlink");
  int64_t due = 0;
  while (!closed()) {
    int64_t now = now_ns();
    if (now >= due) due = on_tick(now);
    epoll_event events[64];
    int64_t wait = std::clamp<int64_t>((due - now) / 1'000'000 + 1, 0, 1000);
    int n = ::epoll_wait(epoll_.get(), events, 64, static_cast<int>(wait));
    for (int i = 0; i < n; ++i) {
      int fd = events[i].data.fd;
      if (fd == wake_fd_.get()) {
        uint64_t value;
        [[maybe_unused]] ssize_t got = ::read(fd, &value, sizeof value);
        due = 0;
      } else if (fd == listener_.get()) {
        accept_all();
      } else if (pending_.count(fd)) {
        on_hello(fd);
      } else {
        on_connection(fd);
      }
    }
    if (n > 0) due = std::min(due, now + kTick);
  }
}

int64_t Engine::on_tick(int64_t now) {
  for (auto it = pending_.begin(); it != pending_.end();) it = it->second.deadline_ns < now ? pending_.erase(it) : std::next(it);
  if (now - last_trim_ > kIdleTrim / 3) {
    last_trim_ = now;
    arena_->trim(now - kIdleTrim);
  }
  for (uint32_t segment : arena_->take_dropped())
    for (auto& connection : connections()) connection->note(NoteKind::forget, segment);
  bool restless = claims_.restless();
  if (restless) sweep();
  return std::min(heartbeat_.tick(now), now + (restless ? kTick : 1'000'000'000));
}

void Engine::accept_all() {
  for (;;) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    ucred credentials{};
    socklen_t size = sizeof credentials;
    bool ours = ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 &&
                (credentials.uid == ::geteuid() || credentials.uid == 0);
    if (!ours || pending_.size() >= kMaxPending) continue;
    int fd = socket.get();
    epoll_event event{EPOLLIN, {.fd = fd}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
    pending_[fd] = {std::move(socket), now_ns() + kHelloTimeout};
  }
}

void Engine::on_hello(int fd) {
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
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  if (!refusal.empty()) {
    send_note(fd, NoteKind::refused, 0, 0, refusal);
  } else if (received == Received::note) {
    try {
      welcome(std::move(socket), hello);
    } catch (const Error&) {  // what it sent along is not what it should be; the socket closes
    }
  }
}

void Engine::welcome(Fd socket, Note& hello) {
  auto refuse = [&](const char* why) { send_note(socket.get(), NoteKind::refused, 0, 0, why); };
  if (hello.text.size() < key_.size()) return;
  uint8_t differ = 0;
  for (size_t i = 0; i < key_.size(); ++i) differ |= static_cast<uint8_t>(hello.text[i]) ^ key_[i];
  if (differ) return refuse("the key is wrong");
  std::string names = hello.text.substr(key_.size());
  size_t end = names.find('\0');
  if (end == std::string::npos || end == 0) return refuse("the greeting cannot be read");
  Identity peer{names.substr(0, end), hello.a};
  if (names.substr(end + 1) != name_ || hello.b != incarnation_) return refuse("restarted");
  Fd half_fd;
  Map half = make_half(half_fd);
  int half_number = half_fd.get(), socket_number = socket.get();
  Fd control = read_only(control_fd_);
  auto connection = make(hello, std::move(socket), std::move(half_fd), std::move(half), peer);
  add(connection);
  send_note(socket_number, NoteKind::welcome, incarnation_, 0, {}, {half_number, doorbell_fd_.get(), control.get()});
  doorbell_->ring();
}

void Engine::on_connection(int fd) {
  std::shared_ptr<Connection> connection;
  {
    std::lock_guard lock(list_mutex_);
    auto it = by_fd_.find(fd);
    if (it == by_fd_.end()) return;
    connection = it->second;
  }
  if (fd != connection->socket()) return lose(connection, false);  // its pidfd: the process has ended
  try {
    Note note;
    for (;;) {
      Received received = receive_note(fd, note);
      if (received == Received::nothing) return;
      if (received == Received::end) return lose(connection, true);
      on_note(connection, note);
    }
  } catch (const Error&) {  // it sends nonsense: as good as gone
    lose(connection, true);
  }
}

void Engine::on_note(const std::shared_ptr<Connection>& connection, Note& note) {
  switch (note.kind) {
    case NoteKind::want: {
      if (!connection->announce(*arena_, static_cast<uint32_t>(note.a))) connection->note(NoteKind::no_segment, note.a);
      return;
    }
    case NoteKind::segment:
      if (note.fds.size() != 1) throw Error(Fault::corrupt, "a segment came without its descriptor");
      connection->add_segment(static_cast<uint32_t>(note.a), std::move(note.fds[0]));
      return doorbell_->ring();
    case NoteKind::no_segment:
      connection->no_segment(static_cast<uint32_t>(note.a));
      return doorbell_->ring();
    case NoteKind::forget:
      return connection->forget_segment(static_cast<uint32_t>(note.a));
    case NoteKind::ack:
      if (claims_.acknowledged(note.a, connection->serial)) doorbell_->ring();
      return sweep();
    case NoteKind::kick:
      pump(true);
      if (claims_.restless()) sweep();
      return;
    case NoteKind::bye:
      lose(connection, false);
      if (note.a != kNoMoreWrites) connection->finish();  // else what it had offered may still be opened
      return;
    default:
      throw Error(Fault::corrupt, "a note of an unknown kind");
  }
}

}  // namespace tl
