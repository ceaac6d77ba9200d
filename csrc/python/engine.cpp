#include "engine.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/pair.h>
#include <nanobind/ndarray.h>

#include "descriptor.h"
#include "point.h"
#include "python/bind.h"
#include "python/codec.h"
#include "python/gil.h"
#include "python/waited.h"
#include "python/store.h"
#include "python/views.h"
#include "python/wait.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tl::python {

namespace {

std::string_view text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
nb::bytes to_bytes(std::string_view s) { return nb::bytes(s.data(), s.size()); }

Key to_key(const nb::bytes& bytes) {
  Key key{};
  if (bytes.size() != key.size()) throw nb::value_error("a key is 16 bytes");
  std::memcpy(key.data(), bytes.c_str(), key.size());
  return key;
}

const char* error_name(Fault fault) {
  switch (fault) {
    case Fault::closed: return "ClosedError";
    case Fault::lost: return "PeerLostError";
    case Fault::stale: return "StaleRefError";
    case Fault::timeout: return "TransferTimeoutError";
    case Fault::cancelled: return "TransferCancelledError";
    case Fault::no_room: return "PoolExhaustedError";
    case Fault::corrupt: return "CorruptTransferError";
    case Fault::refused: return "AuthenticationError";
    case Fault::interrupted: return "TransferCancelledError";
    case Fault::transport: break;
  }
  return "TransportError";
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    nb::object type = nb::module_::import_("tensorlink.errors").attr(error_name(error.fault));
    nb::object value = type(error.what());
    if (error.fault == Fault::timeout) value.attr("waited") = waited();
    if (error.fault == Fault::transport) value.attr("code") = error.code;
    PyErr_SetObject(type.ptr(), value.ptr());
  }
}

// ----- messages

// Null: the message's object lies in the sender's pool; `descriptor` says where.
nb::object unpack_message(const Message& message, nb::handle like) {
  Extent extent{message.payload(), message.payload_size};
  Memory memory{&extent, 1, nullptr};
  std::string_view meta = message.meta();
  return nb::steal(unpack(meta.data(), meta.size(), memory, nullptr, Mode::copy, like.ptr()));
}

nb::object fill_message(const Message& message, nb::handle out, Stop* stop, double timeout_s) {
  Extent extent{message.payload(), message.payload_size};
  return nb::steal(fill_from(message.meta(), &extent, 1, out.ptr(), {stop, timeout_s}));
}

// A receive, with what is known of the connection to the peer.
Doing receiving(Engine& engine, SourceId source, std::string_view tag) {
  Doing doing{"recv", "message", source == kAnySource ? std::string() : engine.inbox().name(source), 0, "", std::string(tag)};
  auto connection = engine.connection(doing.peer);
  if (!connection) return doing;
  doing.incarnation = connection->peer.incarnation;
  doing.transport = connection->carrier();
  doing.news_ns = connection->heard(now_ns());
  return doing;
}

struct NoMessage {
  bool lost, lapsed;
};

struct Received {
  std::unique_ptr<Message> message;
  bool lost = false;    // the source that was named is down
  bool lapsed = false;  // or it may have taken us for lost
};

// The next message, or why there is none: timed out (both empty) or lost.
Received receive(Engine& engine, SourceId source, std::string_view tag, double timeout_s) {
  Received result;
  Inbox& inbox = engine.inbox();
  const uint64_t downs = inbox.downs(source), lapses = inbox.lapses();
  auto ready = [&] {
    result.message = inbox.take(source, tag);
    if (result.message || source == kAnySource) return result.message != nullptr;
    result.lost = inbox.is_down(source) || inbox.downs(source) != downs;
    result.lapsed = inbox.lapses() != lapses;
    return result.lost || result.lapsed;
  };
  wait_for(engine, ready, deadline_of(timeout_s), [&] { return receiving(engine, source, tag); });
  return result;
}

// One call for the whole of a receive, since each crossing from Python costs as much as the ring: gives the object itself if it
// came in its message and nothing is wrong. Else the caller gets the message, and finds the same error with time to treat it.
nb::object receive_object(Engine& engine, SourceId source, nb::str tag, double timeout_s, nb::handle out, nb::handle like) {
  Py_ssize_t size;
  const char* data = PyUnicode_AsUTF8AndSize(tag.ptr(), &size);
  if (!data) throw nb::python_error();
  Received received = receive(engine, source, {data, static_cast<size_t>(size)}, timeout_s);
  if (!received.message) return nb::cast(NoMessage{received.lost, received.lapsed});
  const Message& message = *received.message;
  if (message.descriptor_size == 0) {
    try {
      nb::object object = out.is_none() ? unpack_message(message, like) : fill_message(message, out, nullptr, timeout_s);
      if (message.carrier) message.carrier->credit(message.size);
      return object;
    } catch (const std::exception&) {  // python_error among them
    }
  }
  return nb::cast(std::move(received.message));
}

