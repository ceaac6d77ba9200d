// A lane's stream of records, which arrives in pieces.
#include "../record.h"

#include "../inbox.h"
#include "fuzz.h"

using namespace tl;
using fuzz::Bytes;

namespace {

constexpr size_t kMost = (128u << 10) + 4096;

void read(std::string_view stream, size_t piece) {
  RecordReader reader(kMost);
  RecordKind kind;
  std::string_view body;
  while (!stream.empty()) {
    char* room = reader.room();
    size_t n = std::min({piece, stream.size(), reader.room_size()});
    EXPECT(n > 0);  // else a stream would stand still
    std::memcpy(room, stream.data(), n);
    stream.remove_prefix(n);
    reader.arrived(n);
    while (reader.next(kind, body)) {
      EXPECT(body.size() <= kMost);
      const Bytes alone(body);
      if (kind == RecordKind::message) fuzz::good([&] { Message::parse(alone.view().data(), alone.size()); });
      Notice notice;
      if (kind == RecordKind::notice && fuzz::good([&] { EXPECT(parse_notice(alone.view(), notice).size() < BoardSlot::kName); }))
        EXPECT(notice.descriptor.size() <= body.size());
    }
  }
}

Bytes sealed(Bytes stream) {
  RecordHead head;
  for (size_t at = 0; stream.get(at, head) && head.size <= stream.size() - at - sizeof head; at += sizeof head + head.size) {
    head.seal(stream.view().data() + at + sizeof head);
    stream.put(at, head);
  }
  return stream;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const Bytes stream(data, size), right = sealed(stream);
  fuzz::good([&] { read(stream.view(), size); });
  fuzz::good([&] { read(right.view(), size); });
  fuzz::good([&] { read(right.view(), 1 + size / 7); });
  return 0;
}
