#include "engine.h"

#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>

namespace tl {

Engine::Engine(std::string name, std::string path, Key key, uint64_t pool_bytes)
    : name_(std::move(name)),
      path_(std::move(path)),
      key_(key),
      pid_(::getpid()),
      arena_(std::make_shared<Arena>(pool_bytes)),
      control_fd_(make_memfd("tensorlink-control", round_up(sizeof(Control), kPage))),
      doorbell_fd_(make_memfd("tensorlink-doorbell", kPage)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      event_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      control_map_(control_fd_.get(), round_up(sizeof(Control), kPage), PROT_READ | PROT_WRITE, MAP_SHARED),
      doorbell_map_(doorbell_fd_.get(), kPage, PROT_READ | PROT_WRITE, MAP_SHARED),
      control_(reinterpret_cast<Control*>(control_map_.data())),
      doorbell_(reinterpret_cast<Doorbell*>(doorbell_map_.data())),
      claims_(control_->generations, [this](const Claims::Visit& visit) {
        std::lock_guard lock(list_mutex_);
        for (auto& connection : connections_) connection->holds_of_peer().scan(visit);
      }) {
  sockaddr_un address = unix_address(path_);
  listener_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_ || !epoll_ || !wake_fd_ || !event_fd_) throw_errno("cannot make the engine's sockets");
  if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) throw_errno("cannot bind " + path_);
  if (::listen(listener_.get(), 512) != 0) throw_errno("cannot listen on " + path_);
}

Engine::~Engine() {
  if (forked()) {
    if (thread_.joinable()) thread_.detach();  // it doesn't exist in this process
    return;
  }
  close();
}

