#include "inbox.h"

#include <algorithm>
#include <cstring>

#include "connection.h"
#include "crc32c.h"
#include "error.h"

namespace tl {

std::unique_ptr<Message> Message::parse(const char* frame, uint64_t n) {
  FrameHeader header;
  auto corrupt = [](const char* what) { return Error(Fault::corrupt, std::string("a message cannot be read: ") + what); };
  if (n < sizeof header) throw corrupt("it is shorter than its header");
  auto message = std::make_unique<Message>();
  message->bytes.reset(new char[n]);
  std::memcpy(message->bytes.get(), frame, n);  // first copied, then checked: the sender may still write it
  std::memcpy(&header, message->bytes.get(), sizeof header);
  if (header.magic != FrameHeader::kMagic) throw corrupt("its first bytes are wrong");
  uint64_t fixed = sizeof header + uint64_t{header.tag_size} + header.meta_size + header.descriptor_size;
  if (fixed > n || header.payload_size != n - fixed) throw corrupt("its lengths do not add up");
  message->size = n;
  message->sequence = header.sequence;
  message->is_void = header.is_void != 0;
  message->tag_at = sizeof header;
  message->tag_size = header.tag_size;
  message->meta_at = message->tag_at + header.tag_size;
  message->meta_size = header.meta_size;
  message->descriptor_at = message->meta_at + header.meta_size;
  message->descriptor_size = header.descriptor_size;
  message->payload_at = fixed;
  message->payload_size = header.payload_size;
  return message;
}

std::string Message::void_frame(std::string_view frame) {
  FrameHeader header{};
  std::memcpy(&header, frame.data(), std::min(frame.size(), sizeof header));
  FrameHeader made{FrameHeader::kMagic, 0, 1, 0, 0, 0, header.sequence};
  return with_checksum(std::string(reinterpret_cast<const char*>(&made), sizeof made));
}

std::string with_checksum(std::string frame) {
  uint32_t crc = crc32c(0, frame.data(), frame.size());
  return frame.append(reinterpret_cast<const char*>(&crc), sizeof crc);
}

uint64_t checked_size(const char* frame, uint64_t n) {
  uint32_t crc;
  if (n < sizeof crc) throw Error(Fault::corrupt, "a message cannot be read: it is shorter than its checksum");
  std::memcpy(&crc, frame + n - sizeof crc, sizeof crc);
  if (crc != crc32c(0, frame, n - sizeof crc)) throw Error(Fault::corrupt, "a message changed on its way");
  return n - sizeof crc;
}

SourceId Inbox::source(const std::string& name) {
  std::lock_guard lock(mutex_);
  auto [it, fresh] = ids_.emplace(name, static_cast<SourceId>(names_.size()));
  if (fresh) {
    names_.push_back(name);
    down_.push_back(false);
    downs_.push_back(0);
    kept_.push_back(0);
    forgotten_.push_back(0);
  }
  return it->second;
}

std::string Inbox::name(SourceId source) {
  std::lock_guard lock(mutex_);
  return source < names_.size() ? names_[source] : "?";
}

bool Inbox::deliver(std::unique_ptr<Message> message) {
  std::lock_guard lock(mutex_);
  if (message->incarnation <= forgotten_[message->source]) return false;
  auto [entry, fresh] = streams_.try_emplace({message->source, message->incarnation});
  if (fresh) forget_streams(message->source);
  if (message->incarnation <= forgotten_[message->source]) return false;
  Stream& stream = entry->second;
  if (message->sequence <= stream.last) return false;
  uint64_t& kept = kept_[message->source];
  if (kept + message->size > kMaxQueued && !message->is_void)
    throw Error(Fault::no_room, "the peer keeps " + std::to_string(kept >> 20) + " MiB of messages that it has not received yet, " +
                                    "the most from one sender: wait until it receives");
  if (message->sequence != stream.last + 1) {  // another carrier has the ones before it
    if (stream.early.size() >= kMaxEarly) throw Error(Fault::corrupt, "a peer leaves too many gaps in its message numbers");
    const uint64_t sequence = message->sequence, size = message->size;
    bool added = stream.early.emplace(sequence, std::move(message)).second;
    if (added) kept += size;
    return added;
  }
  ++stream.last;
  match(std::move(message), false);
  for (auto it = stream.early.begin(); it != stream.early.end() && it->first == stream.last + 1; it = stream.early.erase(it)) {
    ++stream.last;
    kept -= it->second->size;
    match(std::move(it->second), false);
  }
  return true;
}

void Inbox::forget_streams(SourceId source) {
  auto first = streams_.lower_bound({source, 0}), end = streams_.lower_bound({source + 1, 0});
  for (auto kept = std::distance(first, end); kept > static_cast<ptrdiff_t>(kMaxStreams); --kept) {
    forgotten_[source] = first->first.second;
    for (auto& [sequence, message] : first->second.early) kept_[source] -= message->size;
    first = streams_.erase(first);
  }
}

void Inbox::match(std::unique_ptr<Message> message, bool front) {
  if (message->is_void) return;
  if (!front) message->arrival = ++arrivals_;
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    Posted& posted = **it;
    if ((posted.source != kAnySource && posted.source != message->source) || posted.tag != message->tag()) continue;
    posted.message = std::move(message);
    finish(posted);
    posted_.erase(it);
    completions_.fetch_add(1, std::memory_order_release);
    return;
  }
  key_.assign(message->tag());
  kept_[message->source] += message->size;
  Queue& queue = tags_[key_].by_source[message->source];
  if (front) {  // several may have been taken at once: keep the order of arrival
    auto at = std::find_if(queue.begin(), queue.end(), [&](auto& other) { return other->arrival > message->arrival; });
    queue.insert(at, std::move(message));
  } else {
    queue.push_back(std::move(message));
  }
  ++queued_;
}

