#include "engine.h"

#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>

#include "point.h"

namespace tl {

Engine::Engine(std::string name, std::string path, Key key, uint64_t pool_bytes, const std::string& flight)
    : name_(std::move(name)),
      pid_(::getpid()),
      flight_(std::make_shared<Flight>(name_, flight)),
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
        for (auto& connection : connections_) connection->visit_holds(visit);
      }),
      shm_(std::make_unique<ShmPort>(*this, std::move(path), key)),
      tcp_(std::make_unique<TcpPort>(*this, key)),
      ports_{shm_.get(), tcp_.get()} {
  if (!epoll_ || !wake_fd_ || !event_fd_) throw_errno("cannot make the engine's descriptors");
  points::arm_from_environment();
}

Engine::~Engine() {
  if (forked()) {
    if (thread_.joinable()) thread_.detach();  // it doesn't exist in this process
    return;
  }
  close();
}

void Engine::start(uint64_t incarnation) {
  point("join", "answered");
  incarnation_ = incarnation;
  flight_->start(incarnation);
  watch_fd(wake_fd_.get(), EPOLLIN);
  for (Port* port : ports_) port->start();
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);  // signals are for the threads of the application
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  started_ = true;
}

void Engine::close() {
  if (forked() || closed_.exchange(true)) return;
  nudge();
  if (thread_.joinable()) thread_.join();
  heartbeat_.stop();
  for (Port* port : ports_) port->close();
  std::scoped_lock lock(pump_mutex_, list_mutex_);
  for (auto& connection : connections_) {
    connection->say_goodbye(true);
    connection->set_gone();
    connection->close_streams();
  }
  by_fd_.clear();
  connections_.clear();  // a socket stays open as long as a view of its peer's memory is held
  doorbell_->wake();
  if (watchers_ > 0) signal_event();
  flight_->close();
}

std::vector<std::shared_ptr<Connection>> Engine::connections() {
  std::lock_guard lock(list_mutex_);
  return connections_;
}

std::shared_ptr<Connection> Engine::connection(const std::string& peer) {
  std::lock_guard lock(list_mutex_);
  const int64_t now = now_ns();
  std::shared_ptr<Connection> found;
  for (auto& connection : connections_)
    if (connection->peer.name == peer && connection->up() && (!found || connection->heard(now) >= found->heard(now))) found = connection;
  return found;
}

// What a crash would leave unsaid.
void Engine::beat(int64_t now) {
  constexpr int64_t kListen = 500'000'000;
  flight_->beat(now);
  if (now - last_listened_ < kListen) return;
  last_listened_ = now;
  std::lock_guard lock(list_mutex_);
  for (auto& connection : connections_) connection->heard(now);
}

// The peer is told, and sees us go; views that we hold of its memory stay, and so does the socket under them.
void Engine::disconnect(const std::shared_ptr<Connection>& connection) {
  if (closed()) return;  // close() told it; what we sent is still to be read, so its claims stand for ever
  connection->say_goodbye(false);
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
  for (auto& connection : connections_) connection->want_news(wanted);
}

void Engine::sweep() {
  want_news();  // first, so that a hold that ends after our look is told to us
  std::vector<std::pair<ClaimId, uint64_t>> acked;
  {
    std::lock_guard lock(list_mutex_);
    for (auto& connection : connections_)
      connection->drain_acks([&](ClaimId id) { acked.emplace_back(id, connection->reader()); });
  }
  bool ended = false;
  for (auto [id, reader] : acked) ended |= claims_.acknowledged(id, reader);
  ended |= claims_.sweep(now_ns());
  if (ended && room_waiters_ > 0) doorbell_->ring();  // only then: those who wait for room sweep too, and would wake themselves
}

void Engine::acknowledged(ClaimId id, const Key& key, const Identity& reader, uint64_t token) {
  if (!claims_.knows(id, key)) return;
  if (claims_.acknowledged(id, outbound(reader)->serial, token)) made_room();
}

void Engine::each_published(const std::function<void(const std::string&, const Notice&)>& visit) {
  std::lock_guard lock(board_mutex_);
  for (const BoardSlot& slot : control_->board.slots) {
    Notice notice;
    if (slot.read(notice)) visit(slot.name, notice);
  }
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
  point("version", "stored");
  if (name.size() >= BoardSlot::kName || descriptor.size() > BoardSlot::kDescriptor) return false;
  {
    std::lock_guard lock(board_mutex_);
    BoardSlot* slot = control_->board.claim(name);
    if (!slot) return false;
    slot->write(version, descriptor);
  }
  for (auto& connection : connections()) connection->published(name, {version, descriptor});
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
    if (connections_[i]->polled() && drain(*connections_[i]) && !insist) connections_[i]->attend(false);
  if (any_stream_ && !insist) polled_at_ = now_ns();
  return true;
}

