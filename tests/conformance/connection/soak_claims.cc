// SPDX-License-Identifier: Apache-2.0
// The long run: messages of mixed sizes both ways at once, every byte checked, and no memory or
// descriptor leaked. 100 000 messages each way, and a million in ./dev test --all and ./dev soak
// transport; a fiftieth of these under tsan, and for connections that carry device memory over
// others, whose own long run is another program's. WEFT_SOAK_MESSAGES sets another number.
#include <array>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include <weft/tests/conformance/connection/far.h>
#include <weft/tests/conformance/connection/leaving.h>
#include <weft/tests/harness/all_settings.h>
#include <weft/tests/harness/leftovers.h>
#include <weft/tests/harness/sanitized.h>

namespace weft::conformance {
namespace {

using harness::live_bytes;
using harness::open_descriptors;

#ifdef WEFT_TEST_SHORT_SOAK
constexpr std::uint64_t kShortened = 50;
#else
constexpr std::uint64_t kShortened = harness::kThreadSanitized ? 50 : 1;
#endif

std::uint64_t messages() {
  const char* const given = std::getenv("WEFT_SOAK_MESSAGES");
  return given != nullptr ? std::strtoull(given, nullptr, 10)
                          : (harness::runs_all_settings() ? 1'000'000 : 100'000) / kShortened;
}

constexpr std::size_t kLargest = 1 << 20;
constexpr std::size_t kMaxPayloads = 3;

// The contents of message `number` of a direction, the same on both ends. Of 100 messages, 90 are
// small, 9 fit a ring easily, and one may be as large as the ring.
class Script {
 public:
  Script(std::uint32_t direction, transport::Transport& on)
      : memory_(memory_for_claims(on, 2 * kLargest)) {
    std::memcpy(memory_.slice.data, pattern(direction, 2 * kLargest).data(), 2 * kLargest);
  }

  struct Message {
    std::uint64_t number;
    std::size_t payloads;
    std::array<Slice, kMaxPayloads> contents;
  };
  Message message(std::uint64_t number) const {
    std::uint64_t state = (number + 1) * 0x9e3779b97f4a7c15u;
    const auto upto = [&](std::uint64_t limit) {
      state ^= state >> 29;
      state *= 0xbf58476d1ce4e5b9u;
      return (state >> 11) % (limit + 1);
    };
    const std::uint64_t kind = upto(99);
    const std::size_t largest = kind < 90 ? 256 : kind < 99 ? 64 << 10 : kLargest;
    Message result{number, upto(kMaxPayloads), {}};
    for (std::size_t i = 0; i < result.payloads; ++i) {
      const std::size_t bytes = upto(largest);
      result.contents[i] = memory_.slice.part(upto(kLargest - 1), bytes);
    }
    return result;
  }

 private:
  const ClaimsMemory memory_;
};

bool same_bytes(const void* a, const Slice& b) {
  return b.bytes == 0 || std::memcmp(a, b.data, b.bytes) == 0;
}

// Receives one direction. Every second message is read in place, if it is in place; the others are
// copied out. The connection's handlers keep the object alive.
class Checker {
 public:
  Checker(Connection& connection, std::uint32_t direction, transport::Transport& on)
      : connection_(connection), script_(direction, on), on_(on) {}
  static std::shared_ptr<Checker> begin(Connection& connection, std::uint32_t direction,
                                        transport::Transport& on) {
    const auto self = std::make_shared<Checker>(connection, direction, on);
    connection.receive({[self](const Arrival& arrival) { self->take(arrival); },
                        [self](const Error&) { self->ended_ = true; }});
    return self;
  }
  std::uint64_t checked() const { return checked_; }
  std::uint64_t wrong() const { return wrong_; }
  bool ended() const { return ended_; }

 private:
  using Landing = std::array<ClaimsMemory, kMaxPayloads>;

  void take(const Arrival& arrival) {
    if (taken_ == messages()) return ended(true, connection_.accept({}, {}, {}));  // the farewell
    const auto expected = script_.message(taken_++);
    std::uint64_t number = ~expected.number;
    if (arrival.header.size() == sizeof number)
      std::memcpy(&number, arrival.header.data(), sizeof number);
    bool good = number == expected.number && arrival.sizes.size() == expected.payloads;
    for (std::size_t i = 0; good && i < expected.payloads; ++i)
      good = arrival.sizes[i] == expected.contents[i].bytes;
    if (!good) return ended(false, connection_.accept({}, {}, {}));
    if (!arrival.in_place.empty() && expected.number % 2 == 0) {
      auto left = arrival.in_place;
      for (std::size_t i = 0; i < expected.payloads; ++i) {
        good &= same_bytes(left.data(), expected.contents[i]);
        left = left.subspan(expected.contents[i].bytes);
      }
      return ended(good, connection_.accept({}, {}, {}));
    }
    // A connection of device memory announces the next message while the payloads of this one are
    // still being copied.
    const auto landing = free_landing();
    std::array<Slice, kMaxPayloads> to;
    for (std::size_t i = 0; i < expected.payloads; ++i)
      to[i] = (*landing)[i].slice.part(0, expected.contents[i].bytes);
    const Op op = connection_.accept(std::span(to).first(expected.payloads), {}, {});
    const auto compare = [this, expected, landing] {
      bool is_same = true;
      for (std::size_t i = 0; i < expected.payloads; ++i) {
        is_same &= same_bytes((*landing)[i].slice.data, expected.contents[i]);
      }
      std::lock_guard lock(free_mutex_);
      free_.push_back(landing);
      return is_same;
    };
    if (op.ended()) return ended(compare(), op);
    op.on_ended([this, op, compare] { ended(compare(), op); });
  }
  std::shared_ptr<Landing> free_landing() {
    std::lock_guard lock(free_mutex_);
    if (free_.empty()) {
      const auto made = std::make_shared<Landing>();
      for (auto& piece : *made) piece = memory_for_claims(on_, kLargest);
      return made;
    }
    const auto found = free_.back();
    free_.pop_back();
    return found;
  }
  void ended(bool is_good, const Op& op) {
    if (!is_good || op.error()) ++wrong_;
    ++checked_;
  }

  Connection& connection_;
  const Script script_;
  transport::Transport& on_;
  std::uint64_t taken_ = 0;  // used on the loop's thread
  std::mutex free_mutex_;
  std::vector<std::shared_ptr<Landing>> free_;
  std::atomic<std::uint64_t> checked_{0};
  std::atomic<std::uint64_t> wrong_{0};
  std::atomic<bool> ended_{false};
};

// Sends messages [begin, end) and waits until as many have arrived; limits how many are under way.
void exchange(Connection& connection, EventLoop& loop, const Script& mine, const Checker& checker,
              std::uint64_t begin, std::uint64_t end) {
  std::vector<Op> under_way(256);
  for (std::uint64_t number = begin; number < end; ++number) {
    const auto message = mine.message(number);
    Op& oldest = under_way[number % under_way.size()];
    expect_good(oldest);
    oldest = connection.send(std::as_bytes(std::span(&message.number, 1)),
                             std::span(message.contents).first(message.payloads), {}, {});
  }
  for (const Op& op : under_way) expect_good(op);
  const Deadline limit = Deadline::in(std::chrono::minutes(10));
  EXPECT_TRUE(loop.drive([&] { return checker.checked() >= end || checker.ended(); }, limit));
  EXPECT_GE(checker.checked(), end) << "the connection ended early";
  EXPECT_EQ(checker.wrong(), 0u);
}

// Runs one end. The first tenth of the messages brings every buffer and pool to its full size;
// after that nothing may grow. `meet` waits for the other end if that is in this process, whose
// descriptors and memory are counted here.
void run_end(transport::Transport& on, Connection& connection, EventLoop& loop, std::uint32_t mine,
             std::uint32_t theirs, const std::function<void()>& meet) {
  const Script sent(mine, on);
  const auto kept = Checker::begin(connection, theirs, on);
  const Checker& checker = *kept;
  const std::uint64_t first = messages() / 10;
  exchange(connection, loop, sent, checker, 0, first);
  meet();
  forget_for_claims(on);
  const auto descriptors = open_descriptors();
  const std::size_t bytes = live_bytes();
  meet();
  exchange(connection, loop, sent, checker, first, messages());
  meet();
  forget_for_claims(on);
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_LE(live_bytes(), bytes + (1 << 20)) << "memory grows with the number of messages";
  meet();
  // Neither end leaves while the other still measures.
  expect_good(connection.send({}, {}, {}, {}));
  EXPECT_TRUE(
      loop.drive([&] { return checker.checked() > messages() || checker.ended(); }, patience()));
}

using ConnectionSoak = ConnectionProcessClaims;

TEST_P(ConnectionSoak, MixedMessagesArriveWithoutLeaks) {
  lifetime = std::chrono::hours(1);
  const bool is_started =
      start([](Far& far) { run_end(*far.transport, *far.connection, *far.loop, 1, 2, [] {}); });
  if (!is_started) return;
  run_end(*transport, *near, *loop, 2, 1, [] {});
  child->expect_success();
}

INSTANTIATE_TEST_SUITE_P(Transport, ConnectionSoak, testing::ValuesIn(connecting_backends()),
                         [](const auto& one) { return one.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ConnectionSoak);

class ConnectionSoakOfThreads : public ConnectionClaims {};

TEST_P(ConnectionSoakOfThreads, MixedMessagesArriveWithoutLeaks) {
  if (!why_within_the_process(GetParam()))
    GTEST_SKIP() << GetParam() << " has the same between processes";
  ConnectionPair pair = open();
  std::barrier both(2);
  const auto meet = [&] { both.arrive_and_wait(); };
  std::thread other([&] { run_end(*transport_, *pair.far, *pair.far_loop, 1, 2, meet); });
  run_end(*transport_, *pair.near, *pair.near_loop, 2, 1, meet);
  other.join();
}

INSTANTIATE_TEST_SUITE_P(Transport, ConnectionSoakOfThreads,
                         testing::ValuesIn(connecting_backends()),
                         [](const auto& one) { return one.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ConnectionSoakOfThreads);

}  // namespace
}  // namespace weft::conformance
