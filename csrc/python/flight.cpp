#include "python/waited.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "flight.h"
#include "inbox.h"
#include "python/bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tl::python {

namespace {

nb::bytes to_bytes(const FlightRecord& record) { return nb::bytes(reinterpret_cast<const char*>(&record), sizeof record); }

// An activity that Python begins and ends: what it waits for is a chain of calls.
struct Span {
  std::unique_ptr<Activity> activity;
  ~Span() {
    if (activity && !activity->here()) [[maybe_unused]] Activity* stays = activity.release();  // its thread may still refer to it
  }
};

std::unique_ptr<Span> begin(const std::shared_ptr<Flight>& flight, const std::string& what, const std::string& peer, const std::string& phase, const std::string& note) {
  auto span = std::make_unique<Span>();
  span->activity = std::make_unique<Activity>(flight, Doing{what.c_str(), phase.c_str(), peer, 0, "", note});
  return span;
}

void end(Span& span, const std::string& outcome, bool failed) {
  if (!span.activity || !span.activity->here()) return;
  span.activity->turned_out(outcome, failed);
  span.activity.reset();
}

void note(Flight& flight, const std::string& what, const std::string& outcome, const std::string& peer, uint64_t incarnation, const std::string& transport,
          const std::string& text, bool failed) {
  flight.note({what.c_str(), "", peer, incarnation, transport.c_str(), text}, outcome, failed);
}

void failed(Flight& flight, const std::string& phase, const std::string& error, const std::string& peer, uint64_t incarnation, const std::string& transport,
            const std::string& text, bool late) {
  flight.failed({phase.c_str(), "", peer, incarnation, transport.c_str(), text}, error, late);
}

}  // namespace

nb::object waited() {
  FlightRecord record;
  if (!Activity::latest(record)) return nb::none();
  return nb::module_::import_("tensorlink.recording").attr("told")(to_bytes(record));
}

void bind_flight(nb::module_& module) {
  module.def("waited", waited, nb::sig("def waited() -> str | None"),
             "What this thread waits for, or waited for last, in one sentence.");
  nb::class_<Span>(module, "Span", "An operation in flight that Python told of.").def("end", end, "outcome"_a, "failed"_a, "On its own thread; idempotent.");
  nb::class_<Flight>(module, "Flight", "The flight recorder of an endpoint. From any thread; never blocks.")
      .def_prop_ro("path", &Flight::path, "Its file; empty: there is none.")
      .def_prop_ro("error", &Flight::error, "Why there is no file, if one was wanted.")
      .def("begin", begin, "what"_a, "peer"_a, "phase"_a, "note"_a = "",
           "This thread is in an operation from now on; within another one this is its next phase.")
      .def("note", note, "what"_a, "outcome"_a, "peer"_a = "", "incarnation"_a = 0, "transport"_a = "", "text"_a = "", "failed"_a = false, "Records an event.")
      .def("failed", failed, "phase"_a, "error"_a, "peer"_a, "incarnation"_a, "transport"_a, "text"_a, "late"_a,
           "Records what an error tells of, with what this thread was waiting for; one that is `late` only after a while.")
      .def("find", [](const Flight& flight, uint32_t thread) -> nb::object {
        FlightRecord record;
        if (!flight.find(thread, record)) return nb::none();
        return to_bytes(record);
      }, nb::sig("def find(self, thread: int) -> bytes | None"), "thread"_a, "What a thread does, by its native id: a record, or None.");
}

}  // namespace tl::python
