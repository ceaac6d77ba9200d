// Requests for memory, what the owner lends for them, and redirects.
#include "../reads.h"

#include "fuzz.h"

using namespace tl;
using fuzz::Bytes;

namespace {

const Digest kSecret{1, 2, 3};

struct Owner {
  std::shared_ptr<Arena> arena = std::make_shared<Arena>(1u << 20);
  std::vector<Generation> generations = std::vector<Generation>(kSlots);
  Claims claims{generations.data(), [](const Claims::Visit&) {}};
  std::vector<std::shared_ptr<Block>> blocks{arena->allocate(3 * kPage), arena->allocate(kPage)};
  Claim claim;
  ClaimId id;
  Owner() {
    claim.blocks = blocks;
    id = claims.add(claim);
  }
};

void lend(Owner& owner, const ReadRequest& request, const std::string& text) {
  const std::vector<Extent> extents = read_extents(text.data(), request.count);
  std::vector<Span> spans;
  std::vector<std::shared_ptr<Block>> blocks;
  std::shared_ptr<Filling> filling;
  owner.claims.lend(request.claim, request.key, extents, spans, blocks, filling);
  EXPECT(spans.size() == extents.size());
  for (const Span& span : spans) {
    bool inside = false;
    for (auto& block : owner.blocks) inside |= span.data >= block->data() && span.data + span.nbytes <= block->data() + block->extent().nbytes;
    EXPECT(inside);
    fuzz::touch({span.data, span.nbytes});
  }
}

void serve(Owner& owner, std::string stream) {
  ReadRequest request;
  std::string text;
  for (size_t left = stream.size(); take_request(stream, request, text); left = stream.size()) {
    EXPECT(stream.size() < left);
    const Bytes rest(text);
    fuzz::good([&] { lend(owner, request, rest.text()); });
    uint64_t failed;
    if (request.kind == ReadRequest::pull)
      fuzz::good([&] { EXPECT(parse_offer(request, Bytes(rest.view().substr(request.count * kExtentSize)).view(), kSecret, failed).extents.size() == request.count); });
    if (request.kind == ReadRequest::acknowledge) owner.claims.acknowledged(request.claim, 1, request.token);
  }
}

// As by a reader who knows the claim.
std::string sealed(const Owner& owner, Bytes stream) {
  ReadRequest request;
  for (size_t at = 0, size; stream.get(at, request); at += size) {
    const size_t words = request.count * kExtentSize;
    size = sizeof request + words + (request.kind == ReadRequest::pull ? sizeof(RelayOffer) + words : 0);
    if (stream.size() - at < size) break;
    request.claim = owner.id;
    request.key = owner.claim.key;
    request.crc = checksum(request, stream.view().substr(at + sizeof request, size - sizeof request));
    stream.put(at, request);
  }
  return stream.text();
}

void follow(const Bytes& bytes) {
  const RedirectTarget target = parse_redirect(bytes.text(), kSecret);
  const RedirectTarget again = parse_redirect(encode(target, kSecret), kSecret);
  EXPECT(again.peer == target.peer && again.contact.at.host == target.contact.at.host && again.claim.key == target.claim.key);
  EXPECT(again.claim.extents.size() == target.claim.extents.size());
}

Bytes sealed(Bytes redirect) {
  Redirect head;
  if (!redirect.get(0, head)) return redirect;
  head.crc = 0;
  redirect.put(0, head);
  head.crc = crc32c(0, redirect.view().data(), redirect.size());
  redirect.put(0, head);
  return redirect;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Owner owner;
  const Bytes bytes(data, size);
  fuzz::good([&] { serve(owner, bytes.text()); });
  fuzz::good([&] { serve(owner, sealed(owner, bytes)); });
  fuzz::good([&] { follow(bytes); });
  fuzz::good([&] { follow(sealed(bytes)); });
  return 0;
}