void bind_messages(nb::module_& module) {
  nb::class_<Message>(module, "Message", "A message that was taken from the inbox.")
      .def_prop_ro("source", [](const Message& m) { return m.source; })
      .def_prop_ro("incarnation", [](const Message& m) { return m.incarnation; })
      .def_prop_ro("descriptor", [](const Message& m) { return to_bytes(m.descriptor()); })
      .def_prop_ro("meta", [](const Message& m) { return to_bytes(m.meta()); })
      .def_prop_ro("offered", [](const Message& m) { return m.descriptor_size != 0; }, "The object lies in the sender's pool.")
      .def_prop_ro("connection", [](const Message& m) { return m.carrier; }, "The connection to its sender, or None.")
      .def("unpack", unpack_message,
           nb::sig("def unpack(self, like: object | None) -> typing.Any"), "like"_a.none())
      .def("fill", fill_message,
           nb::sig("def fill(self, out: object, stop: Stop | None, timeout_s: float) -> typing.Any"), "out"_a, "stop"_a.none(), "timeout_s"_a)
      .def("consumed", [](const Message& m) {
        if (m.owes_credit) m.carrier->credit(m.size);
      }, "Gives the sender its credit back. Call once, when the application has the object.");
  nb::class_<NoMessage>(module, "NoMessage", "Why a receive ended without one.")
      .def_ro("lost", &NoMessage::lost, "The source that was named is down.")
      .def_ro("lapsed", &NoMessage::lapsed, "A source was named, and others took this process for lost. Neither: the time was over.");
  nb::class_<Posted>(module, "Posted", "A receive that was posted before its message came.")
      .def_prop_ro("lost", [](const Posted& p) { return p.lost; })
      .def_prop_ro("lapsed", [](const Posted& p) { return p.lapsed; });
}

// ----- connections

struct Sending {  // the payload of one frame, as copy_payload wants it
  static void copy(const void* packed, char* to) { copy_payload(*static_cast<const Packed*>(packed), to); }
};

Connection::Outgoing outgoing(const Packed& packed, std::string_view tag) {
  return {tag, packed.meta, {}, packed.nbytes, Sending::copy, &packed};
}

// None: sent. Else what is left to do with the object: it is too large for a frame, or there is no room or credit now.
nb::object send_object(Connection& connection, nb::handle object, nb::str tag) {
  Py_ssize_t size;
  const char* data = PyUnicode_AsUTF8AndSize(tag.ptr(), &size);
  if (!data) throw nb::python_error();
  auto packed = pack(object.ptr());
  auto message = outgoing(*packed, {data, static_cast<size_t>(size)});
  if (Connection::frame_size(message) <= kEagerLimit && connection.try_send(message)) return nb::none();
  return nb::cast(std::move(packed));
}

// False: the receiver did not take what came before in time.
bool send_when_taken(Engine& engine, Connection& connection, const Connection::Outgoing& message, double timeout_s) {
  auto describe = [&] {
    return Doing{"send", "credit", connection.peer.name, connection.peer.incarnation, connection.carrier(), std::string(message.tag), 0, connection.heard(now_ns())};
  };
  return wait_for(engine, [&] { return connection.try_send(message); }, deadline_of(timeout_s), describe);
}

bool send_packed(Engine& engine, Connection& connection, const Packed& packed, const std::string& tag, double timeout_s) {
  return send_when_taken(engine, connection, outgoing(packed, tag), timeout_s);
}

void announce(Engine& engine, Connection& connection, nb::bytes descriptor) {
  for (const tl::Extent& extent : Descriptor::decode(text(descriptor)).extents) connection.announce(*engine.arena(), extent.segment);
}

bool send_offer(Engine& engine, Connection& connection, nb::bytes descriptor, nb::bytes meta, const std::string& tag, double timeout_s) {
  announce(engine, connection, descriptor);
  Connection::Outgoing message{tag, text(meta), text(descriptor)};
  return send_when_taken(engine, connection, message, timeout_s);
}

