// Notes: packets between two processes of a host.
#include "../notes.h"

#include "fuzz.h"

using namespace tl;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const fuzz::Bytes packet(data, size);
  Note note;
  if (fuzz::good([&] { parse_note(packet.view(), note); })) EXPECT(note.text == packet.view().substr(sizeof(NoteHead)));
  return 0;
}