void Engine::start(uint64_t incarnation) {
  incarnation_ = incarnation;
  for (int fd : {listener_.get(), wake_fd_.get()}) {
    epoll_event event{EPOLLIN, {.fd = fd}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);  // signals are for the threads of the application
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  started_ = true;
}

void Engine::close() {
  if (forked() || closed_.exchange(true)) return;
  ::unlink(path_.c_str());
  nudge();
  if (thread_.joinable()) thread_.join();
  heartbeat_.stop();
  listener_.reset();
  pending_.clear();
  std::scoped_lock lock(pump_mutex_, list_mutex_);
  for (auto& connection : connections_) {
    connection->note(NoteKind::bye, kNoMoreWrites);
    connection->set_gone();
  }
  by_fd_.clear();
  connections_.clear();  // a socket stays open as long as a view of its peer's memory is held
  doorbell_->wake();
  if (watchers_ > 0) signal_event();
}

std::vector<std::shared_ptr<Connection>> Engine::connections() {
  std::lock_guard lock(list_mutex_);
  return connections_;
}

// The peer is told, and sees us go; views that we hold of its memory stay, and so does the socket under them.
void Engine::disconnect(const std::shared_ptr<Connection>& connection) {
  if (closed()) return;  // close() told it; what we sent is still to be read, so its claims stand for ever
  connection->note(NoteKind::bye);
  lose(connection, false);
  connection->finish();
}

// ----- memory

ClaimId Engine::claim(Claim claim) {
  ClaimId id = claims_.add(std::move(claim));
  if (!id) throw Error(Fault::no_room, "this process has " + std::to_string(kSlots) + " handles, the most it can");
  return id;
}

bool Engine::release(ClaimId id) {
  bool stood = claims_.end(id);
  if (claims_.any_parked()) sweep();
  if (stood && room_waiters_ > 0) doorbell_->ring();
  return stood;
}

void Engine::want_news() {
  bool wanted = room_waiters_ > 0 || claims_.any_parked();
  std::lock_guard lock(list_mutex_);
  for (auto& connection : connections_) connection->holds_of_peer().want_news(wanted);
}

void Engine::sweep() {
  want_news();  // first, so that a hold that ends after our look is told to us
  std::vector<std::pair<ClaimId, uint64_t>> acked;
  {
    std::lock_guard lock(list_mutex_);
    for (auto& connection : connections_)
      connection->holds_of_peer().drain_acks([&](ClaimId id) { acked.emplace_back(id, connection->serial); });
  }
  bool ended = false;
  for (auto [id, reader] : acked) ended |= claims_.acknowledged(id, reader);
  ended |= claims_.sweep(now_ns());
  if (ended && room_waiters_ > 0) doorbell_->ring();  // only then: those who wait for room sweep too, and would wake themselves
}

Engine::RoomWaiter::RoomWaiter(Engine& engine) : engine(engine) {
  ++engine.room_waiters_;
  engine.want_news();
}
Engine::RoomWaiter::~RoomWaiter() {
  --engine.room_waiters_;
  engine.want_news();
}

bool Engine::publish(const std::string& name, uint64_t version, const std::string& descriptor) {
  if (name.size() >= BoardSlot::kName || descriptor.size() > BoardSlot::kDescriptor) return false;
  {
    std::lock_guard lock(board_mutex_);
    BoardSlot* slot = control_->board.claim(name);
    if (!slot) return false;
    slot->write(version, descriptor);
  }
  for (auto& connection : connections()) connection->ring_peer();
  return true;
}

bool Engine::published(const std::string& name, Notice& notice) {
  std::lock_guard lock(board_mutex_);
  const BoardSlot* slot = control_->board.find(name);
  return slot && slot->read(notice);
}

// ----- messages

bool Engine::pump(bool insist) {
  std::unique_lock lock(pump_mutex_, std::defer_lock);
  if (insist) {
    lock.lock();
  } else if (!lock.try_lock()) {
    return false;
  }
  for (size_t i = 0; i < connections_.size(); ++i)
    if (connections_[i]->has_frames()) drain(*connections_[i]);
  return true;
}

void Engine::drain(Connection& connection) {
  SourceId source = inbox_.source(connection.peer.name);
  try {
    uint64_t n;
    // At most what the ring can hold: a peer that writes as fast as we read must not keep us from the others.
    for (uint64_t left = Half::kRing; left > 0; left -= std::min(left, Ring::padded(n))) {
      const char* frame = connection.front(n);
      if (!frame) break;
      connection.account(n);
      auto message = Message::parse(frame, n);
      message->source = source;
      message->incarnation = connection.peer.incarnation;
      message->carrier = connection.shared_from_this();
      message->rode_ring = true;
      connection.counters.messages_received.fetch_add(1, std::memory_order_relaxed);
      connection.counters.bytes_received.fetch_add(message->payload_size, std::memory_order_relaxed);
      if (!inbox_.deliver(std::move(message))) connection.credit(n);  // it came before: nobody will consume it
      connection.pop(n);
    }
  } catch (const Error&) {
    connection.distrust();
  }
  last_producer_cpu_.store(connection.producer_cpu(), std::memory_order_relaxed);
  if (watchers_ > 0 && inbox_.completions() != seen_completions_) {
    seen_completions_ = inbox_.completions();
    signal_event();
  }
}

void Engine::signal_event() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t n = ::write(event_fd_.get(), &one, sizeof one);
}

void Engine::deliver(const std::string& source, uint64_t incarnation, const char* frame, uint64_t n) {
  auto message = Message::parse(frame, n);
  message->source = inbox_.source(source);
  message->incarnation = incarnation;
  {
    std::lock_guard lock(list_mutex_);  // what it offers can then be mapped even if the sender goes before it is looked at
    for (auto& connection : connections_)
      if (connection->peer.name == source && connection->peer.incarnation == incarnation) message->carrier = connection;
  }
  inbox_.deliver(std::move(message));
  if (watchers_ > 0) signal_event();
  doorbell_->ring();
}