nb::object read_board(const Connection& connection, const std::string& name) {
  Notice notice;
  if (!connection.notice(name, notice)) return nb::none();
  return nb::make_tuple(notice.version, to_bytes(notice.descriptor));
}

// Until the board shows at least that version, or the connection ends.
bool wait_board(Engine& engine, Connection& connection, const std::string& name, uint64_t version, double timeout_s) {
  Notice notice;
  auto ready = [&] { return (connection.notice(name, notice) && notice.version >= version) || !connection.up(); };
  auto describe = [&] { return Doing{"pull", "version", connection.peer.name, connection.peer.incarnation, connection.carrier(), name}; };
  return wait_for(engine, ready, deadline_of(timeout_s), describe);
}

nb::dict counters(const Connection& connection) {
  const Counters& c = connection.counters;
  nb::dict result;
  result["messages_sent"] = c.messages_sent.load();
  result["messages_received"] = c.messages_received.load();
  result["bytes_sent"] = c.bytes_sent.load();
  result["bytes_received"] = c.bytes_received.load();
  result["bytes_read"] = c.bytes_read.load();
  result["retries"] = c.retries.load();
  return result;
}

void bind_connections(nb::module_& module) {
  nb::class_<Connection>(module, "Connection", "A connection to one incarnation of a peer.")
      .def_prop_ro("peer_name", [](const Connection& c) { return c.peer.name; })
      .def_prop_ro("peer_incarnation", [](const Connection& c) { return c.peer.incarnation; })
      .def_prop_ro("pid", [](const Connection& c) { return c.pid; })
      .def_prop_ro("reader", [](const Connection& c) { return c.reader(); })
      .def_prop_ro("serial", [](const Connection& c) { return c.serial; })
      .def_prop_ro("up", [](const Connection& c) { return c.up(); })
      .def_prop_ro("owes", [](const Connection& c) { return c.owes(); }, "Whether messages wait for an acknowledgement.")
      .def_prop_ro("gone", [](const Connection& c) { return c.gone(); })
      .def_prop_ro("holds", [](Connection& c) { return c.holds_count(); }, "Holds of this process on the peer's memory.")
      .def("send", send_object,
           nb::sig("def send(self, object: object | None, tag: str) -> Packed | None"), "object"_a.none(), "tag"_a, "None: sent. Else the packed object: too large, or no room now.")
      .def("read_board", read_board,
           nb::sig("def read_board(self, name: str) -> tuple[int, bytes] | None"), "name"_a, "(version, descriptor) of the newest notice, or None.")
      .def("counters", counters, nb::sig("def counters(self) -> dict[str, int]"));
}

void bind_views(nb::module_& module) {
  nb::class_<Stop>(module, "Stop", "Stops an operation from another thread.")
      .def(nb::init<>())
      .def("set", &Stop::set)
      .def("is_set", [](const Stop& s) { return s.flag.load(); });
  nb::class_<View>(module, "View", "An object in a peer's pool, opened here: mapped, or brought over when it is looked at.")
      .def_prop_ro("nbytes", &View::nbytes)
      .def("pass_on", &View::pass_on, "Call it before the view is looked at: while it lives, other hosts may read from here what was read. False: they need not.")
      .def("addresses", [](View& v) {
        nb::list result;
        for (const Extent& e : v.payload({})) result.append(nb::make_tuple(reinterpret_cast<uintptr_t>(e.data), e.nbytes));
        return result;
      }, nb::sig("def addresses(self) -> list[tuple[int, int]]"))
      .def("copy_to", [](View& v, uintptr_t address, Stop* stop) { v.copy_to(address, {stop, -1}); },
           "address"_a, "stop"_a.none(), "Copies the payload's spans, one after the other.")
      .def("unpack", [](View& v, nb::bytes meta, nb::handle like, bool copy, Stop* stop, double timeout_s) {
        return nb::steal(v.unpack(text(meta), like.ptr(), copy, {stop, timeout_s}));
      }, nb::sig("def unpack(self, meta: bytes, like: object | None, copy: bool = False, stop: Stop | None = None, timeout_s: float = -1) -> typing.Any"),
           "meta"_a, "like"_a.none(), "copy"_a = false, "stop"_a = nb::none(), "timeout_s"_a = -1.0)
      .def("fill", [](View& v, nb::bytes meta, nb::handle out, Stop* stop, double timeout_s) {
        return nb::steal(v.fill(text(meta), out.ptr(), {stop, timeout_s}));
      }, nb::sig("def fill(self, meta: bytes, out: object, stop: Stop | None, timeout_s: float) -> typing.Any"), "meta"_a, "out"_a, "stop"_a.none(), "timeout_s"_a);
  nb::class_<Refill>(module, "Refill", "An object that is filled again and again. Raises: TypeError, LayoutMismatchError.")
      .def(nb::init<nb::object>(), "target"_a)
      .def("prepare", [](Refill& r, View& v, Stop* stop, double timeout_s) { r.prepare(v.meta({}, {stop, timeout_s})); },
           "view"_a, "stop"_a.none(), "timeout_s"_a,
           "Compares, and writes nothing. The view's meta is in the pool. Raises: LayoutMismatchError.")
      .def("run", [](Refill& r, View& v, bool through, Stop* stop, double timeout_s) { v.refill(r, through, {stop, timeout_s}); },
           "view"_a, "through"_a, "stop"_a.none(), "timeout_s"_a,
           "Fills. Unless it goes straight `through`, all is here before the first byte is written, and then all is.");
}

