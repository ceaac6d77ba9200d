// A frame as it comes in a ring, a record or over gRPC, and the inbox that it goes into.
#include "../connection.h"
#include "../descriptor.h"
#include "../inbox.h"
#include "fuzz.h"

using namespace tl;
using fuzz::Bytes;

namespace {

void parse(std::string_view frame) {
  std::unique_ptr<Message> message = Message::parse(frame.data(), frame.size());
  EXPECT(message->payload_at + message->payload_size == frame.size());
  EXPECT(sizeof(FrameHeader) + message->tag().size() + message->meta().size() + message->descriptor().size() + message->payload_size == frame.size());
  for (std::string_view part : {message->tag(), message->meta(), message->descriptor(), std::string_view(message->payload(), message->payload_size)}) fuzz::touch(part);
  const std::string tag(message->tag());
  const uint64_t sequence = message->sequence;
  const bool is_void = message->is_void;
  Inbox inbox;
  const SourceId source = inbox.source("peer");
  message->incarnation = 1;
  const bool fresh = inbox.deliver(std::move(message));
  EXPECT(fresh == (sequence > 0));
  std::unique_ptr<Message> taken = inbox.take(source, tag);
  EXPECT((taken != nullptr) == (sequence == 1 && !is_void));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const Bytes frame(data, size);
  fuzz::good([&] { parse(frame.view()); });
  fuzz::good([&] { checked_size(frame.view().data(), size); });
  const Bytes checked(with_checksum(frame.text()));
  EXPECT(checked_size(checked.view().data(), checked.size()) == size);
  const std::string replaced = Message::void_frame(frame.view());
  EXPECT(fuzz::good([&] { parse({replaced.data(), checked_size(replaced.data(), replaced.size())}); }));
  return 0;
}