std::string Engine::frame(const Identity& peer, const Connection::Outgoing& message) {
  std::shared_ptr<Outbound> to;
  {
    std::lock_guard lock(list_mutex_);
    to = outbound(peer);
  }
  std::string bytes(Connection::frame_size(message), '\0');
  std::lock_guard lock(to->mutex);
  Connection::write_frame(bytes.data(), message, ++to->last);
  return bytes;
}

void Engine::nudge() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t n = ::write(wake_fd_.get(), &one, sizeof one);
}

void Engine::watch(bool on) {
  watchers_ += on ? 1 : -1;
  doorbell_->watched.store(watchers_ > 0, std::memory_order_seq_cst);
  if (on) pump(true);
}

bool Engine::shares_cpu() { return last_producer_cpu_.load(std::memory_order_relaxed) == ::sched_getcpu(); }

// ----- connections

std::shared_ptr<Outbound> Engine::outbound(const Identity& peer) {
  auto& slot = outbound_[{peer.name, peer.incarnation}];
  if (!slot) slot = std::make_shared<Outbound>();
  return slot;
}

// A connection from what its peer sent and what we made; throws Fault::corrupt when the descriptors aren't what they should be.
std::shared_ptr<Connection> Engine::make(Note& note, Fd socket, Fd half_fd, Map half, Identity peer) {
  if (note.fds.size() != 3) throw Error(Fault::corrupt, "a peer sent the wrong number of descriptors");
  auto map = [&](int i, uint64_t nbytes, int protection) {
    if (sealed_size(note.fds[i].get()) != round_up(nbytes, kPage)) throw Error(Fault::corrupt, "a peer sent shared memory of a wrong size");
    return Map(note.fds[i].get(), round_up(nbytes, kPage), protection, MAP_SHARED);
  };
  Connection::Parts parts;
  parts.their_half = map(0, sizeof(Half), PROT_READ | PROT_WRITE);
  parts.their_doorbell = map(1, sizeof(Doorbell), PROT_READ | PROT_WRITE);
  parts.their_control = map(2, sizeof(Control), PROT_READ);
  parts.my_half = std::move(half);
  parts.my_half_fd = std::move(half_fd);
  ucred credentials{};
  socklen_t size = sizeof credentials;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size);
  parts.socket = std::move(socket);
  std::lock_guard lock(list_mutex_);
  return std::make_shared<Connection>(++serials_, peer, credentials.pid, std::move(parts), outbound(peer));
}

void Engine::add(const std::shared_ptr<Connection>& connection) {
  std::scoped_lock lock(pump_mutex_, list_mutex_);
  const Identity& peer = connection->peer;
  uint64_t& newest = newest_[peer.name];
  if (peer.incarnation < newest) throw Error(Fault::refused, peer.name + " has restarted since");
  newest = peer.incarnation;
  for (auto& other : connections_)
    if (other->peer.name == peer.name && other->peer.incarnation < peer.incarnation) {
      drain(*other);  // what it had sent completely is still delivered; what it holds stays pinned
      other->set_up(false);
      inbox_.set_down(inbox_.source(peer.name), true);
    }
  connections_.push_back(connection);
  by_fd_[connection->socket()] = connection;
  inbox_.set_down(inbox_.source(peer.name), false);
  epoll_event event{EPOLLIN | EPOLLRDHUP, {.fd = connection->socket()}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection->socket(), &event);
  Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, connection->pid, 0)));
  if (pidfd) {  // a forked child may keep the socket open, so its end alone would not tell of the death
    event.data.fd = pidfd.get();
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, pidfd.get(), &event);
    connection->keep_pidfd(std::move(pidfd));
    by_fd_[event.data.fd] = connection;
  }
}

