// A single-producer, single-consumer ring of frames in memory that two processes share.
//
// Source of the scheme: Lamport's queue with cached indices. A frame is contiguous: 8 bytes of length, then the bytes,
// padded to 8. A length of kSkip means: go on at the start. Each side validates what the other one wrote, since the
// other one may be hostile: a wrong index or length is Fault::corrupt, never an access outside.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>

#include "error.h"

namespace tl {

struct RingHeader {
  alignas(64) std::atomic<uint64_t> tail;      // bytes ever written; the producer's
  std::atomic<int32_t> producer_cpu;           // where the producer last ran, so that a waiter knows whether to spin
  std::atomic<uint32_t> starved;               // the producer waits for room or credit
  alignas(64) std::atomic<uint64_t> head;      // bytes ever consumed; the consumer's
  std::atomic<uint64_t> credited;              // bytes of frames that the application has taken
};

class Ring {
 public:
  static constexpr uint64_t kSkip = ~uint64_t{0};
  static constexpr uint64_t bytes_for(uint64_t capacity) { return sizeof(RingHeader) + capacity; }

  Ring() = default;
  Ring(void* memory, uint64_t capacity)  // capacity: a power of two
      : header_(static_cast<RingHeader*>(memory)), data_(static_cast<char*>(memory) + sizeof(RingHeader)), capacity_(capacity) {}

  RingHeader& header() const { return *header_; }
  static constexpr uint64_t padded(uint64_t n) { return 8 + ((n + 7) & ~uint64_t{7}); }
  uint64_t max_frame() const { return capacity_ / 4; }

  // Producer: room for a frame of n bytes, or null. publish() makes it visible.
  char* reserve(uint64_t n) {
    uint64_t need = padded(n);
    uint64_t tail = tail_;
    uint64_t until_end = capacity_ - (tail & (capacity_ - 1));
    uint64_t total = need <= until_end ? need : need + until_end;
    if (tail + total - head_seen_ > capacity_) {
      uint64_t head = header_->head.load(std::memory_order_acquire);
      if (head > tail || head < head_seen_) throw Error(Fault::corrupt, "a peer moved the read index of a ring wrongly");
      head_seen_ = head;
      if (tail + total - head > capacity_) return nullptr;
    }
    if (need > until_end) {
      store_length(tail, kSkip);
      tail += until_end;
    }
    store_length(tail, n);
    next_ = tail + need;
    return data_ + (tail & (capacity_ - 1)) + 8;
  }
  void publish() {
    tail_ = next_;
    header_->tail.store(next_, std::memory_order_release);
  }

  // Consumer: the next frame, or null when there is none. pop() gives its space back.
  bool empty() const { return header_->tail.load(std::memory_order_acquire) == head_; }
  const char* front(uint64_t& n) {
    for (;;) {
      if (head_ == tail_seen_) {
        uint64_t tail = header_->tail.load(std::memory_order_acquire);
        if (tail == head_) return nullptr;
        if (tail < head_ || tail - head_ > capacity_ || (tail & 7)) throw Error(Fault::corrupt, "a peer moved the write index of a ring wrongly");
        tail_seen_ = tail;
      }
      uint64_t at = head_ & (capacity_ - 1);
      uint64_t length;
      std::memcpy(&length, data_ + at, 8);
      uint64_t left = tail_seen_ - head_;
      if (length == kSkip) {
        if (at == 0) throw Error(Fault::corrupt, "a peer skipped a whole ring");  // it could do so for ever
        if (capacity_ - at > left) throw Error(Fault::corrupt, "a peer wrote a ring frame that runs past its end");
        head_ += capacity_ - at;
        continue;
      }
      if (length > max_frame() || padded(length) > left || padded(length) > capacity_ - at)
        throw Error(Fault::corrupt, "a peer wrote a ring frame of an impossible length");
      n = length;
      return data_ + at + 8;
    }
  }
  void pop(uint64_t n) {
    head_ += padded(n);
    header_->head.store(head_, std::memory_order_release);
  }

 private:
  void store_length(uint64_t at, uint64_t n) { std::memcpy(data_ + (at & (capacity_ - 1)), &n, 8); }

  RingHeader* header_ = nullptr;
  char* data_ = nullptr;
  uint64_t capacity_ = 0;
  uint64_t tail_ = 0, head_seen_ = 0, next_ = 0;  // producer's side
  uint64_t head_ = 0, tail_seen_ = 0;             // consumer's side
};

}  // namespace tl
