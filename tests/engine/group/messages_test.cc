// SPDX-License-Identifier: Apache-2.0
#include <thread>

#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/on_ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::Setting;
using std::chrono::milliseconds;

class Messages : public harness::OnRanks {};

INSTANTIATE_TEST_SUITE_P(, Messages,
                         testing::Values(Setting{As::Threads, "gloo"},
                                         Setting{As::Processes, "gloo"},
                                         Setting{As::Threads, "tcp"},
                                         Setting{As::Processes, "shm"}),
                         harness::name_of_setting);

TEST_P(Messages, AllRanksSendToAllAtOnce) {
  on_ranks(4, [](ProcessGroup& group) {
    std::vector<Work> works;
    std::vector<at::Tensor> received;
    for (int peer = 0; peer < 4; ++peer) {
      received.push_back(torch::zeros({1000}));
      if (peer == group.rank()) continue;
      works.push_back(group.send(torch::full({1000}, 10.0 * group.rank() + peer), peer));
      works.push_back(group.recv(received.back(), peer));
    }
    for (Work& work : works) work.wait();
    for (const Work& work : works) EXPECT_TRUE(work.query());
    for (int peer = 0; peer < 4; ++peer) {
      if (peer == group.rank()) continue;
      EXPECT_TRUE(torch::equal(received[static_cast<std::size_t>(peer)],
                               torch::full({1000}, 10.0 * peer + group.rank())));
    }
  });
}

TEST_P(Messages, TagsKeepMessagesApart) {
  on_ranks(2, [](ProcessGroup& group) {
    if (group.rank() == 0) {
      Work first = group.send(torch::full({1}, 1.0), 1, 7);
      Work second = group.send(torch::full({1}, 2.0), 1, 8);
      second.wait();
      first.wait();
    } else {
      const auto of_8 = torch::zeros({1});
      const auto of_7 = torch::zeros({1});
      group.recv(of_8, 0, 8).wait();  // sent last, received first
      group.recv(of_7, 0, 7).wait();
      EXPECT_EQ(of_8.item<float>(), 2);
      EXPECT_EQ(of_7.item<float>(), 1);
    }
  });
}

TEST_P(Messages, KeepTheirOrderWithinATag) {
  on_ranks(2, [](ProcessGroup& group) {
    std::vector<Work> works;
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 100; ++i) {
      tensors.push_back(torch::full({1}, group.rank() == 0 ? i : -1, at::kInt));
      works.push_back(group.rank() == 0 ? group.send(tensors.back(), 1, 3)
                                        : group.recv(tensors.back(), 0, 3));
    }
    for (Work& work : works) work.wait();
    for (int i = 0; i < 100; ++i) EXPECT_EQ(tensors[static_cast<std::size_t>(i)].item<int>(), i);
  });
}

TEST_P(Messages, AnySourceReceiveGivesTheSender) {
  on_ranks(4, [](ProcessGroup& group) {
    if (group.rank() != 2) return group.send(torch::full({1}, group.rank(), at::kInt), 2, 5).wait();
    std::set<int> sources;
    for (int i = 0; i < 3; ++i) {
      const auto tensor = torch::zeros({1}, at::kInt);
      Work work = group.recv(tensor, kAnySource, 5);
      EXPECT_TRUE(work.source_rank() == -1 || work.query()) << "no sender before it is done";
      work.wait();
      EXPECT_EQ(work.source_rank(), tensor.item<int>());
      sources.insert(work.source_rank());
    }
    EXPECT_EQ(sources, (std::set<int>{0, 1, 3}));
  });
}

TEST_P(Messages, MixWithCollectivesInAnyOrder) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto sum = torch::ones({1});
    const auto word = torch::full({1}, 4.0);
    if (group.rank() == 0) {
      Work sending = group.send(word, 1);
      group.all_reduce(sum).wait();
      sending.wait();
    } else {
      group.all_reduce(sum).wait();
      const auto received = torch::zeros({1});
      group.recv(received, 0).wait();
      EXPECT_EQ(received.item<float>(), 4);
    }
    EXPECT_EQ(sum.item<float>(), 2);
  });
}

