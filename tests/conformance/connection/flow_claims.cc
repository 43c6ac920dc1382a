// SPDX-License-Identifier: Apache-2.0
// When things happen: the two phases of receiving, fences, pins, back-pressure and limits.
#include <array>

#include <weft/tests/conformance/connection/connection_pair.h>

namespace weft::conformance {
namespace {

// Records messages and leaves it to the test to accept them.
struct Manual {
  explicit Manual(Connection& connection) {
    connection.receive({[kept = kept](const Arrival& arrival) {
                          std::lock_guard lock(kept->mutex);
                          kept->headers.emplace_back(
                              reinterpret_cast<const char*>(arrival.header.data()),
                              arrival.header.size());
                          kept->sizes.assign(arrival.sizes.begin(), arrival.sizes.end());
                        },
                        [](const Error&) {}});
  }
  std::size_t count() const {
    std::lock_guard lock(kept->mutex);
    return kept->headers.size();
  }
  std::string header(std::size_t number) const {
    std::lock_guard lock(kept->mutex);
    return kept->headers.at(number);
  }
  std::vector<std::uint64_t> sizes() const {
    std::lock_guard lock(kept->mutex);
    return kept->sizes;
  }
  bool wait(EventLoop& loop, std::size_t messages) const {
    return loop.drive([&] { return count() >= messages; }, patience());
  }
  struct Kept {
    std::mutex mutex;
    std::vector<std::string> headers;
    std::vector<std::uint64_t> sizes;
  };
  std::shared_ptr<Kept> kept = std::make_shared<Kept>();
};

TEST_P(ConnectionClaims, NextMessageAwaitsAcceptOfTheLast) {
  const auto payload = pattern(1, 1000);
  const ConnectionPair pair = open();
  const Manual manual(*pair.far);
  pair.near->send(bytes_of("one"), std::array{slice_of(payload)}, nullptr, {});
  pair.near->send(bytes_of("two"), {}, nullptr, {});
  ASSERT_TRUE(manual.wait(*pair.far_loop, 1));
  EXPECT_EQ(manual.sizes(), std::vector<std::uint64_t>{1000});
  for (int i = 0; i < 10; ++i) flush(*pair.far_loop);
  EXPECT_EQ(manual.count(), 1u);
  std::vector<std::byte> got(1000);
  expect_good(pair.far->accept(std::array{slice_of(got)}, nullptr, {}));
  EXPECT_TRUE(same(got, payload));
  ASSERT_TRUE(manual.wait(*pair.far_loop, 2));
  EXPECT_EQ(manual.header(1), "two");
}

TEST_P(ConnectionClaims, PayloadsLandAtTheirDestinations) {
  const ConnectionPair pair = open();
  const Manual manual(*pair.far);
  std::size_t message = 0;
  for (const std::size_t bytes : {1u, 4096u, 3u << 20}) {
    const auto first = pattern(1, bytes);
    const auto second = pattern(2, bytes + 1);
    const Op sent = pair.near->send({}, std::array{slice_of(first), slice_of(second)}, nullptr, {});
    ASSERT_TRUE(manual.wait(*pair.far_loop, ++message));
    std::vector<std::byte> got(2 * bytes + 3, std::byte{0x55});
    const Slice all = slice_of(got);
    expect_good(pair.far->accept(std::array{all.part(1, bytes), all.part(bytes + 1, bytes + 1)},
                                 nullptr, {}));
    expect_good(sent);
    std::vector<std::byte> expected{std::byte{0x55}};
    expected.insert(expected.end(), first.begin(), first.end());
    expected.insert(expected.end(), second.begin(), second.end());
    expected.push_back(std::byte{0x55});
    EXPECT_TRUE(same(got, expected)) << bytes;
  }
}

TEST_P(ConnectionClaims, AcceptWithoutDestinationsDiscards) {
  const ConnectionPair pair = open();
  const Manual manual(*pair.far);
  const auto payload = pattern(3, 3 << 20);
  const Op large = pair.near->send(bytes_of("large"), std::array{slice_of(payload)}, nullptr, {});
  const Op small =
      pair.near->send(bytes_of("small"), std::array{slice_of(payload).part(0, 10)}, nullptr, {});
  pair.near->send(bytes_of("after"), {}, nullptr, {});
  ASSERT_TRUE(manual.wait(*pair.far_loop, 1));
  expect_good(pair.far->accept({}, nullptr, {}));
  ASSERT_TRUE(manual.wait(*pair.far_loop, 2));
  expect_good(pair.far->accept({}, nullptr, {}));
  ASSERT_TRUE(manual.wait(*pair.far_loop, 3));
  EXPECT_EQ(manual.header(0), "large");
  EXPECT_EQ(manual.header(1), "small");
  EXPECT_EQ(manual.header(2), "after");
  expect_good(large);
  expect_good(small);
}

TEST_P(ConnectionClaims, RefusedDestinationsKeepTheMessage) {
  const auto payload = pattern(4, 100);
  const ConnectionPair pair = open();
  const Manual manual(*pair.far);
  std::vector<std::byte> got(100);
  EXPECT_EQ(failure_of(pair.far->accept({}, nullptr, {})).blame(), Blame::Caller)
      << "nothing has arrived";
  pair.near->send({}, std::array{slice_of(payload)}, nullptr, {});
  ASSERT_TRUE(manual.wait(*pair.far_loop, 1));
  const Slice all = slice_of(got);
  const Slice elsewhere{got.data(), 100, Device::cuda(0)};
  const Slice nowhere{nullptr, 100, Device::host()};
  EXPECT_EQ(failure_of(pair.far->accept(std::array{all.part(0, 99)}, nullptr, {})).blame(),
            Blame::Caller);
  EXPECT_EQ(failure_of(pair.far->accept(std::array{all, all}, nullptr, {})).blame(), Blame::Caller);
  EXPECT_EQ(failure_of(pair.far->accept(std::array{nowhere}, nullptr, {})).blame(), Blame::Caller);
  if (!pair.far->capabilities().device_memory) {
    EXPECT_EQ(failure_of(pair.far->accept(std::array{elsewhere}, nullptr, {})).blame(),
              Blame::Caller);
  }
  expect_good(pair.far->accept(std::array{all}, nullptr, {}));
  EXPECT_TRUE(same(got, payload));
  EXPECT_EQ(failure_of(pair.far->accept(std::array{all}, nullptr, {})).blame(), Blame::Caller)
      << "accepted twice";
}

TEST_P(ConnectionClaims, InPlacePayloadsEqualTheSent) {
  const auto first = pattern(1, 300);
  const auto second = pattern(2, 200);
  const ConnectionPair pair = open();
  Mailbox near_mail(*pair.near, pair.near_loop);
  struct Seen {
    std::atomic<bool> done{false};
    bool was_in_place = false;
    std::vector<std::byte> bytes;
  };
  const auto seen = std::make_shared<Seen>();
  pair.far->receive({[seen, far = pair.far.get()](const Arrival& arrival) {
                       if (arrival.sizes.empty())
                         return static_cast<void>(far->accept({}, nullptr, {}));
                       seen->was_in_place = !arrival.in_place.empty();
                       seen->bytes.assign(arrival.in_place.begin(), arrival.in_place.end());
                       seen->done = true;  // before another thread may accept
                     },
                     [](const Error&) {}});
  pair.near->send({}, std::array{slice_of(first), slice_of(second)}, nullptr, {});
  ASSERT_TRUE(pair.far_loop->drive([&] { return seen->done.load(); }, patience()));
  if (seen->was_in_place) {
    std::vector<std::byte> both = first;
    both.insert(both.end(), second.begin(), second.end());
    EXPECT_TRUE(same(seen->bytes, both));
  }
  std::vector<std::byte> got(500);  // with destinations they are copied nevertheless
  const Slice all = slice_of(got);
  expect_good(pair.far->accept(std::array{all.part(0, 300), all.part(300, 200)}, nullptr, {}));
  EXPECT_TRUE(std::equal(first.begin(), first.end(), got.begin()));
  EXPECT_TRUE(std::equal(second.begin(), second.end(), got.begin() + 300));
}

TEST_P(ConnectionClaims, DestinationsAreWrittenAfterTheirFence) {
  for (const std::size_t bytes : {64u, 3u << 20}) {
    const auto payload = pattern(5, bytes);
    const ConnectionPair pair = open();
    const Manual manual(*pair.far);
    pair.near->send({}, std::array{slice_of(payload)}, nullptr, {});
    ASSERT_TRUE(manual.wait(*pair.far_loop, 1));
    std::vector<std::byte> got(bytes, std::byte{0x11});
    const std::vector<std::byte> before = got;
    const auto gate = std::make_shared<HostFlag>();
    const Op accepted = pair.far->accept(std::array{slice_of(got)}, nullptr, Fence(gate));
    for (int i = 0; i < 10; ++i) flush(*pair.far_loop);
    EXPECT_FALSE(accepted.ended());
    EXPECT_TRUE(same(got, before));
    gate->raise();
    expect_good(accepted);
    EXPECT_TRUE(same(got, payload));
  }
}

TEST_P(ConnectionClaims, PayloadsAreReadInOrderAfterFences) {
  const ConnectionPair pair = open();
  Mailbox near_mail(*pair.near, pair.near_loop);
  Mailbox mail(*pair.far, pair.far_loop);
  warm_up(pair, near_mail, mail);
  std::vector<std::byte> late(2000);
  const auto final = pattern(6, 2000);
  const auto gate = std::make_shared<HostFlag>();
  const auto second_gate = std::make_shared<HostFlag>();
  const Op first =
      pair.near->send(bytes_of("late"), std::array{slice_of(late)}, nullptr, Fence(gate));
  const Op second = pair.near->send(bytes_of("ready"), {}, nullptr, {});
  const Op third = pair.near->send(bytes_of("later"), {}, nullptr, Fence(second_gate));
  const Op fourth = pair.near->send(bytes_of("last"), {}, nullptr, {});
  for (int i = 0; i < 10; ++i) flush(*pair.near_loop);
  EXPECT_FALSE(first.ended() || second.ended() || third.ended() || fourth.ended());
  EXPECT_EQ(mail.count(), 1u);
  late = final;
  gate->raise();
  const Letter letter = mail.next();
  EXPECT_EQ(letter.header, "late");
  EXPECT_TRUE(same(letter.payloads.at(0), final));
  EXPECT_EQ(mail.next().header, "ready");
  EXPECT_FALSE(third.ended() || fourth.ended());
  second_gate->raise();
  EXPECT_EQ(mail.next().header, "later");
  EXPECT_EQ(mail.next().header, "last");
  for (const Op& op : {first, second, third, fourth}) expect_good(op);
}

TEST_P(ConnectionClaims, PinsAreHeldExactlyUntilDone) {
  const ConnectionPair pair = open();
  const Manual manual(*pair.far);
  const auto payload = std::make_shared<std::vector<std::byte>>(
      pattern(7, 64 << 20));  // more than any buffer on the way holds
  auto pin = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = pin;
  const Op sent = pair.near->send({}, std::array{slice_of(*payload)}, std::move(pin), {});
  ASSERT_TRUE(manual.wait(*pair.far_loop, 1));
  for (int i = 0; i < 10; ++i) flush(*pair.near_loop);
  EXPECT_FALSE(sent.ended());
  EXPECT_FALSE(watch.expired());
  std::vector<std::byte> got(payload->size());
  auto far_pin = std::make_shared<int>(0);
  const std::weak_ptr<int> far_watch = far_pin;
  const auto gate = std::make_shared<HostFlag>();
  const Op accepted = pair.far->accept(std::array{slice_of(got)}, std::move(far_pin), Fence(gate));
  flush(*pair.far_loop);
  EXPECT_FALSE(far_watch.expired());
  gate->raise();
  expect_good(accepted);
  EXPECT_TRUE(far_watch.expired());
  expect_good(sent);
  EXPECT_TRUE(watch.expired());
}

TEST_P(ConnectionClaims, InlineMessageIsDoneAtOnce) {
  const ConnectionPair pair = open();
  const std::size_t bytes = pair.near->capabilities().inline_bytes;
  if (bytes == 0) GTEST_SKIP() << GetParam() << " sends nothing inline";
  Mailbox near_mail(*pair.near, pair.near_loop);
  Mailbox mail(*pair.far, pair.far_loop);
  warm_up(pair, near_mail, mail);
  auto payload = pattern(8, bytes);
  const auto original = payload;
  auto pin = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = pin;
  const Op sent = pair.near->send({}, std::array{slice_of(payload)}, std::move(pin), {});
  EXPECT_TRUE(sent.ended());
  EXPECT_TRUE(sent.done().query());
  EXPECT_TRUE(watch.expired());
  std::fill(payload.begin(), payload.end(), std::byte{0});
  EXPECT_TRUE(same(mail.next().payloads.at(0), original));
}

thread_local bool is_inside_call = false;

struct Inside {
  Inside() { is_inside_call = true; }
  ~Inside() { is_inside_call = false; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

TEST_P(ConnectionClaims, CallsRunNoCallerCode) {
  struct Seen {
    std::atomic<int> inside{0};
    std::atomic<int> ended{0};
    std::atomic<bool> far_closed{false};
    void look() { inside += is_inside_call; }
  };
  const auto seen = std::make_shared<Seen>();
  const auto look_at_end = [seen] {
    seen->look();
    ++seen->ended;
  };
  const ConnectionPair pair = open();
  pair.far->receive({[seen, far = pair.far.get()](const Arrival&) {
                       seen->look();
                       const Inside inside;
                       far->accept({}, nullptr, {});
                     },
                     [seen](const Error&) {
                       seen->look();
                       seen->far_closed = true;
                     }});
  const auto payload = pattern(9, 1 << 20);
  constexpr int kMessages = 50;
  for (int i = 0; i < kMessages; ++i) {
    Op op;
    {
      const Inside inside;
      op = pair.near->send({}, std::array{slice_of(payload)}, nullptr, {});
    }
    op.on_ended(look_at_end);
  }
  EXPECT_TRUE(pair.near_loop->drive([&] { return seen->ended == kMessages; }, patience()));
  const auto never = std::make_shared<HostFlag>();
  const Op stuck = pair.near->send({}, {}, nullptr, Fence(never));
  stuck.on_ended(look_at_end);
  {
    const Inside inside;
    pair.near->close(Error(Blame::Cancelled, "enough"));
  }
  failure_of(stuck);
  EXPECT_TRUE(pair.far_loop->drive([&] { return seen->far_closed.load(); }, patience()));
  EXPECT_EQ(seen->inside, 0);
}

TEST_P(ConnectionClaims, FullQueueRefusesSendsWithBusy) {
  const ConnectionPair pair = open();
  const Manual manual(*pair.far);
  const auto payload = pattern(10, 64 << 10);
  std::vector<Op> ops;
  const std::size_t enough = pair.near->capabilities().max_queued + (64 << 20) / payload.size();
  for (std::size_t i = 0; i < enough; ++i) {
    ops.push_back(
        pair.near->send(bytes_of(std::to_string(i)), std::array{slice_of(payload)}, nullptr, {}));
    if (ops.back().ended() && ops.back().error()) break;
  }
  const Error full = failure_of(ops.back());
  EXPECT_EQ(full.blame(), Blame::Busy);
  ops.pop_back();
  EXPECT_FALSE(ops.back().ended());
  for (std::size_t i = 0; i < 50; ++i) {  // the connection is as good as before
    ASSERT_TRUE(manual.wait(*pair.far_loop, i + 1));
    std::vector<std::byte> got(payload.size());
    expect_good(pair.far->accept(std::array{slice_of(got)}, nullptr, {}));
    ASSERT_TRUE(same(got, payload));
    ASSERT_EQ(manual.header(i), std::to_string(i));
  }
  pair.near->close(Error(Blame::Cancelled, "the rest is not wanted"));
  expect_good(ops.front());
  EXPECT_EQ(failure_of(ops.back()).blame(), Blame::Cancelled);
}

TEST_P(ConnectionClaims, ExceedingLimitsIsTheCallersError) {
  const ConnectionPair pair = open();
  Mailbox mail(*pair.far, pair.far_loop);
  const Capabilities& limits = pair.near->capabilities();
  std::byte somewhere{};
  const std::string header(limits.max_header + 1, 'h');
  const std::vector<Slice> payloads(limits.max_payloads + 1, Slice{&somewhere, 1, Device::host()});
  const Slice half{&somewhere, static_cast<std::size_t>(limits.max_message / 2 + 1),
                   Device::host()};
  const Slice whole{&somewhere, ~std::size_t{0}, Device::host()};
  const Slice nowhere{nullptr, 1, Device::host()};
  const auto refused = [&](std::string_view head, std::span<const Slice> slices) {
    const Op op = pair.near->send(bytes_of(head), slices, nullptr, {});
    EXPECT_TRUE(op.ended());
    return failure_of(op);
  };
  for (const Error& error :
       {refused(header, {}), refused({}, payloads), refused({}, std::array{half, half}),
        refused({}, std::array{whole, whole}), refused({}, std::array{nowhere})}) {
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
  }
  if (!limits.device_memory) {
    const Slice elsewhere{&somewhere, 1, Device::cuda(0)};
    EXPECT_EQ(refused({}, std::array{elsewhere}).blame(), Blame::Caller);
  }
  pair.near->send(bytes_of(std::string_view(header).substr(1)), std::span(payloads).subspan(1),
                  nullptr, {});
  const Letter letter = mail.next();
  EXPECT_EQ(letter.header.size(), limits.max_header);
  EXPECT_EQ(letter.payloads.size(), limits.max_payloads);
}

TEST_P(ConnectionClaims, ReceivingTwiceIsTheCallersError) {
  const ConnectionPair pair = open();
  const transport::Connection::Handlers handlers{[](const Arrival&) {}, [](const Error&) {}};
  pair.far->receive(handlers);
  try {
    pair.far->receive(handlers);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
  }
}

}  // namespace
}  // namespace weft::conformance