// ----- the engine

nb::dict usage(Engine& engine) {
  engine.sweep();
  nb::dict pool, holders;
  Arena& arena = *engine.arena();
  Claims& claims = engine.claims();
  pool["budget_bytes"] = arena.budget();
  pool["used_bytes"] = arena.used();
  pool["committed_bytes"] = arena.committed();
  pool["blocks"] = arena.blocks();
  pool["handles"] = claims.standing_count();
  pool["handle_bytes"] = claims.standing_bytes();
  pool["parked_bytes"] = claims.parked_bytes();
  for (auto& connection : engine.connections()) {
    uint64_t count = 0, nbytes = 0;
    std::vector<ClaimId> ids;
    connection->visit_holds([&](ClaimId id) { ids.push_back(id); });
    for (ClaimId id : ids) ++count, nbytes += claims.nbytes(id);
    if (count) holders[connection->peer.name.c_str()] = nb::make_tuple(count, nbytes, connection->pid);
  }
  for (auto& [name, who] : engine.tcp().server().borrowers()) holders[name.c_str()] = nb::make_tuple(who.first, who.second, 0);
  pool["holders"] = holders;
  return pool;
}

nb::object empty_array(Engine& engine, uint64_t nbytes, double timeout_s) {
  auto block = allocate(engine, nbytes, timeout_s, "empty");
  if (!block) return nb::none();
  {
    Released released;
    engine.arena()->warm(*block);
  }
  size_t shape = nbytes;
  auto* owner = new std::shared_ptr<Block>(block);
  nb::capsule keep(owner, [](void* held) noexcept { delete static_cast<std::shared_ptr<Block>*>(held); });
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(block->data(), 1, &shape, keep), nb::rv_policy::reference);
}

void bind_stored(nb::module_& module) {
  nb::class_<Stored>(module, "Stored", "An object in the pool, under a claim that is its user's to release.")
      .def_prop_ro("claim", &Stored::claim)
      .def_prop_ro("descriptor", [](const Stored& s) { return to_bytes(s.descriptor()); })
      .def_prop_ro("meta", [](const Stored& s) { return to_bytes(s.meta()); }, "Empty: it is in the pool, too.")
      .def("fill", &Stored::fill, nb::call_guard<Released>(), "Copies what isn't there yet. Readers may have begun.");
}

int heartbeat_state(Engine& engine) { return static_cast<int>(engine.heartbeat().state()); }

