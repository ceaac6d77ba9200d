// The inbox: order, duplicates, messages that come early, matching.
#include "inbox.h"

#include <algorithm>
#include <thread>

#include "check.h"
#include "error.h"

using namespace tl;
using test::Random;

namespace {

std::string frame(const std::string& tag, uint64_t sequence, const std::string& payload) {
  FrameHeader header{FrameHeader::kMagic, static_cast<uint16_t>(tag.size()), 0, 0, 0, payload.size(), sequence};
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + tag + payload;
}

std::unique_ptr<Message> message(SourceId source, uint64_t sequence, const std::string& tag = "", uint64_t incarnation = 1) {
  std::string bytes = frame(tag, sequence, std::to_string(sequence));
  auto made = Message::parse(bytes.data(), bytes.size());
  made->source = source;
  made->incarnation = incarnation;
  return made;
}

uint64_t number(const std::unique_ptr<Message>& m) { return m ? std::stoull(std::string(m->payload(), m->payload_size)) : 0; }

void any_order_becomes_order() {
  Random random(3);
  for (int round = 0; round < 200; ++round) {
    Inbox inbox;
    SourceId a = inbox.source("a");
    std::vector<uint64_t> order(50);
    for (size_t i = 0; i < order.size(); ++i) order[i] = i + 1;
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    for (uint64_t sequence : order) {
      CHECK(inbox.deliver(message(a, sequence)));
      CHECK(!inbox.deliver(message(a, sequence)));  // a duplicate: early or late, it counts once
    }
    for (uint64_t i = 1; i <= 50; ++i) CHECK(number(inbox.take(a, "")) == i);
    CHECK(!inbox.take(a, "") && inbox.queued() == 0 && inbox.received(a, 1) == 50);
  }
}

void a_gap_holds_back_only_its_own_stream() {
  Inbox inbox;
  SourceId a = inbox.source("a"), b = inbox.source("b");
  inbox.deliver(message(a, 2));
  inbox.deliver(message(b, 1));
  inbox.deliver(message(a, 1, "", 2));  // the next incarnation counts from one again
  CHECK(number(inbox.take(b, "")) == 1 && number(inbox.take(a, "")) == 1 && !inbox.take(a, ""));
  inbox.deliver(message(a, 1));
  CHECK(number(inbox.take(a, "")) == 1 && number(inbox.take(a, "")) == 2);
}

void too_many_gaps_are_corrupt() {
  Inbox inbox;
  SourceId a = inbox.source("a");
  for (uint64_t i = 0; i < 1024; ++i) CHECK(inbox.deliver(message(a, 2 + i)));
  CHECK_FAULT(inbox.deliver(message(a, 5000)), Fault::corrupt);
}

void matching_follows_posting_and_tags() {
  Inbox inbox;
  SourceId a = inbox.source("a"), b = inbox.source("b");
  auto first = inbox.post(kAnySource, "x"), second = inbox.post(a, "x"), other = inbox.post(a, "");
  inbox.deliver(message(b, 1, "y"));
  inbox.deliver(message(a, 1, "x"));
  inbox.deliver(message(a, 2, "x"));
  CHECK(inbox.complete(*first) && inbox.complete(*second) && !inbox.complete(*other));
  CHECK(number(inbox.collect(first)) == 1 && number(inbox.collect(second)) == 2 && !inbox.collect(other));
  inbox.deliver(message(a, 3));
  CHECK(number(inbox.take(a, "")) == 3);  // the withdrawn receive took nothing
  CHECK(!inbox.take(kAnySource, "") && number(inbox.take(kAnySource, "y")) == 1);
}

void put_back_restores_the_order() {
  Inbox inbox;
  SourceId a = inbox.source("a");
  for (uint64_t i = 1; i <= 4; ++i) inbox.deliver(message(a, i));
  auto one = inbox.take(a, ""), two = inbox.take(a, "");
  inbox.put_back(std::move(two));
  inbox.put_back(std::move(one));
  for (uint64_t i = 1; i <= 4; ++i) CHECK(number(inbox.take(a, "")) == i);
}

void a_death_ends_what_waits_for_it_alone() {
  Inbox inbox;
  SourceId a = inbox.source("a");
  auto named = inbox.post(a, "x"), any = inbox.post(kAnySource, "x");
  inbox.set_down(a, true);
  CHECK(inbox.complete(*named) && named->lost && !inbox.complete(*any) && inbox.is_down(a) && inbox.downs(a) == 1);
  CHECK(inbox.post(a, "z")->lost);
  inbox.deliver(message(a, 1, "z"));  // it was complete when its sender died
  CHECK(number(inbox.take(a, "z")) == 1);
}

void a_lapse_ends_what_waits_for_anyone_in_particular() {
  Inbox inbox;
  SourceId a = inbox.source("a");
  auto named = inbox.post(a, "x"), any = inbox.post(kAnySource, "x");
  inbox.lapse();
  CHECK(inbox.complete(*named) && named->lapsed && !named->lost && !inbox.complete(*any) && !inbox.is_down(a) && inbox.lapses() == 1);
  auto later = inbox.post(a, "x");
  CHECK(!inbox.complete(*later));
}

void of_many_incarnations_the_last_are_kept_apart() {
  Inbox inbox;
  SourceId a = inbox.source("a"), b = inbox.source("b");
  inbox.deliver(message(b, 1, "", 1));
  for (uint64_t incarnation = 1; incarnation <= 100; ++incarnation) CHECK(inbox.deliver(message(a, 1, "", incarnation)));
  CHECK(!inbox.deliver(message(a, 1, "", 100)) && !inbox.deliver(message(a, 1, "", 95)));  // duplicates
  CHECK(!inbox.deliver(message(a, 1, "", 5)) && !inbox.deliver(message(a, 2, "", 5)));     // of one that is long gone
  CHECK(inbox.deliver(message(a, 2, "", 95)) && inbox.received(b, 1) == 1);
  for (int i = 0; i < 101; ++i) CHECK(inbox.take(a, "") != nullptr);
  CHECK(!inbox.take(a, ""));
}

// Two carriers bring overlapping halves of a stream while two threads take from it.
void carriers_and_takers_race() {
  Inbox inbox;
  SourceId a = inbox.source("a");
  const uint64_t count = test::scaled(40'000);
  std::atomic<uint64_t> taken{0}, sum{0};
  auto carry = [&](uint64_t from) {
    for (uint64_t i = from; i <= count; i += 1 + i % 2) {
      while (i > inbox.received(a, 1) + 500) std::this_thread::yield();
      inbox.deliver(message(a, i));
    }
  };
  auto carry_all = [&] {
    for (uint64_t i = 1; i <= count; ++i) inbox.deliver(message(a, i));
  };
  auto take = [&] {
    uint64_t last = 0;
    while (taken < count)
      if (auto m = inbox.take(a, "")) {
        uint64_t n = number(m);
        CHECK(n > last);
        last = n, sum += n, ++taken;
      } else {
        std::this_thread::yield();
      }
  };
  std::thread threads[] = {std::thread(carry, 1), std::thread(carry_all), std::thread(take), std::thread(take)};
  for (std::thread& thread : threads) thread.join();
  CHECK(sum == count * (count + 1) / 2);
}

void frames_of_noise_are_corrupt() {
  Random random(5);
  std::string good = frame("tag", 1, "payload");
  for (uint64_t round = 0; round < test::scaled(200'000); ++round) {
    std::string bad = good.substr(0, random.below(good.size() + 1));
    for (int i = 0; i < 3 && !bad.empty(); ++i) bad[random.below(bad.size())] = static_cast<char>(random.next());
    try {
      auto m = Message::parse(bad.data(), bad.size());
      CHECK(m->payload_at + m->payload_size == bad.size() && m->tag().size() <= bad.size());
    } catch (const Error& error) {
      CHECK(error.fault == Fault::corrupt);
    }
  }
}

}  // namespace

void tl::test::inbox_tests() {
  any_order_becomes_order();
  a_gap_holds_back_only_its_own_stream();
  too_many_gaps_are_corrupt();
  matching_follows_posting_and_tags();
  put_back_restores_the_order();
  a_death_ends_what_waits_for_it_alone();
  a_lapse_ends_what_waits_for_anyone_in_particular();
  of_many_incarnations_the_last_are_kept_apart();
  carriers_and_takers_race();
  frames_of_noise_are_corrupt();
}