bool Engine::drain(Connection& connection) {
  std::lock_guard lock(connection.intake_mutex);
  bool any = false;
  try {
    auto intake = [&](std::unique_ptr<Message> message) {
      any = true;
      message->source = inbox_.source(connection.peer.name);
      message->incarnation = connection.peer.incarnation;
      message->carrier = connection.shared_from_this();
      message->owes_credit = true;
      connection.counters.messages_received.fetch_add(1, std::memory_order_relaxed);
      connection.counters.bytes_received.fetch_add(message->payload_size, std::memory_order_relaxed);
      return inbox_.deliver(std::move(message));
    };
    connection.receive(std::ref(intake));  // by reference: a poll of an empty connection allocates nothing
  } catch (const Error&) {
    connection.distrust();
  }
  if (any) last_producer_cpu_.store(connection.producer_cpu(), std::memory_order_relaxed);
  if (any && !connection.pid) ring();  // some may be for threads that sleep, and a stream that one thread has emptied wakes nobody
  if (uint64_t now = inbox_.completions(); any && watchers_ > 0 && seen_completions_.exchange(now) != now) signal_event();
  return any;
}

// All that is here already, before the peer counts as gone; the bound is for one that is alive, and goes on.
void Engine::drain_rest(Connection& connection) {
  for (int turns = 64; turns > 0 && drain(connection);) --turns;
}

void Engine::signal_event() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t n = ::write(event_fd_.get(), &one, sizeof one);
}

void Engine::deliver(const std::string& source, uint64_t incarnation, const char* frame, uint64_t n) {
  n = checked_size(frame, n);
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
  std::shared_ptr<Outbound> to = outbound(peer);
  std::string bytes(Connection::frame_size(message), '\0');
  std::lock_guard lock(to->mutex);
  Connection::write_frame(bytes.data(), message, ++to->last);
  return with_checksum(std::move(bytes));
}

bool Engine::owes() {
  for (auto& connection : connections())
    if (!connection->pid && connection->up() && (connection->owes() || claims_.meant_for(connection->reader()))) return true;
  return tcp_->server().lending();
}

bool Engine::undelivered(const Identity& peer) {
  std::lock_guard lock(list_mutex_);
  auto it = outbound_.find({peer.name, peer.incarnation});
  if (it == outbound_.end()) return false;
  {
    std::lock_guard kept(it->second->mutex);
    if (it->second->kept.empty()) return false;
  }
  return std::none_of(connections_.begin(), connections_.end(), [&](auto& c) { return c->up() && c->peer == peer && c->owes(); });
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
  std::lock_guard lock(list_mutex_);
  auto& slot = outbound_[{peer.name, peer.incarnation}];
  if (!slot) slot = std::make_shared<Outbound>(next_serial());
  return slot;
}

void Engine::attend() {
  if (!any_stream_) return;
  std::lock_guard lock(list_mutex_);
  for (auto& connection : connections_) connection->attend(true);
}

