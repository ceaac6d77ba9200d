// Writes to FOLDER/HARNESS/NAME what the core itself sends; tools/corpus.py makes and runs it.
#include <filesystem>
#include <fstream>

#include "../notes.h"
#include "../record.h"
#include "core.cpp"

using namespace tl;

namespace {

std::filesystem::path folder;

void keep(const std::string& name, std::string_view bytes) {
  const auto path = folder / name;
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

template <class T>
std::string bytes_of_value(const T& value) { return std::string(reinterpret_cast<const char*>(&value), sizeof value); }

Descriptor descriptor(size_t extents) {
  Descriptor made;
  made.claim = make_id(0, 1);
  made.key = {1, 2, 3};
  made.checked = true, made.crc = 0x12345678;
  made.counted = Descriptor::acknowledge;
  made.meta_in_pool = extents > 1;
  for (size_t i = 0; i < extents; ++i) made.extents.push_back({1, i * kPage, 1000});
  return made;
}

std::string frame(std::string_view tag, std::string_view meta, std::string_view offered, std::string_view payload, uint64_t sequence) {
  const auto copy = [](const void* from, char* to) { to = std::copy_n(static_cast<const std::string_view*>(from)->data(), static_cast<const std::string_view*>(from)->size(), to); };
  const Connection::Outgoing message{tag, meta, offered, payload.size(), copy, &payload};
  std::string made(Connection::frame_size(message), '\0');
  Connection::write_frame(made.data(), message, sequence);
  return made;
}

void frames() {
  const std::string offer = descriptor(2).encode(), eager = frame("grads", "meta", {}, "payload", 1);
  keep("frame/eager", eager);
  keep("frame/offer", frame("grads/layer0", {}, offer, {}, 2));
  keep("frame/empty", frame({}, {}, {}, {}, 1));
  keep("frame/void", Message::void_frame(eager));
  keep("frame/checked", with_checksum(eager));
  std::string message = make_record(RecordKind::message, eager.size());
  std::copy(eager.begin(), eager.end(), message.begin() + sizeof(RecordHead));
  seal(message);
  const std::string notice = make_record(RecordKind::notice, {7, 6}, "policy" + offer);
  keep("record/message", message);
  keep("record/notice", notice);
  keep("record/ack", make_record(RecordKind::ack, {3, 4096}));
  keep("record/bye", make_record(RecordKind::bye, {1}));
  keep("record/several", message + notice + make_record(RecordKind::ack, {3, 4096}) + message);
  for (size_t extents : {0, 1, 2, 5}) keep("descriptor/" + std::to_string(extents), descriptor(extents).encode());
}

void greetings() {
  const Nonce theirs{1, 2, 3}, ours{4, 5, 6};
  const Key key{7, 8, 9};
  const Greeting greeting{Role::reads, {"trainer", 1}, {"rollout", 2}, {{"127.0.0.1", 4000}, {1}}};
  const std::string said = hello({{"127.0.0.1", 4001}, key}, greeting, theirs, ours);
  const Heard heard = hear(said, theirs, key);
  keep("handshake/challenge", challenge(theirs));
  keep("handshake/hello", said);
  keep("handshake/welcome", answer(heard, theirs, key, "", 5));
  keep("handshake/refusal", answer(heard, theirs, key, "restarted", 0));
  const auto note = [](NoteKind kind, const std::string& text) { return bytes_of_value(NoteHead{Note::kVersion, static_cast<uint32_t>(kind), 1, 2}) + text; };
  keep("note/hello", note(NoteKind::hello, std::string(16, 'k') + "trainer" + '\0' + "rollout"));
  keep("note/refused", note(NoteKind::refused, "the key is wrong"));
  keep("note/want", note(NoteKind::want, ""));
}

void reads() {
  const Descriptor claim = descriptor(3);
  const auto request = [&](ReadRequest::Kind kind) { return ReadRequest{ReadRequest::kMagic, kind, 0, claim.claim, claim.key, 0, kind == ReadRequest::acknowledge, 0, 0}; };
  std::string offer = bytes_of_value(RelayOffer{5, {1}, 2});
  append_extents(offer, claim.extents);
  const std::string read = encode(request(ReadRequest::read), claim.extents), told = encode(request(ReadRequest::acknowledge), {});
  keep("reads/read", read);
  keep("reads/acknowledge", told);
  keep("reads/pull", encode(request(ReadRequest::pull), claim.extents, offer));
  keep("reads/several", told + read + told);
  const RedirectTarget target{3, 1, {"rollout", 2}, {{"10.0.0.2", 4000}, {1}}, claim};
  keep("reads/redirect", encode(target, Digest{1, 2, 3}));
}

}  // namespace

int main(int count, char** words) {
  if (count != 2) return 2;
  folder = words[1];
  frames();
  greetings();
  reads();
}
