// SPDX-License-Identifier: Apache-2.0
// Messages arrive whole and in order, whatever their sizes and however the ends take turns.
// TensorPipe's test suite checks many of these behaviours too.
#include <array>
#include <thread>

#include <weft/tests/conformance/connection/connection_pair.h>

namespace weft::conformance {
namespace {

TEST_P(ConnectionClaims, CarriesAMessageEachWay) {
  const ConnectionPair pair = open();
  Mailbox near_mail(*pair.near, pair.near_loop);
  Mailbox far_mail(*pair.far, pair.far_loop);
  const auto payload = pattern(1, 256);
  expect_good(
      pair.near->send(bytes_of("thirteen byte"), std::array{slice_of(payload)}, nullptr, {}));
  expect_good(pair.far->send(bytes_of("back"), {}, nullptr, {}));
  const Letter there = far_mail.next();
  EXPECT_EQ(there.header, "thirteen byte");
  ASSERT_EQ(there.payloads.size(), 1u);
  EXPECT_TRUE(same(there.payloads[0], payload));
  const Letter back = near_mail.next();
  EXPECT_EQ(back.header, "back");
  EXPECT_TRUE(back.payloads.empty());
}

TEST_P(ConnectionClaims, SendsBeforeReceiveArriveInOrder) {
  std::vector<std::vector<std::byte>> payloads;
  for (std::uint32_t i = 0; i < 10; ++i) payloads.push_back(pattern(i, 16 << 10));
  const ConnectionPair pair = open();
  for (const auto& payload : payloads)
    pair.near->send({}, std::array{slice_of(payload)}, nullptr, {});
  Mailbox mail(*pair.far, pair.far_loop);
  for (const auto& payload : payloads) EXPECT_TRUE(same(mail.next().payloads.at(0), payload));
}

TEST_P(ConnectionClaims, EmptyMessagesKeepTheirPlace) {
  const auto payload = pattern(4, 13);
  const ConnectionPair pair = open();
  Mailbox mail(*pair.far, pair.far_loop);
  for (int i = 0; i < 100; ++i) {
    pair.near->send({}, i % 2 == 0 ? std::span<const Slice>() : std::array{slice_of(payload)},
                    nullptr, {});
  }
  for (int i = 0; i < 100; ++i) {
    const Letter letter = mail.next();
    EXPECT_TRUE(letter.header.empty());
    ASSERT_EQ(letter.payloads.size(), i % 2 == 0 ? 0u : 1u) << i;
    EXPECT_TRUE(i % 2 == 0 || same(letter.payloads[0], payload));
  }
}

TEST_P(ConnectionClaims, EmptyPayloadsAreCounted) {
  const auto payload = pattern(5, 100);
  const ConnectionPair pair = open();
  Mailbox mail(*pair.far, pair.far_loop);
  std::byte somewhere{};
  const Slice at_address{&somewhere, 0, Device::host()};
  const Slice nowhere{nullptr, 0, Device::host()};
  pair.near->send({}, std::array{at_address}, nullptr, {});
  pair.near->send({}, std::array{nowhere}, nullptr, {});
  pair.near->send({}, std::array{slice_of(payload), nowhere, slice_of(payload), at_address},
                  nullptr, {});
  EXPECT_EQ(mail.next().payloads, std::vector<std::vector<std::byte>>(1));
  EXPECT_EQ(mail.next().payloads, std::vector<std::vector<std::byte>>(1));
  const Letter mixed = mail.next();
  ASSERT_EQ(mixed.payloads.size(), 4u);
  EXPECT_TRUE(same(mixed.payloads[0], payload) && mixed.payloads[1].empty());
  EXPECT_TRUE(same(mixed.payloads[2], payload) && mixed.payloads[3].empty());
}

TEST_P(ConnectionClaims, CarriesSixtyFourMebibytes) {
  const ConnectionPair pair = open();
  Mailbox mail(*pair.far, pair.far_loop);
  const auto payload = pattern(6, (64 << 20) + 3);
  const Op sent = pair.near->send(bytes_of("large"), std::array{slice_of(payload)}, nullptr, {});
  EXPECT_TRUE(same(mail.next().payloads.at(0), payload));
  expect_good(sent);
}

TEST_P(ConnectionClaims, MessagesWrapAroundRingsWhole) {
  const auto payload = pattern(7, 40000);
  const ConnectionPair pair = open();
  Mailbox mail(*pair.far, pair.far_loop);
  constexpr std::size_t kMessages = 2000;
  const auto size_of = [](std::size_t i) { return i * 7919 % 40000; };
  for (std::size_t i = 0; i < kMessages; ++i) {
    const Slice part{const_cast<std::byte*>(payload.data()), size_of(i), Device::host()};
    pair.near->send(bytes_of(std::to_string(i)), std::array{part, part}, nullptr, {});
  }
  for (std::size_t i = 0; i < kMessages; ++i) {
    const Letter letter = mail.next();
    ASSERT_EQ(letter.header, std::to_string(i));
    const std::vector<std::byte> expected(
        payload.begin(), payload.begin() + static_cast<std::ptrdiff_t>(size_of(i)));
    ASSERT_TRUE(same(letter.payloads.at(0), expected) && same(letter.payloads.at(1), expected))
        << i;
  }
}

TEST_P(ConnectionClaims, CarriesALotBothWaysAtOnce) {
  std::vector<std::vector<std::byte>> payloads;
  for (std::uint32_t i = 0; i < 100; ++i) payloads.push_back(pattern(i, 256 << 10));
  const ConnectionPair pair = open();
  Mailbox near_mail(*pair.near, pair.near_loop);
  Mailbox far_mail(*pair.far, pair.far_loop);
  for (const auto& payload : payloads) {
    pair.near->send(bytes_of("there"), std::array{slice_of(payload)}, nullptr, {});
    pair.far->send(bytes_of("back"), std::array{slice_of(payload)}, nullptr, {});
  }
  for (const auto& payload : payloads) {
    EXPECT_TRUE(same(far_mail.next().payloads.at(0), payload));
    EXPECT_TRUE(same(near_mail.next().payloads.at(0), payload));
  }
}

TEST_P(ConnectionClaims, ManySmallMessagesArriveInOrder) {
  const ConnectionPair pair = open();
  constexpr std::uint32_t kMessages = 100'000;
  struct Seen {
    std::uint32_t count = 0;
    std::uint32_t wrong = 0;
    std::atomic<bool> all{false};
  };
  const auto seen = std::make_shared<Seen>();
  pair.far->receive({[seen, far = pair.far.get()](const Arrival& arrival) {
                       std::uint32_t number = 0;
                       if (arrival.header.size() == sizeof number)
                         std::memcpy(&number, arrival.header.data(), sizeof number);
                       seen->wrong += number != seen->count || !arrival.sizes.empty();
                       far->accept({}, nullptr, {});
                       if (++seen->count == kMessages) seen->all = true;
                     },
                     [](const Error&) {}});
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    for (;;) {
      const Op op =
          pair.near->send(bytes_of({reinterpret_cast<const char*>(&i), sizeof i}), {}, nullptr, {});
      if (!op.ended() || !op.error()) break;
      ASSERT_EQ(op.error()->blame(), Blame::Busy) << op.error()->what();
      std::this_thread::yield();  // the loops' own threads make room
    }
  }
  EXPECT_TRUE(pair.far_loop->drive([&] { return seen->all.load(); }, patience()));
  EXPECT_EQ(seen->wrong, 0u);
}

TEST_P(ConnectionClaims, BothEndsMaySendBeforeReading) {
  const auto payload = pattern(19, 100'000);
  const ConnectionPair pair = open();
  for (const auto& end : {pair.near, pair.far}) {
    end->send(bytes_of("header only"), {}, nullptr, {});
    end->send({}, std::array{slice_of(payload)}, nullptr, {});
    end->send(bytes_of("both"), std::array{slice_of(payload), slice_of(payload)}, nullptr, {});
  }
  Mailbox near_mail(*pair.near, pair.near_loop);
  Mailbox far_mail(*pair.far, pair.far_loop);
  for (Mailbox* mail : {&near_mail, &far_mail}) {
    EXPECT_EQ(mail->next().header, "header only");
    EXPECT_TRUE(same(mail->next().payloads.at(0), payload));
    const Letter both = mail->next();
    EXPECT_EQ(both.header, "both");
    ASSERT_EQ(both.payloads.size(), 2u);
    EXPECT_TRUE(same(both.payloads[1], payload));
  }
}

TEST_P(ConnectionClaims, MayBeUsedInsideItsOwnHandlers) {
  const ConnectionPair pair = open();
  constexpr int kRounds = 1000;
  struct Seen {
    int round = 0;  // accessed on the near loop only
    int wrong = 0;
    std::atomic<bool> finished{false};
  };
  const auto seen = std::make_shared<Seen>();
  const auto text_of = [](const Arrival& arrival) {
    return std::string(reinterpret_cast<const char*>(arrival.header.data()), arrival.header.size());
  };
  pair.far->receive({[text_of, far = pair.far.get()](const Arrival& arrival) {
                       const std::string echo = text_of(arrival);
                       far->accept({}, nullptr, {});
                       far->send(bytes_of(echo), {}, nullptr, {});
                     },
                     [](const Error&) {}});
  pair.near->receive({[text_of, seen, near = pair.near.get()](const Arrival& arrival) {
                        seen->wrong += text_of(arrival) != std::to_string(seen->round);
                        near->accept({}, nullptr, {});
                        if (++seen->round == kRounds) {
                          seen->finished = true;
                        } else {
                          near->send(bytes_of(std::to_string(seen->round)), {}, nullptr, {});
                        }
                      },
                      [](const Error&) {}});
  pair.near->send(bytes_of("0"), {}, nullptr, {});
  EXPECT_TRUE(pair.near_loop->drive([&] { return seen->finished.load(); }, patience()));
  EXPECT_EQ(seen->wrong, 0);
}

TEST_P(ConnectionClaims, EachSendingThreadKeepsItsOrder) {
  const auto payload = pattern(8, 3000);
  const ConnectionPair pair = open();
  Mailbox mail(*pair.far, pair.far_loop);
  constexpr int kThreads = 4;
  constexpr int kMessages = 500;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < kMessages; ++i) {
        pair.near->send(bytes_of(std::to_string(thread) + " " + std::to_string(i)),
                        std::array{slice_of(payload)}, nullptr, {});
      }
    });
  }
  std::array<int, kThreads> next{};
  for (int i = 0; i < kThreads * kMessages; ++i) {
    const Letter letter = mail.next();
    int& expected = next.at(static_cast<std::size_t>(std::stoi(letter.header)));
    EXPECT_EQ(letter.header.substr(2), std::to_string(expected));
    EXPECT_TRUE(same(letter.payloads.at(0), payload));
    ++expected;
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(ConnectionClaims, ReportsItsPeerAndCapabilities) {
  const ConnectionPair pair = open();
  for (const auto& end : {pair.near, pair.far}) {
    EXPECT_EQ(end->transport(), name_for_claims(GetParam()));
    EXPECT_FALSE(end->peer().empty());
    EXPECT_GE(end->capabilities().max_header, 1024u);
    EXPECT_GE(end->capabilities().max_payloads, 16u);
    EXPECT_GE(end->capabilities().max_message, 1u << 30);
    EXPECT_GE(end->capabilities().max_queued, 16u);
  }
}

}  // namespace
}  // namespace weft::conformance
