// Failed attempts to come in, by where they come from, so that whoever goes on failing costs little. It keeps nobody out:
// who shows the secret isn't asked how many others at its address could not. Pure: the time is given. Not thread-safe.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tl {

class Throttle {
 public:
  static constexpr unsigned kBurst = 10;                // failures of one origin that are answered and told of at once
  static constexpr int64_t kAgain = 1'000'000'000;      // and one more each time this has passed
  static constexpr int64_t kTell = 10'000'000'000;      // how long others are only counted
  static constexpr int64_t kDelay = 1'000'000'000;      // how long their answers wait
  static constexpr size_t kOrigins = 1024;              // beyond these they count together
  static constexpr const char* kOthers = "other addresses";

  // One more failure. True: it is one too many, so its answer is to wait for kDelay, and nobody is told but by `untold`.
  bool failed(const std::string& origin, int64_t now) {
    Bucket& bucket = find(origin, now);
    bucket.refill(now);
    if (bucket.left > 0) return --bucket.left, false;
    if (bucket.untold++ == 0) bucket.counted_since = now;
    return true;
  }

  // Failures that nobody was told of, by origin, where it is time to.
  std::vector<std::pair<std::string, uint64_t>> untold(int64_t now) {
    std::vector<std::pair<std::string, uint64_t>> result;
    for (auto& [origin, bucket] : buckets_)
      if (bucket.untold > 0 && now - bucket.counted_since >= kTell) result.emplace_back(origin, std::exchange(bucket.untold, 0));
    return result;
  }
  size_t size() const { return buckets_.size(); }

 private:
  struct Bucket {
    unsigned left = kBurst;
    int64_t since = 0, counted_since = 0;
    uint64_t untold = 0;
    void refill(int64_t now) {
      int64_t more = (now - since) / kAgain;
      if (left + more >= kBurst) {
        left = kBurst, since = now;
      } else {
        left += static_cast<unsigned>(more), since += more * kAgain;
      }
    }
  };

  Bucket& find(const std::string& origin, int64_t now) {
    if (auto it = buckets_.find(origin); it != buckets_.end()) return it->second;
    if (buckets_.size() >= kOrigins && now >= sweep_due_) {
      sweep_due_ = now + kAgain;
      for (auto it = buckets_.begin(); it != buckets_.end();) {
        it->second.refill(now);
        bool forgiven = it->second.left == kBurst && it->second.untold == 0;
        it = forgiven ? buckets_.erase(it) : std::next(it);
      }
    }
    return buckets_[buckets_.size() >= kOrigins ? kOthers : origin];
  }

  std::map<std::string, Bucket> buckets_;
  int64_t sweep_due_ = 0;
};

}  // namespace tl