void Engine::set_peer(const Identity& peer, bool up) {
  std::scoped_lock lock(pump_mutex_, list_mutex_);
  SourceId source = inbox_.source(peer.name);
  for (auto& connection : connections_) {
    if (connection->peer.name != peer.name || connection->peer.incarnation > peer.incarnation) continue;
    drain(*connection);
    connection->set_up(up && connection->peer.incarnation == peer.incarnation && !connection->gone());
  }
  uint64_t& newest = newest_[peer.name];
  if (peer.incarnation >= newest) {
    if (newest && peer.incarnation > newest) inbox_.set_down(source, true);  // who waits for the old one learns of its end
    newest = peer.incarnation;
    inbox_.set_down(source, !up);
  }
  doorbell_->ring();
  if (watchers_ > 0) signal_event();
}

// Whether another connection to that very process works.
bool Engine::reachable(const Identity& peer) {
  return std::any_of(connections_.begin(), connections_.end(), [&](auto& other) {
    return other->up() && other->peer.name == peer.name && other->peer.incarnation == peer.incarnation;
  });
}

// The peer's process has ended (`gone`: and nobody can use its mappings any more), or it said goodbye.
void Engine::lose(const std::shared_ptr<Connection>& connection, bool gone) {
  {
    std::scoped_lock lock(pump_mutex_, list_mutex_);
    drain(*connection);
    connection->set_up(false);
    if (int pidfd = connection->pidfd(); pidfd >= 0 && by_fd_.erase(pidfd)) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, pidfd, nullptr);
    if (gone) {
      connection->set_gone();
      if (by_fd_.erase(connection->socket())) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection->socket(), nullptr);
      connections_.erase(std::remove(connections_.begin(), connections_.end(), connection), connections_.end());
    }
    const Identity& peer = connection->peer;
    if (newest_[peer.name] == peer.incarnation && !reachable(peer)) inbox_.set_down(inbox_.source(peer.name), true);
  }
  claims_.reader_gone(connection->serial);
  sweep();
  doorbell_->ring();
  if (watchers_ > 0) signal_event();
}

Map Engine::make_half(Fd& fd) {
  uint64_t nbytes = round_up(sizeof(Half), kPage);
  fd = make_memfd("tensorlink-half", nbytes);
  return Map(fd.get(), nbytes, PROT_READ | PROT_WRITE, MAP_SHARED);
}

std::shared_ptr<Connection> Engine::connect(const std::string& path, Key key, const Identity& peer, int64_t deadline_ns) {
  sockaddr_un address = unix_address(path);
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_errno("cannot make a socket");
  while (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    if (errno != EAGAIN && errno != EINTR) throw Error(Fault::lost, "cannot connect to " + peer.name + ": " + std::strerror(errno), errno);
    if (now_ns() > deadline_ns) throw Error(Fault::timeout, peer.name + " accepts no connection");
    ::poll(nullptr, 0, 1);  // its queue of connections is full
  }
  Fd half_fd;
  Map half = make_half(half_fd);
  std::string text(reinterpret_cast<const char*>(key.data()), key.size());
  text += name_ + '\0' + peer.name;
  Fd control = read_only(control_fd_);
  if (!send_note(socket.get(), NoteKind::hello, incarnation_, peer.incarnation, text, {half_fd.get(), doorbell_fd_.get(), control.get()}))
    throw Error(Fault::lost, peer.name + " closed the connection");
  Note answer;
  for (;;) {
    Received received = receive_note(socket.get(), answer);
    if (received == Received::note) break;
    if (received == Received::end) throw Error(Fault::lost, peer.name + " closed the connection");
    int64_t left = deadline_ns - now_ns();
    if (left <= 0) throw Error(Fault::timeout, peer.name + " does not answer");
    pollfd poll{socket.get(), POLLIN, 0};
    if (::poll(&poll, 1, static_cast<int>(std::min<int64_t>(left / 1'000'000 + 1, 1000))) < 0 && errno == EINTR)
      throw Error(Fault::interrupted, "interrupted");
  }
  if (answer.kind != NoteKind::welcome) throw Error(Fault::refused, answer.text);
  auto connection = make(answer, std::move(socket), std::move(half_fd), std::move(half), peer);
  add(connection);
  return connection;
}

}  // namespace tl
