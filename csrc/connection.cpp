#include "connection.h"

#include <stdexcept>

namespace tl {

uint64_t Connection::frame_size(const Outgoing& m) {
  if (m.tag.size() > UINT16_MAX) throw std::length_error("a tag has at most 65535 bytes");
  return sizeof(FrameHeader) + m.tag.size() + m.meta.size() + m.descriptor.size() + m.payload_size;
}

void Connection::write_frame(char* frame, const Outgoing& m, uint64_t sequence) {
  FrameHeader header{FrameHeader::kMagic, static_cast<uint16_t>(m.tag.size()), 0, static_cast<uint32_t>(m.meta.size()),
                     static_cast<uint32_t>(m.descriptor.size()), m.payload_size, sequence};
  std::memcpy(frame, &header, sizeof header);
  frame += sizeof header;
  for (std::string_view part : {m.tag, m.meta, m.descriptor}) {
    if (!part.empty()) std::memcpy(frame, part.data(), part.size());
    frame += part.size();
  }
  if (m.payload_size) m.copy(m.source, frame);
}

}  // namespace tl