void Engine::rewatch_fd(int fd, uint32_t events) {
  epoll_event event{events, {.fd = fd}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Engine::watch_fd(int fd, uint32_t events) {
  epoll_event event{events, {.fd = fd}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
}

void Engine::unwatch_fd(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Engine::ring() { doorbell_->ring(); }

void Engine::add(const std::shared_ptr<Connection>& connection, Port& port, const std::vector<Watched>& fds) {
  std::scoped_lock lock(pump_mutex_, list_mutex_);
  const Identity& peer = connection->peer;
  uint64_t& newest = newest_[peer.name];
  if (peer.incarnation < newest) throw Error(Fault::refused, peer.name + " has restarted since");
  newest = peer.incarnation;
  for (auto& other : connections_)
    if (other->peer.name == peer.name && other->peer.incarnation < peer.incarnation) {
      drain_rest(*other);  // what it had sent completely is still delivered; what it holds stays pinned
      other->set_up(false);
      inbox_.set_down(inbox_.source(peer.name), true);
    }
  connections_.push_back(connection);
  flight_->note({"lane", "", peer.name, peer.incarnation, connection->carrier()}, "up");
  if (auto it = outbound_.find({peer.name, peer.incarnation}); it != outbound_.end()) it->second->down = false;
  inbox_.set_down(inbox_.source(peer.name), false);
  if (&port == tcp_.get()) any_stream_ = true;
  for (const Watched& watched : fds) {
    by_fd_[watched.fd] = {connection, &port};
    watch_fd(watched.fd, watched.events);
  }
}

void Engine::set_peer(const Identity& peer, bool up) {
  flight_->note({"peer", "", peer.name, peer.incarnation}, up ? "up" : "down");
  if (!up) await_rest(peer);
  {
    std::scoped_lock lock(pump_mutex_, list_mutex_);
    set_peer_locked(peer, up);
  }
  if (up) {
    forget_predecessors(peer);
  } else {
    forget_strangers(peer);
    avoid(peer);
  }
  doorbell_->ring();
  if (watchers_ > 0) signal_event();
}

void Engine::lapse() {
  inbox_.lapse();
  doorbell_->ring();
  if (watchers_ > 0) signal_event();
}

// The news that a peer has gone may overtake what it sent, which its host still delivers: it is taken as long as it comes.
void Engine::await_rest(const Identity& peer) {
  constexpr int kPauseMs = 20;
  const int64_t latest = now_ns() + 1'000'000'000;
  for (auto& connection : connections()) {
    if (connection->pid || connection->peer.name != peer.name || connection->peer.incarnation > peer.incarnation) continue;
    pollfd stream{connection->socket(), POLLIN, 0};
    do {
      std::lock_guard lock(pump_mutex_);
      drain_rest(*connection);
    } while (connection->up() && now_ns() < latest && ::poll(&stream, 1, kPauseMs) > 0);
  }
}

// What was meant for a peer on another host that has gone is nobody's any more; one on this host keeps it while it lives.
void Engine::forget_strangers(const Identity& peer) {
  std::vector<uint64_t> ended;
  {
    std::lock_guard lock(list_mutex_);
    for (auto& [whom, outbound] : outbound_) {
      bool near = std::any_of(connections_.begin(), connections_.end(), [&, id = whom](auto& c) { return c->pid && c->peer.name == id.first && c->peer.incarnation == id.second; });
      if (whom.first == peer.name && whom.second <= peer.incarnation && !near) ended.push_back(outbound->serial);
    }
  }
  for (uint64_t reader : ended) claims_.reader_gone(reader);
}

// What was kept for incarnations that will never be back.
void Engine::forget_predecessors(const Identity& peer) {
  std::lock_guard lock(list_mutex_);
  auto used = [&](const std::shared_ptr<Outbound>& outbound) {
    return std::any_of(connections_.begin(), connections_.end(), [&](auto& c) { return c->reader() == outbound->serial; });
  };
  auto it = outbound_.lower_bound({peer.name, 0});
  while (it != outbound_.end() && it->first < std::pair(peer.name, peer.incarnation)) it = used(it->second) ? std::next(it) : outbound_.erase(it);
}

void Engine::set_peer_locked(const Identity& peer, bool up) {
  SourceId source = inbox_.source(peer.name);
  for (auto& connection : connections_) {
    if (connection->peer.name != peer.name || connection->peer.incarnation > peer.incarnation) continue;
    drain_rest(*connection);
    connection->set_up(up && connection->peer.incarnation == peer.incarnation);
  }
  for (auto& [whom, outbound] : outbound_)
    if (whom.first == peer.name && whom.second <= peer.incarnation) outbound->down = !(up && whom.second == peer.incarnation);
  uint64_t& newest = newest_[peer.name];
  if (peer.incarnation >= newest) {
    if (newest && peer.incarnation > newest) inbox_.set_down(source, true);  // who waits for the old one learns of its end
    newest = peer.incarnation;
    inbox_.set_down(source, !up);
  }
}

// Whether another connection to that very process works.
bool Engine::reachable(const Identity& peer) {
  return std::any_of(connections_.begin(), connections_.end(), [&](auto& other) {
    return other->up() && other->peer.name == peer.name && other->peer.incarnation == peer.incarnation;
  });
}

void Engine::lose(const std::shared_ptr<Connection>& connection, bool gone) {
  flight_->note({"lane", "", connection->peer.name, connection->peer.incarnation, connection->carrier()}, gone ? "gone" : "ended");
  bool last;
  {
    std::scoped_lock lock(pump_mutex_, list_mutex_);
    drain_rest(*connection);
    connection->set_over();
    for (auto it = by_fd_.begin(); it != by_fd_.end();) {
      bool ended = it->second.connection == connection && (gone || it->first != connection->socket());
      if (ended) unwatch_fd(it->first);
      it = ended ? by_fd_.erase(it) : std::next(it);
    }
    if (gone) {
      connection->set_gone();
      connections_.erase(std::remove(connections_.begin(), connections_.end(), connection), connections_.end());
    }
    const Identity& peer = connection->peer;
    last = !reachable(peer);
    if (last && newest_[peer.name] == peer.incarnation) inbox_.set_down(inbox_.source(peer.name), true);
  }
  if (last) claims_.reader_gone(connection->reader());
  sweep();
  doorbell_->ring();
  if (watchers_ > 0) signal_event();
}

void Engine::lose_lane(const std::shared_ptr<TcpConnection>& connection) {
  if (connection->ended()) {
    if (connection->peer_closed()) outbound(connection->peer)->down = true;
    return lose(connection, true);
  }
  flight_->note({"lane", "", connection->peer.name, connection->peer.incarnation, connection->carrier()}, "broke", !closed());
  {
    std::scoped_lock lock(pump_mutex_, list_mutex_);
    drain_rest(*connection);
    connection->set_over();
    by_fd_.erase(connection->socket());
    unwatch_fd(connection->socket());
    connections_.erase(std::remove(connections_.begin(), connections_.end(), connection), connections_.end());
    if (!closed()) suspects_.push_back({connection->peer, connection->reads().contact().at});
  }
  connection->distrust();  // the peer must learn of it, and not when the last message that came this way is taken
  doorbell_->ring();
}

std::vector<Engine::Suspect> Engine::take_suspects() {
  std::lock_guard lock(list_mutex_);
  return std::exchange(suspects_, {});
}

}  // namespace tl