template <class Class>
void bind_memory(Class& engine) {
  engine.def("store", store, nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>(),
           nb::sig("def store(self, packed: Packed, reads: int, ttl_s: float, reader: int, inline_meta: int, timeout_s: float, checksum: bool = False, later: bool = False) -> Stored | None"), "packed"_a, "reads"_a, "ttl_s"_a, "reader"_a, "inline_meta"_a, "timeout_s"_a, "checksum"_a = false, "later"_a = false,
             "Copies an object into the pool. None: no room before the deadline. `later`: it may be copied by fill().")
      .def("claim_in_place", claim_in_place, nb::keep_alive<0, 1>(),
           nb::sig("def claim_in_place(self, packed: Packed, reads: int, ttl_s: float, checksum: bool = False) -> Stored | None"), "packed"_a, "reads"_a, "ttl_s"_a, "checksum"_a = false,
           "As store() without a copy, for tensors that already lie in the pool. None: some lie elsewhere.")
      .def("release", [](Engine& e, uint64_t claim) { return e.release(claim); }, "claim"_a, nb::call_guard<Released>())
      .def("expose", expose,
           nb::sig("def expose(self, address: int, nbytes: int) -> bytes | None"), "address"_a, "nbytes"_a, "Descriptor of memory, copied into the pool unless it lies there; None: no room.")
      .def("empty", empty_array,
           nb::sig("def empty(self, nbytes: int, timeout_s: float) -> typing.Any"), "nbytes"_a, "timeout_s"_a, "Writable bytes in the pool, or None: no room before the deadline.")
      .def("publish", [](Engine& e, const std::string& name, uint64_t version, nb::bytes descriptor) {
        return e.publish(name, version, std::string(text(descriptor)));
      }, "name"_a, "version"_a, "descriptor"_a)
      .def("published", [](Engine& e, const std::string& name) -> nb::object {
        Notice notice;
        if (!e.published(name, notice)) return nb::none();
        return nb::make_tuple(notice.version, to_bytes(notice.descriptor));
      }, nb::sig("def published(self, name: str) -> tuple[int, bytes] | None"), "name"_a,
         "What this process published last under a name: (version, descriptor), or None.")
      .def("open", [](Engine& e, std::shared_ptr<Connection> c, nb::bytes d, double timeout_s) {
        return View::open(e, c, text(d), timeout_s);
      }, "connection"_a, "descriptor"_a, "timeout_s"_a, nb::keep_alive<0, 1>())
      .def("sweep", &Engine::sweep, nb::call_guard<Released>())
      .def("usage", usage, nb::sig("def usage(self) -> dict[str, typing.Any]"));
}

template <class Class>
void bind_traffic(Class& engine) {
  engine.def("receive", receive_object,
           nb::sig("def receive(self, source: int, tag: str, timeout_s: float, out: typing.Any, like: str | None) -> typing.Any"),
           "source"_a, "tag"_a, "timeout_s"_a, "out"_a.none(), "like"_a.none(),
           "The object of the next message; or its Message, if there is more to do; or NoMessage.")
      .def("source", [](Engine& e, const std::string& name) { return e.inbox().source(name); }, "name"_a)
      .def("is_down", [](Engine& e, SourceId source) { return e.inbox().is_down(source); }, "source"_a)
      .def("source_name", [](Engine& e, SourceId id) { return e.inbox().name(id); }, "source"_a)
      .def("put_back", [](Engine& e, Message& m) { e.inbox().put_back(std::make_unique<Message>(std::move(m))); }, "message"_a)
      .def("post", [](Engine& e, SourceId source, const std::string& tag) { return e.inbox().post(source, tag); }, "source"_a, "tag"_a)
      .def("posted_done", [](Engine& e, const std::shared_ptr<Posted>& p) { return e.pump(), e.inbox().complete(*p); }, "posted"_a)
      .def("posted_far", [](Engine& e, const Posted& p) { return e.inbox().is_far(p); }, "posted"_a,
           "Whether its message has come, and what that offers is still on another host.")
      .def("posted_wait", [](Engine& e, const std::shared_ptr<Posted>& p, double timeout_s) {
        auto complete = [&] { return e.inbox().complete(*p); };
        if (e.inbox().is_awaited(*p)) return wait_for(e, complete, deadline_of(timeout_s));
        return wait_for(e, complete, deadline_of(timeout_s), [&] { return receiving(e, p->source, p->tag); });
      }, "posted"_a, "timeout_s"_a)
      .def("posted_awaited", [](Engine& e, const std::shared_ptr<Posted>& p) {
        e.inbox().awaited(*p, e.flight(), receiving(e, p->source, p->tag));
      }, "posted"_a, "Somebody awaits it, and no thread: to the flight recorder it is in flight until it has ended.")
      .def("posted_collect", [](Engine& e, const std::shared_ptr<Posted>& p) { return e.inbox().collect(p); }, "posted"_a,
           "Its message, or None: it was still waiting (and is withdrawn), or its source is down.")
      .def("send_packed", send_packed, "connection"_a, "packed"_a, "tag"_a, "timeout_s"_a, "False: no room before the deadline.")
      .def("announce", announce, "connection"_a, "descriptor"_a, "Hands the memory that it names to the peer, which can then map it without us.")
      .def("send_offer", send_offer, "connection"_a, "descriptor"_a, "meta"_a, "tag"_a, "timeout_s"_a)
      .def("frame", [](Engine& e, const std::string& name, uint64_t incarnation, const std::string& tag, nb::bytes meta, nb::bytes descriptor, nb::bytes payload) {
        return to_bytes(e.frame({name, incarnation}, {tag, text(meta), text(descriptor), payload.size(),
          [](const void* from, char* to) { auto& p = *static_cast<const nb::bytes*>(from); std::memcpy(to, p.c_str(), p.size()); }, &payload}));
      }, "name"_a, "incarnation"_a, "tag"_a, "meta"_a, "descriptor"_a, "payload"_a, "A message as bytes, for another carrier.")
      .def("deliver", [](Engine& e, const std::string& name, uint64_t incarnation, nb::bytes frame) {
        e.deliver(name, incarnation, frame.c_str(), frame.size());
      }, "name"_a, "incarnation"_a, "frame"_a, "Takes a message that another carrier brought.")
      .def("wait_board", wait_board, "connection"_a, "name"_a, "version"_a, "timeout_s"_a)
      .def("watch", &Engine::watch, "on"_a)
      .def_prop_ro("event_fd", &Engine::event_fd)
      .def_prop_ro("queued", [](Engine& e) { return e.inbox().queued(); });
}

