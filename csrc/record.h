// Records: what the two ends of a lane write into its stream. Each is a head and a body, both with a checksum, so that a stream
// that lost or changed a byte is noticed before anything in it is used, and before more is waited for than was sent.
#pragma once
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>

#include "board.h"
#include "crc32c.h"
#include "error.h"

namespace tl {

enum class RecordKind : uint16_t {
  message = 1,  // a frame (inbox.h)
  ack,          // u64 number of the last message received, u64 bytes of frames taken on this lane
  notice,       // u64 version, u64 length of the name, the name, the descriptor
  bye,          // u64 1: the whole engine has closed
};

struct RecordHead {
  uint32_t size;  // of the body
  RecordKind kind;
  uint16_t zero;
  uint32_t body_crc;  // CRC32C of the body
  uint32_t head_crc;  // and of the fields before this one: a wrong size would be waited for

  bool whole() const { return head_crc == crc32c(0, this, offsetof(RecordHead, head_crc)); }
  bool fits(const char* body) const { return body_crc == crc32c(0, body, size); }
  void seal(const char* body) {
    body_crc = crc32c(0, body, size);
    head_crc = crc32c(0, this, offsetof(RecordHead, head_crc));
  }
};

// A record with room for its body. seal() once that is written.
inline std::string make_record(RecordKind kind, size_t size) {
  std::string record(sizeof(RecordHead) + size, '\0');
  const RecordHead head{static_cast<uint32_t>(size), kind, 0, 0, 0};
  std::memcpy(record.data(), &head, sizeof head);
  return record;
}

inline void seal(std::string& record) {
  RecordHead head;
  std::memcpy(&head, record.data(), sizeof head);
  head.seal(record.data() + sizeof head);
  std::memcpy(record.data(), &head, sizeof head);
}

inline std::string make_record(RecordKind kind, std::initializer_list<uint64_t> words, std::string_view text = {}) {
  std::string record = make_record(kind, words.size() * sizeof(uint64_t) + text.size());
  char* body = record.data() + sizeof(RecordHead);
  std::memcpy(body, words.begin(), words.size() * sizeof(uint64_t));
  if (!text.empty()) std::memcpy(body + words.size() * sizeof(uint64_t), text.data(), text.size());
  seal(record);
  return record;
}

// The body of a notice; returns the name. Throws Fault::corrupt.
inline std::string parse_notice(std::string_view body, Notice& notice) {
  uint64_t words[2];
  if (body.size() >= sizeof words) std::memcpy(words, body.data(), sizeof words);
  if (body.size() < sizeof words || words[1] >= BoardSlot::kName || body.size() - sizeof words < words[1])
    throw Error(Fault::corrupt, "a notice cannot be read");
  notice = {words[0], std::string(body.substr(sizeof words + words[1]))};
  return std::string(body.substr(sizeof words, words[1]));
}

// Takes a stream apart. Bytes are received straight into its buffer.
class RecordReader {
 public:
  static constexpr size_t kBuffer = 256u << 10;

  explicit RecordReader(size_t most) : most_(most) {}
  char* room() {
    if (!buffer_) buffer_.reset(new char[kBuffer]);
    if (begin_ == end_) begin_ = end_ = 0;
    if (kBuffer - end_ < most_ + sizeof(RecordHead)) {
      std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
      end_ -= begin_, begin_ = 0;
    }
    return buffer_.get() + end_;
  }
  size_t room_size() const { return kBuffer - end_; }
  void arrived(size_t n) { end_ += n; }

  // False: no whole record is there. The body is valid until the next call of room(). Throws Fault::corrupt.
  bool next(RecordKind& kind, std::string_view& body) {
    RecordHead head;
    if (end_ - begin_ < sizeof head) return false;
    std::memcpy(&head, buffer_.get() + begin_, sizeof head);
    if (!head.whole()) throw Error(Fault::corrupt, "a record changed on its way");
    if (head.size > most_) throw Error(Fault::corrupt, "a record of an impossible size");
    if (end_ - begin_ < sizeof head + head.size) return false;
    const char* text = buffer_.get() + begin_ + sizeof head;
    if (!head.fits(text)) throw Error(Fault::corrupt, "a record changed on its way");
    kind = head.kind;
    body = {text, head.size};
    begin_ += sizeof head + head.size;
    return true;
  }

 private:
  const size_t most_;
  std::unique_ptr<char[]> buffer_;
  size_t begin_ = 0, end_ = 0;
};

}  // namespace tl
