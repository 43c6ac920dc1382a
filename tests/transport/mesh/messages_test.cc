// SPDX-License-Identifier: Apache-2.0
// Messages between two ranks, in every order of sends and receives.
#include <numeric>

#include <weft/tests/transport/mesh/mesh_ranks.h>
#include <weft/transport/mesh/messages.h>

namespace weft::transport::mesh {
namespace {

using testing::HasSubstr;

// Messages up to kEagerBytes are sent at once; longer ones are announced first.
constexpr std::size_t kSizes[] = {0, 1, 100, kEagerBytes, kEagerBytes + 1, 1 << 20};

std::vector<std::uint8_t> bytes_of(int from, std::size_t count, int salt = 0) {
  std::vector<std::uint8_t> bytes(count);
  for (std::size_t i = 0; i < count; ++i)
    bytes[i] = static_cast<std::uint8_t>(i * 7 + static_cast<std::size_t>(from * 31 + salt));
  return bytes;
}

Elements elements(std::vector<std::uint8_t>& bytes) { return elements_of(bytes, Dtype::UInt8); }

TEST(MeshMessages, OfEverySizeArriveInEitherOrder) {
  run_ranks(2, [](Communicator& communicator) {
    PointToPoint& messages = *communicator.point_to_point();
    const int other = 1 - communicator.rank();
    for (const bool receives_first : {true, false}) {
      std::vector<std::vector<std::uint8_t>> sent, received;
      std::vector<Op> ops;
      for (const std::size_t size : kSizes) {
        sent.push_back(bytes_of(communicator.rank(), size));
        received.emplace_back(size);
      }
      const auto receive_all = [&] {
        for (auto& one : received)
          ops.push_back(messages.recv(elements(one), other, 3, Pin(), Fence()));
      };
      if (receives_first) receive_all();
      for (auto& one : sent) ops.push_back(messages.send(elements(one), other, 3, Pin(), Fence()));
      if (!receives_first) {
        expect_done(communicator.barrier(Fence()), "barrier");
        receive_all();
      }
      for (const Op& op : ops) expect_done(op, "message");
      for (std::size_t i = 0; i < received.size(); ++i)
        EXPECT_EQ(received[i], bytes_of(other, received[i].size()));
    }
  });
}

TEST(MeshMessages, KeepTheirOrderPerTag) {
  run_ranks(2, [](Communicator& communicator) {
    PointToPoint& messages = *communicator.point_to_point();
    constexpr int kTags = 5, kEach = 8;
    std::vector<std::vector<std::uint8_t>> memory(kTags * kEach);
    std::vector<Op> ops;
    const auto size_of_message = [](int tag, int index) {
      return static_cast<std::size_t>(1 + index) *
             (tag % 2 == 0 ? 10 : kEagerBytes);  // some are sent at once, some announced
    };
    for (int index = 0; index < kEach; ++index) {
      for (int tag = 0; tag < kTags && communicator.rank() == 0; ++tag) {
        auto& one = memory[static_cast<std::size_t>(index * kTags + tag)] =
            bytes_of(tag, size_of_message(tag, index), index);
        ops.push_back(messages.send(elements(one), 1, tag, Pin(), Fence()));
      }
    }
    for (int tag = kTags - 1; tag >= 0 && communicator.rank() == 1; --tag) {
      for (int index = 0; index < kEach; ++index) {
        auto& one = memory[static_cast<std::size_t>(index * kTags + tag)];
        one.resize(size_of_message(tag, index));
        ops.push_back(messages.recv(elements(one), 0, tag, Pin(), Fence()));
        expect_done(ops.back(), "recv");
        EXPECT_EQ(one, bytes_of(tag, one.size(), index)) << "tag " << tag << " message " << index;
      }
    }
    for (const Op& op : ops) expect_done(op, "message");
  });
}

TEST(MeshMessages, BeyondTheCreditWaitAtTheSender) {
  run_ranks(2, [](Communicator& communicator) {
    PointToPoint& messages = *communicator.point_to_point();
    constexpr std::size_t kMessages = 3 * kCredit / kEagerBytes;
    std::vector<std::vector<std::uint8_t>> memory;
    std::vector<Op> ops;
    if (communicator.rank() == 0) {
      for (std::size_t i = 0; i < kMessages; ++i) {
        memory.push_back(bytes_of(0, kEagerBytes, static_cast<int>(i)));
      }
      for (auto& one : memory) ops.push_back(messages.send(elements(one), 1, 0, Pin(), Fence()));
      // The peer buffers a bounded number of bytes: the last message cannot have been sent before
      // the peer receives some.
      expect_done(communicator.barrier(Fence()), "barrier");
      EXPECT_FALSE(ops.back().ended());
      expect_done(communicator.barrier(Fence()), "barrier");
      for (const Op& op : ops) expect_done(op, "send");
    } else {
      expect_done(communicator.barrier(Fence()), "barrier");
      expect_done(communicator.barrier(Fence()), "barrier");
      for (std::size_t i = 0; i < kMessages; ++i) {
        std::vector<std::uint8_t> one(kEagerBytes);
        expect_done(messages.recv(elements(one), 0, 0, Pin(), Fence()), "recv");
        ASSERT_EQ(one, bytes_of(0, kEagerBytes, static_cast<int>(i))) << "message " << i;
      }
    }
  });
}

TEST(MeshMessages, ManyBeyondTheCreditStreamThrough) {
  run_ranks(2, [](Communicator& communicator) {
    PointToPoint& messages = *communicator.point_to_point();
    constexpr int kMessages =
        30'000;  // each costs 64 bytes of credit; without credit they are announced
    std::vector<std::uint32_t> memory(kMessages);
    std::vector<Op> ops;
    for (int i = 0; i < kMessages; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const Elements one{{&memory[at], 4, Device::host()}, Dtype::UInt32};
      if (communicator.rank() == 0) memory[at] = static_cast<std::uint32_t>(i);
      ops.push_back(communicator.rank() == 0 ? messages.send(one, 1, 0, Pin(), Fence())
                                             : messages.recv(one, 0, 0, Pin(), Fence()));
    }
    for (const Op& op : ops) ASSERT_NO_FATAL_FAILURE(expect_done(op, "message"));
    for (int i = 0; i < kMessages; ++i)
      ASSERT_EQ(memory[static_cast<std::size_t>(i)], static_cast<std::uint32_t>(i));
  });
}

TEST(MeshMessages, FromAnySourceKeepOrderPerSender) {
  run_ranks(4, [](Communicator& communicator) {
    PointToPoint& messages = *communicator.point_to_point();
    constexpr int kEach = 10;
    if (communicator.rank() != 0) {
      for (int i = 0; i < kEach; ++i) {
        auto one = bytes_of(communicator.rank(), i % 2 == 0 ? 8 : kEagerBytes + 8, i);
        const auto size = static_cast<std::uint64_t>(one.size());
        std::vector<std::uint8_t> head(8);
        std::memcpy(head.data(), &size, 8);
        expect_done(messages.send(elements(head), 0, 1, Pin(), Fence()), "send");
        expect_done(messages.send(elements(one), 0, 2, Pin(), Fence()), "send");
      }
      return;
    }
    std::vector<int> seen(4, 0);
    for (int i = 0; i < 3 * kEach; ++i) {
      std::vector<std::uint8_t> head(8);
      const Op op = messages.recv(elements(head), kAnySource, 1, Pin(), Fence());
      expect_done(op, "recv");
      const int from = op.source_rank();
      ASSERT_TRUE(from >= 1 && from <= 3) << from;
      std::uint64_t size = 0;
      std::memcpy(&size, head.data(), 8);
      std::vector<std::uint8_t> one(size);
      const Op body = messages.recv(elements(one), from, 2, Pin(), Fence());
      expect_done(body, "recv");
      EXPECT_EQ(body.source_rank(), from);
      EXPECT_EQ(one, bytes_of(from, size, seen[static_cast<std::size_t>(from)]++));
    }
    EXPECT_EQ(seen, (std::vector<int>{0, kEach, kEach, kEach}));
  });
}

// One receive is issued before the rank leaves, one afterwards.
TEST(MeshMessages, FromAnySourceArriveAfterARankLeft) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&store, rank] {
      auto communicator = join_inproc(options_of(rank, 3, store));
      PointToPoint& messages = *communicator->point_to_point();
      std::uint32_t number[2] = {7, 8};
      const auto data = [&](int i) {
        return Elements{{&number[i], 4, Device::host()}, Dtype::UInt32};
      };
      if (rank == 1) {
        store->get("begun", soon());
        communicator.reset();
        return;
      }
      if (rank == 2) {
        store->get("noticed", soon());
        for (const int i : {0, 1})
          expect_done(messages.send(data(i), 0, 1, Pin(), Fence()), "send");
        store->get("received", soon());
        return;
      }
      const Op from_it = messages.recv(data(1), 1, 2, Pin(), Fence());
      const Op before = messages.recv(data(0), kAnySource, 1, Pin(), Fence());
      store->set("begun", {});
      EXPECT_EQ(expect_failed(from_it, "a receive from a rank that has left").blame(),
                Blame::PeerLost);
      const Op after = messages.recv(data(1), kAnySource, 1, Pin(), Fence());
      store->set("noticed", {});
      for (const Op& op : {before, after}) {
        expect_done(op, "recv");
        EXPECT_EQ(op.source_rank(), 2);
      }
      EXPECT_EQ(number[0], 7u);
      EXPECT_EQ(number[1], 8u);
      store->set("received", {});
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(MeshMessages, ToOneselfArriveInEitherOrder) {
  run_ranks(1, [](Communicator& communicator) {
    PointToPoint& messages = *communicator.point_to_point();
    for (const std::size_t size : kSizes) {
      auto sent = bytes_of(0, size);
      std::vector<std::uint8_t> received(size);
      const Op receive = messages.recv(elements(received), kAnySource, 9, Pin(), Fence());
      expect_done(messages.send(elements(sent), 0, 9, Pin(), Fence()), "send");
      expect_done(receive, "recv");
      EXPECT_EQ(receive.source_rank(), 0);
      EXPECT_EQ(received, sent);

      std::fill(received.begin(), received.end(), std::uint8_t{0});
      const Op send = messages.send(elements(sent), 0, 9, Pin(), Fence());
      if (size <= kEagerBytes) expect_done(send, "send that is not received yet");
      expect_done(messages.recv(elements(received), 0, 9, Pin(), Fence()), "recv");
      expect_done(send, "send");
      EXPECT_EQ(received, sent);
    }
  });
}

TEST(MeshMessages, OfAnotherSizeFailOnlyTheReceive) {
  run_ranks(2, [](Communicator& communicator) {
    PointToPoint& messages = *communicator.point_to_point();
    for (const bool receives_first : {true, false}) {
      for (const std::size_t size : {std::size_t{100}, std::size_t{1 << 20}}) {
        auto data = bytes_of(0, communicator.rank() == 0 ? size : size + 1);
        if (communicator.rank() == 0) {
          if (receives_first) expect_done(communicator.barrier(Fence()), "barrier");
          const Op op = messages.send(elements(data), 1, 0, Pin(), Fence());
          if (!receives_first) expect_done(communicator.barrier(Fence()), "barrier");
          expect_done(op, "the send");
        } else {
          if (!receives_first) expect_done(communicator.barrier(Fence()), "barrier");
          const Op op = messages.recv(elements(data), 0, 0, Pin(), Fence());
          if (receives_first) expect_done(communicator.barrier(Fence()), "barrier");
          const Error error = expect_failed(op, "the receive");
          EXPECT_EQ(error.blame(), Blame::Caller);
          EXPECT_THAT(error.text(),
                      HasSubstr("sent " + std::to_string(size) + " elements of uint8"));
          EXPECT_THAT(error.text(), HasSubstr("takes exactly " + std::to_string(size + 1)));
          EXPECT_FALSE(communicator.is_broken());
        }
        auto next = bytes_of(communicator.rank(), 10);
        const int other = 1 - communicator.rank();
        expect_done(communicator.rank() == 0
                        ? messages.send(elements(next), other, 0, Pin(), Fence())
                        : messages.recv(elements(next), other, 0, Pin(), Fence()),
                    "the next message");
      }
    }
  });
}

// The receiving rank may leave at once. It can only say why if it can see that the communicator is
// broken.
TEST(MeshMessages, OfAnotherDtypeBreakTheCommunicatorBeforeTheReceiveFails) {
  run_ranks(2, [](Communicator& communicator) {
    PointToPoint& messages = *communicator.point_to_point();
    auto data = bytes_of(0, 16);
    const Slice memory{data.data(), data.size(), Device::host()};
    if (communicator.rank() == 0) {
      const Op sent = messages.send({memory, Dtype::UInt32}, 1, 0, Pin(), Fence());
      const Error error = expect_failed(communicator.barrier(Fence()), "the barrier");
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    } else {
      const Op op = messages.recv({memory, Dtype::Float32}, 0, 0, Pin(), Fence());
      const Error error = expect_failed(op, "the receive");
      EXPECT_TRUE(communicator.is_broken());
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
      EXPECT_THAT(error.text(), HasSubstr("which rank 1 receives as float32"));
    }
  });
}

TEST(MeshMessages, AreReadOnlyOnceTheyAreReady) {
  run_ranks(2, [](Communicator& communicator) {
    PointToPoint& messages = *communicator.point_to_point();
    std::vector<std::uint8_t> first(10), second = bytes_of(0, 10, 2);
    if (communicator.rank() == 0) {
      const auto gate = std::make_shared<HostFlag>();
      const Op one = messages.send(elements(first), 1, 0, Pin(), Fence(gate));
      const Op two = messages.send(elements(second), 1, 0, Pin(), Fence());
      EXPECT_FALSE(one.ended());
      EXPECT_FALSE(two.ended());  // queued behind the first
      const auto written = bytes_of(0, 10, 1);
      std::copy(written.begin(), written.end(), first.begin());
      gate->raise();
      expect_done(one, "send");
      expect_done(two, "send");
    } else {
      std::vector<std::uint8_t> received(10);
      for (const int salt : {1, 2}) {
        expect_done(messages.recv(elements(received), 0, 0, Pin(), Fence()), "recv");
        EXPECT_EQ(received, bytes_of(0, 10, salt));
      }
    }
  });
}

}  // namespace
}  // namespace weft::transport::mesh