void bind_throttle(nb::module_& module) {
  auto ns = [](double s) { return static_cast<int64_t>(s * 1e9); };
  nb::class_<Throttle> throttle(module, "Throttle", "Failed attempts to come in, by origin; keeps nobody out. The time, in seconds, is given.");
  throttle.def(nb::init<>())
      .def("failed", [ns](Throttle& t, const std::string& origin, double now_s) { return t.failed(origin, ns(now_s)); }, "origin"_a, "now_s"_a,
           "Counts one. True: one too many: its answer is to wait for DELAY_S, and nobody is told but by untold().")
      .def("untold", [ns](Throttle& t, double now_s) { return t.untold(ns(now_s)); }, "now_s"_a, "Failures that nobody was told of, by origin, where it is time to.")
      .def("__len__", &Throttle::size);
  throttle.attr("BURST") = Throttle::kBurst;
  throttle.attr("ORIGINS") = Throttle::kOrigins;
  throttle.attr("DELAY_S") = Throttle::kDelay / 1e9;
  throttle.attr("TELL_S") = Throttle::kTell / 1e9;
  throttle.attr("OTHERS") = Throttle::kOthers;
}

}  // namespace

void bind_engine(nb::module_& module) {
  nb::register_exception_translator(translate);
  module.attr("EAGER_LIMIT") = kEagerLimit;
  module.attr("ANY_SOURCE") = kAnySource;
  module.def("arm_points", points::arm, "plan"_a, "For tests: at which points this process is killed or stopped (csrc/point.h); empty: at none.");
  module.def("void_frame", [](nb::bytes frame) { return to_bytes(Message::void_frame(text(frame))); }, "frame"_a,
             "The frame that takes the place of one that was given up: only its number counts.");
  module.def("claim_of", [](nb::bytes descriptor) { return Descriptor::decode(text(descriptor)).claim; }, "descriptor"_a);
  bind_messages(module);
  bind_stored(module);
  bind_throttle(module);
  bind_connections(module);
  bind_views(module);
  nb::class_<Engine> engine(module, "Engine", "Pool, connections and messages of one endpoint.");
  engine
      .def("__init__", [](Engine* self, std::string name, std::string path, nb::bytes key, uint64_t pool_bytes, const std::string& flight) {
        new (self) Engine(std::move(name), std::move(path), to_key(key), pool_bytes, flight);
      }, "name"_a, "path"_a, "key"_a, "pool_bytes"_a, "flight"_a = "")
      .def("start", &Engine::start, "incarnation"_a)
      .def("close", &Engine::close, nb::call_guard<Released>())
      .def_prop_ro("closed", &Engine::closed)
      .def_prop_ro("flight", [](Engine& e) { return e.flight(); }, "Its flight recorder.")
      .def("connect", [](Engine& e, const std::string& path, nb::bytes key, const std::string& name, uint64_t incarnation, double timeout_s, Stop* stop) {
        Key k = to_key(key);
        Released released;
        return e.shm().connect(path, k, {name, incarnation}, deadline_of(timeout_s), stop);
      }, "path"_a, "key"_a, "name"_a, "incarnation"_a, "timeout_s"_a, "stop"_a = nb::none())
      .def("secure", [](Engine& e, const std::string& cert, const std::string& key, const std::string& ca, const std::string& name) {
        e.tcp().secure(std::make_shared<const Tls>(cert, key, ca, name));
      }, "cert"_a, "key"_a, "ca"_a, "name"_a,
           "From now on each TCP stream is inside TLS: files of PEM, and the DNS name that all certificates carry. Before listen() and dial().")
      .def_prop_ro("secured", [](Engine& e) { return e.tcp().secured(); }, "Whether TCP streams are inside TLS.")
      .def("listen", [](Engine& e, const std::string& host, uint16_t first, uint16_t last) { return e.tcp().listen(host, first, last); },
           "host"_a, "first"_a, "last"_a, "Listens for other hosts at a numeric address; returns the port. Once.")
      .def("dial", [](Engine& e, const std::string& host, uint16_t port, nb::bytes key, const std::string& name, uint64_t incarnation, double timeout_s, Stop* stop) {
        Contact to{{host, port}, to_key(key)};
        Patience patience{deadline_of(timeout_s), stop};
        patience.look = [&e, main = in_main_thread()] {
          if (e.closed()) throw Error(Fault::closed, "the endpoint was shut down");
          if (main) look_for_signals();
        };
        Released released;
        try {
          return e.tcp().connect(to, {name, incarnation}, patience);
        } catch (const Error&) {
          if (patience.stopped()) throw Error(Fault::cancelled, "cancelled");  // which looks like the end of the stream
          throw;
        }
      }, "host"_a, "port"_a, "key"_a, "name"_a, "incarnation"_a, "timeout_s"_a, "stop"_a = nb::none())
      .def("limit", [](Engine& e, uint64_t bytes_per_s) { e.tcp().server().limit(bytes_per_s); }, "bytes_per_s"_a,
           "What is sent to one other host's peer at most; 0: as fast as it goes.")
      .def("verify", &Engine::verify, "on"_a, "Whether everything that is stored from now on gets a checksum.")
      .def("undelivered", [](Engine& e, const std::string& name, uint64_t incarnation) { return e.undelivered({name, incarnation}); },
           "name"_a, "incarnation"_a, "Whether messages to that peer wait for a lane that works.")
      .def("refusals", [](Engine& e) { return e.tcp().take_refusals(); }, "Whom the TCP port turned away since the last call, and why.")
      .def("suspects", [](Engine& e) {
        nb::list result;
        for (const auto& [peer, at] : e.take_suspects()) result.append(nb::make_tuple(peer.name, peer.incarnation, at.host, at.port));
        return result;
      }, nb::sig("def suspects(self) -> list[tuple[str, int, str, int]]"),
           "Peers whose streams ended without a word since the last call: name, incarnation, and where they listened.")
      .def_prop_ro("owes", &Engine::owes, "Whether peers on other hosts haven't got yet what was sent to them.")
      .def("sent_bytes", [](Engine& e) { return e.tcp().server().sent_bytes(); }, "Bytes of this process's memory that peers on other hosts have read.")
      .def("connections", &Engine::connections)
      .def("disconnect", &Engine::disconnect, "connection"_a, nb::call_guard<Released>())
      .def("set_peer", [](Engine& e, const std::string& name, uint64_t incarnation, bool up) { e.set_peer({name, incarnation}, up); },
           "name"_a, "incarnation"_a, "up"_a, nb::call_guard<Released>())
      .def("lapse", &Engine::lapse, "Others took this process for lost: receives that name one of them end.")
      .def("avoid", [](Engine& e, const std::string& name, uint64_t incarnation) { e.avoid({name, incarnation}); },
           "name"_a, "incarnation"_a, "From now on no reader is sent to that peer.")
      .def("heartbeat", [](Engine& e, const std::string& address, nb::bytes key, double interval_s) {
        e.heartbeat().configure(address, to_key(key), static_cast<int64_t>(interval_s * 1e9));
        e.nudge();
      }, "address"_a, "key"_a, "interval_s"_a)
      .def("heartbeat_state", heartbeat_state, "0 idle, 1 connecting, 2 beating, 3 rejected, 4 unreachable");
  bind_memory(engine);
  bind_traffic(engine);
}

}  // namespace tl::python