TEST_P(Messages, TimedOutWaitMayBeRepeated) {
  on_ranks(2, [](ProcessGroup& group) {
    if (group.rank() == 0) {
      const auto received = torch::zeros({1});
      Work work = group.recv(received, 1);
      const auto error = error_of([&] { work.synchronize(milliseconds(1)); });
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      EXPECT_NE(error.text().find("recv from rank 1"), std::string::npos) << error.text();
      EXPECT_FALSE(work.query());
      EXPECT_FALSE(work.error());
      group.barrier().wait();  // the other rank sends only after this
      work.synchronize();
      EXPECT_EQ(received.item<float>(), 3);
    } else {
      group.barrier().wait();
      group.send(torch::full({1}, 3.0), 0).wait();
    }
  });
}

// With Gloo a send of any size; with backends that send short messages at once, only a longer one.
TEST_P(Messages, UnreceivedSendIsNotDone) {
  on_ranks(2, [](ProcessGroup& group) {
    for (const std::int64_t count : {1, 1 << 20}) {
      if (count == 1 && group.backend(c10::Device(c10::kCPU)) != "gloo") continue;
      const auto tensor = torch::full({count}, group.rank() == 0 ? 3.0 : 0.0);
      if (group.rank() == 0) {
        Work work = group.send(tensor, 1);
        for (int i = 0; i < 2; ++i) {
          const auto error = error_of([&] { work.synchronize(milliseconds(1)); });
          EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
          EXPECT_NE(error.text().find("send to rank 1"), std::string::npos) << error.text();
        }
        EXPECT_FALSE(work.query());
        group.barrier().wait();  // the other rank receives only after this
        work.synchronize();
        EXPECT_TRUE(work.query());
      } else {
        group.barrier().wait();
        group.recv(tensor, 0).wait();
        EXPECT_TRUE(torch::equal(tensor, torch::full({count}, 3.0)));
      }
    }
  });
}

// Each rank sends in turn; the message of rank r has shape [r + 1, r + 1] and value r.
TEST_P(Messages, OneRankSendsToAllOthers) {
  on_ranks(3, [](ProcessGroup& group) {
    for (const int tag : {0, 9}) {
      for (const bool at_once : {false, true}) {
        for (int sender = 0; sender < 3; ++sender) {
          const auto of_sender = torch::full({sender + 1, sender + 1}, sender, at::kInt);
          std::vector<Work> works;
          const auto begun = [&](Work work) { at_once ? works.push_back(work) : work.wait(); };
          const auto tensor = group.rank() == sender ? of_sender : torch::full_like(of_sender, -1);
          for (int to = 0; to < 3 && group.rank() == sender; ++to) {
            if (to != sender) begun(group.send(tensor, to, tag));
          }
          if (group.rank() != sender) begun(group.recv(tensor, sender, tag));
          for (Work& work : works) work.wait();
          EXPECT_TRUE(torch::equal(tensor, of_sender)) << "from " << sender;
        }
      }
    }
  });
}

// Batches of messages whose sizes differ: to and from every other rank, around a ring, and between
// two ranks only.
TEST_P(Messages, BatchesMixSizes) {
  on_ranks(3, [](ProcessGroup& group) {
    const int rank = group.rank();
    const auto message = [](int from, int to) {
      return torch::full({1 + 3 * from + to}, 10 * from + to, at::kInt);
    };
    const auto exchange = [&](const std::vector<int>& to, const std::vector<int>& from, int tag) {
      std::vector<Work> works;
      std::vector<at::Tensor> received;
      for (const int peer : from) {
        received.push_back(torch::zeros_like(message(peer, rank)));
        works.push_back(group.recv(received.back(), peer, tag));
      }
      for (const int peer : to) works.push_back(group.send(message(rank, peer), peer, tag));
      for (Work& work : works) work.wait();
      for (std::size_t i = 0; i < from.size(); ++i)
        EXPECT_TRUE(torch::equal(received[i], message(from[i], rank)));
    };
    const int next = (rank + 1) % 3, before = (rank + 2) % 3;
    for (const int tag : {0, 4}) {
      exchange({next, before}, {next, before}, tag);
      exchange({next}, {before}, tag);
      if (rank != 0) exchange({3 - rank}, {3 - rank}, tag);
    }
  });
}

