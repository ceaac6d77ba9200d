// Two engines over loopback: reads, relays, lanes that break, and who is turned away; with all their threads.
#include <thread>
#include <vector>

#include "check.h"
#include "engine.h"

using namespace tl;
using test::Random;

namespace {

struct Host {
  std::string name;
  Key key{};
  std::string path;
  Engine engine;
  uint16_t port;

  explicit Host(const char* name)
      : name(name), key(random_key()), path("/tmp/tltest" + std::to_string(::getpid()) + name), engine(name, path, key, 256u << 20) {
    if (const char* folder = ::getenv("TL_CERTIFICATES")) {  // all of this once more, inside TLS
      std::string in = folder;
      engine.tcp().secure(std::make_shared<const Tls>(in + "/peer.pem", in + "/peer.key", in + "/ca.pem", "tensorlink"));
    }
    engine.start(1);
    port = engine.tcp().listen("127.0.0.1", 0, 0);
  }
  ~Host() { engine.close(); }
  Contact contact() const { return {{"127.0.0.1", port}, key}; }
  std::shared_ptr<TcpConnection> connect(const Host& to) {
    return std::static_pointer_cast<TcpConnection>(engine.tcp().connect(to.contact(), {to.name, 1}, patience()));
  }
  static Patience patience(Stop* stop = nullptr) { return {now_ns() + 20'000'000'000, stop}; }

  // A claim over fresh memory with a pattern in it.
  Descriptor put(uint64_t nbytes, uint64_t seed) {
    Claim claim;
    claim.blocks.push_back(engine.arena()->allocate(nbytes));
    char* data = claim.blocks[0]->data();
    Random random(seed);
    for (uint64_t i = 0; i + 8 <= nbytes; i += 8) {
      uint64_t word = random.next();
      std::memcpy(data + i, &word, 8);
    }
    Descriptor descriptor;
    const Extent& own = claim.blocks[0]->extent();
    descriptor.extents = {{own.segment, own.offset, nbytes}};
    descriptor.key = claim.key;
    descriptor.claim = engine.claim(std::move(claim));
    return descriptor;
  }
};

bool is_pattern(const char* data, uint64_t nbytes, uint64_t seed) {
  Random random(seed);
  for (uint64_t i = 0; i + 8 <= nbytes; i += 8) {
    uint64_t word = random.next();
    if (std::memcmp(data + i, &word, 8) != 0) return false;
  }
  return true;
}

void read(TcpConnection& from, const Descriptor& claim, std::vector<char>& into, Stop* stop = nullptr) {
  from.reads().read(claim, claim.extents, {{into.data(), into.size()}}, Host::patience(stop));
}

void reads_run_at_once_while_claims_end() {
  Host owner("owner"), reader("reader");
  auto connection = reader.connect(owner);
  constexpr uint64_t kSize = 1u << 20;
  std::vector<std::thread> readers;
  for (uint64_t thread = 0; thread < 3; ++thread)
    readers.emplace_back([&, thread] {
      std::vector<char> into(kSize);
      for (uint64_t i = 0; i < test::scaled(200); ++i) {
        uint64_t seed = thread * 1000 + i;
        Descriptor claim = owner.put(kSize, seed);
        std::thread ender([&] { owner.engine.release(claim.claim); });
        try {
          read(*connection, claim, into);
          CHECK(is_pattern(into.data(), kSize, seed));
        } catch (const Error& error) {
          CHECK(error.fault == Fault::stale);
        }
        ender.join();
      }
    });
  for (auto& thread : readers) thread.join();
}

void only_what_was_claimed_can_be_read() {
  Host owner("owner"), reader("reader");
  auto connection = reader.connect(owner);
  Descriptor claim = owner.put(kPage, 1);
  std::vector<char> into(kPage);
  for (uint64_t offset : {uint64_t{1}, kPage, ~uint64_t{0}}) {
    Descriptor bad = claim;
    bad.extents[0].offset += offset;
    CHECK_FAULT(read(*connection, bad, into), Fault::corrupt);
  }
  Descriptor forged = claim;
  forged.key[3] ^= 1;
  CHECK_FAULT(read(*connection, forged, into), Fault::stale);
  Contact wrong = owner.contact();
  wrong.key[0] ^= 1;
  CHECK_FAULT(reader.engine.tcp().connect(wrong, {"owner", 1}, Host::patience()), Fault::refused);
  CHECK_FAULT(reader.engine.tcp().connect(owner.contact(), {"owner", 2}, Host::patience()), Fault::refused);
  CHECK(owner.engine.tcp().take_refusals().size() == 1);
  read(*connection, claim, into);
  CHECK(is_pattern(into.data(), kPage, 1));
}

void a_cancel_is_a_fence() {
  Host owner("owner"), reader("reader");
  auto connection = reader.connect(owner);
  constexpr uint64_t kSize = 64u << 20;
  Descriptor claim = owner.put(kSize, 1);
  std::vector<char> into(kSize);
  for (uint64_t i = 0; i < test::scaled(40); ++i) {
    Stop stop;
    std::atomic<bool> over{false};
    std::thread thread([&] {
      try {
        read(*connection, claim, into, &stop);
      } catch (const Error& error) {
        CHECK(error.fault == Fault::cancelled);
      }
      over = true;
    });
    std::this_thread::sleep_for(std::chrono::microseconds(i * 300));
    stop.set();
    thread.join();
    CHECK(over);
    std::memset(into.data(), 7, 4096);
  }
  read(*connection, claim, into);
  CHECK(is_pattern(into.data(), kSize, 1));
}

// Three readers at once, each of which passes on what it gets.
void a_chain_gets_all_of_it() {
  Host owner("owner");
  constexpr uint64_t kSize = 8u << 20;
  for (uint64_t round = 0; round < test::scaled(20) + 1; ++round) {
    Descriptor claim = owner.put(kSize, round);
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<Host>> hosts;
    for (const char* name : {"one", "two", "three"}) hosts.push_back(std::make_unique<Host>(name));
    for (auto& host : hosts)
      threads.emplace_back([&, host = host.get()] {
        auto connection = host->connect(owner);
        auto block = host->engine.arena()->allocate(kSize);
        Relay relay;
        Claim own;
        own.blocks.push_back(block);
        own.filling = relay.filling = std::make_shared<Filling>();
        relay.descriptor.key = own.key;
        relay.descriptor.extents = {{block->extent().segment, block->extent().offset, kSize}};
        relay.descriptor.claim = host->engine.claim(std::move(own));
        relay.advanced = [&engine = host->engine] { engine.nudge(); };
        connection->reads().read(claim, claim.extents, {{block->data(), kSize}}, Host::patience(), &relay);
        CHECK(is_pattern(block->data(), kSize, round));
      });
    for (auto& thread : threads) thread.join();
  }
}

void copy_number(const void* source, char* to) { std::memcpy(to, source, 8); }

// Messages of one thread over lanes that break again and again arrive in order, each once.
void broken_lanes_lose_nothing() {
  Host sender("sender"), receiver("receiver");
  const uint64_t count = test::scaled(20000);
  SourceId source = receiver.engine.inbox().source("sender");
  std::thread thread([&] {
    for (uint64_t next = 0; next < count;) {
      std::unique_ptr<Message> message;
      receiver.engine.wait([&] { return (message = receiver.engine.inbox().take(source, "t")) != nullptr; }, now_ns() + 20'000'000'000);
      CHECK(message);
      uint64_t number;
      std::memcpy(&number, message->payload(), sizeof number);
      CHECK(number == next++);
      message->carrier->credit(message->size);
    }
  });
  auto connection = sender.connect(receiver);
  for (uint64_t number = 0, broken = 0; number < count;) {
    if (number % 997 == 996 && std::exchange(broken, number) != number) connection->distrust();
    try {
      if (connection->try_send({"t", {}, {}, 8, copy_number, &number})) ++number;
    } catch (const Error&) {
      connection = sender.connect(receiver);
    }
  }
  while (connection->owes()) {
    std::this_thread::yield();
    if (!connection->up()) connection = sender.connect(receiver);
  }
  thread.join();
}

}  // namespace

namespace tl::test {

void tcp_tests() {
  only_what_was_claimed_can_be_read();
  reads_run_at_once_while_claims_end();
  a_cancel_is_a_fence();
  a_chain_gets_all_of_it();
  broken_lanes_lose_nothing();
}

}  // namespace tl::test