// One that has its message, or never will.
void Inbox::finish(Posted& posted) {
  posted.done = true;
  if (posted.operation) posted.operation->end(posted.message ? "done" : posted.lost ? "lost" : "given up");
  posted_count_.fetch_sub(1, std::memory_order_relaxed);
}

bool Inbox::is_awaited(const Posted& posted) {
  std::lock_guard lock(mutex_);
  return posted.operation != nullptr;
}

void Inbox::awaited(Posted& posted, const std::shared_ptr<Flight>& flight, const Doing& doing) {
  std::lock_guard lock(mutex_);
  if (!posted.done && !posted.operation) posted.operation = std::make_unique<Operation>(flight, doing);
}

std::unique_ptr<Message> Inbox::take(SourceId source, std::string_view tag) {
  std::lock_guard lock(mutex_);
  return take_locked(source, tag);
}

std::unique_ptr<Message> Inbox::take_locked(SourceId source, std::string_view tag) {
  if (queued_ == 0) return nullptr;
  key_.assign(tag);
  auto queues = tags_.find(key_);
  if (queues == tags_.end()) return nullptr;
  auto& by_source = queues->second.by_source;
  auto best = by_source.end();
  if (source != kAnySource) {
    best = by_source.find(source);
  } else {
    for (auto it = by_source.begin(); it != by_source.end(); ++it)
      if (!it->second.empty() && (best == by_source.end() || it->second.front()->arrival < best->second.front()->arrival)) best = it;
  }
  if (best == by_source.end() || best->second.empty()) return nullptr;
  std::unique_ptr<Message> message = std::move(best->second.front());
  kept_[message->source] -= message->size;
  best->second.pop_front();
  if (tag.size() > 0 && best->second.empty()) {  // tags may be used once each: leave nothing behind
    by_source.erase(best);
    if (by_source.empty()) tags_.erase(queues);
  }
  --queued_;
  return message;
}

void Inbox::put_back(std::unique_ptr<Message> message) {
  std::lock_guard lock(mutex_);
  match(std::move(message), true);
}

std::shared_ptr<Posted> Inbox::post(SourceId source, std::string tag) {
  auto posted = std::make_shared<Posted>();
  posted->source = source;
  posted->tag = std::move(tag);
  std::lock_guard lock(mutex_);
  if ((posted->done = (posted->message = take_locked(source, posted->tag)) != nullptr)) return posted;
  if (source != kAnySource && down_[source]) {
    posted->lost = posted->done = true;
    return posted;
  }
  posted_.push_back(posted);
  posted_count_.fetch_add(1, std::memory_order_relaxed);
  return posted;
}

bool Inbox::complete(const Posted& posted) {
  std::lock_guard lock(mutex_);
  return posted.done;
}

bool Inbox::is_far(const Posted& posted) {
  std::lock_guard lock(mutex_);
  return posted.message && posted.message->descriptor_size && !(posted.message->carrier && posted.message->carrier->pid);
}

std::unique_ptr<Message> Inbox::collect(const std::shared_ptr<Posted>& posted) {
  std::lock_guard lock(mutex_);
  if (!posted->done) {
    finish(*posted);
    posted_.remove(posted);
  }
  return std::move(posted->message);
}

template <class Ends>
void Inbox::lose_posted(Ends ends) {
  for (auto it = posted_.begin(); it != posted_.end();) {
    if (!ends(**it)) {
      ++it;
      continue;
    }
    finish(**it);
    it = posted_.erase(it);
    completions_.fetch_add(1, std::memory_order_release);
  }
}

void Inbox::set_down(SourceId source, bool down) {
  std::lock_guard lock(mutex_);
  bool was = down_[source];
  down_[source] = down;
  if (!down) return;
  if (!was) ++downs_[source];
  lose_posted([&](Posted& posted) { return posted.lost = posted.source == source; });
}

void Inbox::lapse() {
  std::lock_guard lock(mutex_);
  lapses_.fetch_add(1, std::memory_order_release);
  lose_posted([&](Posted& posted) { return posted.lapsed = posted.source != kAnySource; });
}

bool Inbox::is_down(SourceId source) {
  std::lock_guard lock(mutex_);
  return source != kAnySource && down_[source];
}

uint64_t Inbox::downs(SourceId source) {
  std::lock_guard lock(mutex_);
  return source == kAnySource ? 0 : downs_[source];
}

uint64_t Inbox::queued() {
  std::lock_guard lock(mutex_);
  return queued_;
}

uint64_t Inbox::received(SourceId source, uint64_t incarnation) {
  std::lock_guard lock(mutex_);
  auto it = streams_.find({source, incarnation});
  return it == streams_.end() ? 0 : it->second.last;
}

}  // namespace tl