TEST_P(Messages, MayHaveNoElements) {
  on_ranks(2, [](ProcessGroup& group) {
    const auto none = torch::empty({0, 3});
    for (const int tag : {0, 2}) {
      if (group.rank() == 0) {
        group.send(none, 1, tag).wait();
      } else {
        Work work = group.recv(none, tag == 0 ? 0 : kAnySource, tag);
        work.wait();
        EXPECT_EQ(work.source_rank(), 0);
      }
    }
    const auto word = torch::full({}, 4.0);  // a tensor without dimensions
    if (group.rank() == 0) return group.send(word, 1).wait();
    const auto received = torch::zeros({});
    group.recv(received, 0).wait();
    EXPECT_EQ(received.item<float>(), 4);
  });
}

TEST_P(Messages, SubgroupMessagesUseItsRanks) {
  on_ranks(4, [](ProcessGroup& group) {
    auto some = group.new_group({3, 1, 0});
    if (!some) return;
    const int next = (some.rank() + 1) % 3, before = (some.rank() + 2) % 3;
    const auto received = torch::zeros({1}, at::kInt);
    Work receiving = some.recv(received, before);
    Work sending = some.send(torch::full({1}, group.rank(), at::kInt), next);
    receiving.wait();
    sending.wait();
    EXPECT_EQ(received.item<int>(), some.global_rank(before));
    if (some.rank() == 0) return some.send(received, 2, 5).wait();
    if (some.rank() == 2) {
      Work any = some.recv(received, kAnySource, 5);
      any.wait();
      EXPECT_EQ(any.source_rank(), 0);
    }
  });
}

// Uses tcp, whose own errors name the receive; the group puts the name before a backend's error,
// too.
TEST(Message, SizeMismatchNamesTheReceiveOnce) {
  harness::run_ranks(As::Threads, 2,
                     [](ProcessGroup& group) {
                       if (group.rank() == 0) {
                         static_cast<void>(group.send(torch::ones({1}), 1));
                         group = ProcessGroup();  // leaves the group
                         return;
                       }
                       const auto error = error_of([&] { group.recv(torch::ones({2}), 0).wait(); });
                       EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
                       const std::string name = "recv from rank 0";
                       const auto first = error.text().find(name);
                       ASSERT_NE(first, std::string::npos) << error.text();
                       EXPECT_EQ(error.text().find(name, first + 1), std::string::npos)
                           << error.text();
                       const auto none = error_of([&] { group.recv(torch::ones({1}), 0).wait(); });
                       EXPECT_EQ(none.blame(), Blame::PeerLost) << none.what();
                     },
                     {.backend = "tcp"});
}

TEST_P(Messages, InFlightBytesOutliveTheSender) {
  on_ranks(2, [](ProcessGroup& group) {
    constexpr std::int64_t kElements = 4 << 20;
    if (group.rank() == 0) {
      static_cast<void>(group.send(torch::full({kElements}, 6.0), 1));
      group = ProcessGroup();
    } else {
      const auto received = torch::zeros({kElements});
      group.recv(received, 0).wait();
      EXPECT_TRUE(torch::equal(received, torch::full({kElements}, 6.0)));
    }
  });
}

TEST_P(Messages, FailIfThePeerHasLeft) {
  on_ranks(2, [](ProcessGroup& group) {
    if (group.rank() == 0) return;  // leaves without having sent
    const auto tensor = torch::zeros({1});
    for (const int from : {0, kAnySource}) {
      // The receive may begin before or after the other rank has left.
      const auto error = error_of([&] { group.recv(tensor, from).wait(); });
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
      EXPECT_NE(error.text().find("left"), std::string::npos) << error.text();
    }
    EXPECT_EQ(error_of([&] { group.send(tensor, 0).wait(); }).blame(), Blame::PeerLost);
    EXPECT_EQ(error_of([&] { group.all_reduce(tensor).wait(); }).blame(), Blame::PeerLost);
  });
}

}  // namespace
}  // namespace weft
