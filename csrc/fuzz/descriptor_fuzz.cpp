// Descriptors of messages, boards and handles, and the peer's memory that they name.
#include "../descriptor.h"

#include "../segments.h"
#include "fuzz.h"

using namespace tl;
using fuzz::Bytes;

namespace {

constexpr uint64_t kSize = 4 * kPage;

Segments& memory() {
  static Segments segments;
  for (uint32_t id = 0; id < 2; ++id)
    if (!segments.known(id)) segments.add(id, make_memfd("fuzz", kSize), kSize);
  return segments;
}

void map(const Extent& extent) {
  Segments& segments = memory();
  if (!segments.use(extent.segment)) return;
  fuzz::good([&] { fuzz::touch({segments.shared(extent), extent.nbytes}); });
  fuzz::good([&] {
    const Lent lent = segments.lend(extent);
    fuzz::touch({lent.data, extent.nbytes});
    segments.give_back(lent);
  });
  segments.unuse(extent.segment);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const Bytes bytes(data, size);
  Descriptor descriptor;
  if (!fuzz::good([&] { descriptor = Descriptor::decode(bytes.view()); })) return 0;
  EXPECT(descriptor.encode() == bytes.view());
  EXPECT(descriptor.payload_count() <= descriptor.extents.size());
  for (size_t i = 0; i < descriptor.extents.size() && i < 16; ++i) map(descriptor.extents[i]);
  return 0;
}
