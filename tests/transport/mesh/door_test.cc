// SPDX-License-Identifier: Apache-2.0
// Groups that some ranks of a mesh make without a store: their ranks connect through the door at
// which the first group listens.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include <weft/base/log.h>
#include <weft/tests/transport/mesh/mesh_group.h>
#include <weft/transport/mesh/choose.h>

namespace weft::transport::mesh {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// The store of a group that needs none.
class NoStore final : public Bootstrap {
 public:
  void set(const std::string&, const Bytes&) override { refuse(); }
  Bytes get(const std::string&, Deadline) override { refuse(); }
  long add(const std::string&, long) override { refuse(); }
  bool exists(const std::string&) override { refuse(); }
  bool compare_set(const std::string&, const Bytes&, const Bytes&) override { refuse(); }
  void erase(const std::string&) override { refuse(); }

 private:
  [[noreturn]] static void refuse() { throw Error(Blame::Protocol, "this group uses a store"); }
};

JoinOptions part_options(const Group& group, const std::vector<int>& ranks, std::size_t rank,
                         const std::string& name) {
  const auto above = static_cast<std::size_t>(ranks[rank]);
  JoinOptions options = options_of(static_cast<int>(rank), static_cast<int>(ranks.size()),
                                   std::make_shared<NoStore>());
  options.group_name = name;
  options.loop = group.loops[above];
  options.parent = group.communicators[above];
  options.parent_ranks = ranks;
  return options;
}

// The group of these ranks of another, in this order.
Group part_of(const Group& group, const std::vector<int>& ranks, const std::string& name = "part",
              const Join& join = join_inproc) {
  return Group(static_cast<int>(ranks.size()), [&](const JoinOptions& options) {
    return join(part_options(group, ranks, static_cast<std::size_t>(options.rank), name));
  });
}

// Each rank contributes the power of two of its rank; returns what each has then.
std::vector<float> sums(const Group& group) {
  std::vector<std::vector<float>> data;
  for (std::size_t rank = 0; rank < group.communicators.size(); ++rank)
    data.push_back(std::vector<float>(5, static_cast<float>(1 << rank)));
  std::vector<Op> ops;
  for (std::size_t rank = 0; rank < data.size(); ++rank)
    ops.push_back(group.communicators[rank]->all_reduce(elements_of(data[rank], Dtype::Float32),
                                                        ReduceOp::Sum, Pin(), Fence()));
  std::vector<float> found;
  for (std::size_t rank = 0; rank < data.size(); ++rank) {
    expect_done(ops[rank], "all_reduce");
    found.push_back(data[rank].back());
  }
  return found;
}

TEST(MeshDoor, GroupOfSomeRanksNeedsNoStore) {
  Group all(4);
  const Group part = part_of(all, {3, 1, 0});
  EXPECT_EQ(part.communicators[0]->rank(), 0);
  EXPECT_EQ(part.communicators[0]->size(), 3);
  EXPECT_THAT(sums(part), ElementsAre(7, 7, 7));
  EXPECT_THAT(sums(all), ElementsAre(15, 15, 15, 15));
}

TEST(MeshDoor, GroupsWithTheSameRanksAreApart) {
  Group all(3);
  const Group one = part_of(all, {0, 1, 2}, "one");
  Group two = part_of(all, {2, 0, 1}, "two");
  // A message of one group is not received in another.
  std::vector<float> first{1}, second{2}, from_first(1), from_second(1);
  const Op sent = two.messages(1).send(elements_of(second, Dtype::Float32), 0, 0, Pin(), Fence());
  const Op parents = all.messages(0).send(elements_of(first, Dtype::Float32), 2, 0, Pin(), Fence());
  expect_done(two.messages(0).recv(elements_of(from_second, Dtype::Float32), 1, 0, Pin(), Fence()),
              "recv");
  expect_done(all.messages(2).recv(elements_of(from_first, Dtype::Float32), 0, 0, Pin(), Fence()),
              "recv");
  expect_done(sent, "send");
  expect_done(parents, "send");
  EXPECT_EQ(from_first[0], 1);
  EXPECT_EQ(from_second[0], 2);
  EXPECT_THAT(sums(one), ElementsAre(7, 7, 7));
}

TEST(MeshDoor, PartOfAPartOutlivesBoth) {
  auto all = std::make_unique<Group>(5);
  auto part = std::make_unique<Group>(part_of(*all, {4, 2, 0}));
  // Ranks 2 and 1 of the part: ranks 0 and 2 of the first group.
  const Group inner(2, [&](const JoinOptions& options) {
    JoinOptions made =
        part_options(*part, {2, 1}, static_cast<std::size_t>(options.rank), "part of the part");
    made.loop = all->loops[options.rank == 0 ? 0 : 2];
    return join_inproc(made);
  });
  all->communicators.clear();
  part->communicators.clear();
  // The group's connections may open now for the first time: messages have others than collectives.
  std::vector<float> sent{7}, received(1);
  auto& from = *inner.communicators[0]->point_to_point();
  auto& to = *inner.communicators[1]->point_to_point();
  const Op send = from.send(elements_of(sent, Dtype::Float32), 1, 0, Pin(), Fence());
  expect_done(to.recv(elements_of(received, Dtype::Float32), 0, 0, Pin(), Fence()), "recv");
  expect_done(send, "send");
  EXPECT_EQ(received, sent);
  EXPECT_THAT(sums(inner), ElementsAre(3, 3));
}

// Rank 1 has connected to rank 0 before rank 0 makes the group.
TEST(MeshDoor, EarlyRanksWaitForTheOthers) {
  Group all(2);
  Links links(/*held=*/false);
  std::shared_ptr<Communicator> early, late;
  std::thread first([&] { early = join_inproc(part_options(all, {0, 1}, 1, "part")); });
  while (links.made() == 0 || links.way(0).written() == 0) std::this_thread::yield();
  all.settle();
  late = join_inproc(part_options(all, {0, 1}, 0, "part"));
  first.join();
  const Op op = late->barrier(Fence());
  expect_done(early->barrier(Fence()), "barrier");
  expect_done(op, "barrier");
}

TEST(MeshDoor, RankThatDoesNotMakeTheGroupIsNamed) {
  Group all(2);
  JoinOptions options = part_options(all, {0, 1}, 1, "part");
  options.timeout = std::chrono::milliseconds(300);
  try {
    join_inproc(options);
    ADD_FAILURE() << "rank 1 has joined alone";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Timeout);
    EXPECT_THAT(error.text(), HasSubstr("still expected: rank 0"));
    EXPECT_THAT(error.ranks(), ElementsAre(0));
  }
  EXPECT_THAT(sums(all), ElementsAre(3, 3));
}

TEST(MeshDoor, RankThatHasLeftAPartIsNamed) {
  Group all(3);
  Group part = part_of(all, {0, 1, 2});
  part.communicators[2].reset();
  part.settle();
  std::vector<float> numbers(4);
  const Op op = part.messages(1).send(elements_of(numbers, Dtype::Float32), 2, 0, Pin(), Fence());
  const Error error = expect_failed(op, "a message to a rank that has left");
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_THAT(error.text(), HasSubstr("the connection with rank 2 has ended: it has left"));
  EXPECT_THAT(error.ranks(), ElementsAre(2));
  EXPECT_THAT(sums(all), ElementsAre(7, 7, 7));
}

// Another transport would be tried for a peer that cannot be reached. One that has left can.
TEST(MeshDoor, RankThatHasLeftIsNoReasonForAnotherTransport) {
  std::atomic<int> rerouted{0};
  const Join join = [&](const JoinOptions& options) {
    const auto transport = inproc::open().value();
    return mesh::join(
        std::shared_ptr<Connector>(transport, transport->connector()), "inproc", options,
        [](const std::string&) { return Chooser(choose); },
        [&](const std::string&, const std::string&, const Error&) {
          ++rerouted;
          return false;
        });
  };
  Group all(3, join);
  Group part = part_of(all, {0, 1, 2}, "part", join);
  part.communicators[2].reset();
  part.settle();
  std::vector<float> numbers(4);
  expect_failed(part.messages(1).send(elements_of(numbers, Dtype::Float32), 2, 0, Pin(), Fence()),
                "a message to a rank that has left");
  EXPECT_EQ(rerouted, 0);
}

TEST(MeshDoor, EndOfTheParentIsNamed) {
  Group all(2);
  const JoinOptions options = part_options(all, {1, 0}, 0, "part");
  all.communicators[1].reset();
  try {
    join_inproc(options);
    ADD_FAILURE() << "joined without the parent";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Cancelled);
    EXPECT_THAT(error.text(), HasSubstr("the group whose ranks make it has ended"));
  }
}

TEST(MeshDoor, SecretIsProvedForEveryGroup) {
  const auto secretly = [](JoinOptions options) {
    options.secret = "sixteen at random";
    return join_inproc(options);
  };
  Group all(3, secretly);
  const Group part = part_of(all, {2, 0}, "part", secretly);
  EXPECT_THAT(sums(part), ElementsAre(3, 3));
}

TEST(MeshDoor, OtherBackendMeetsInTheStore) {
  Group all(2);
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  const Group part(2, [&](const JoinOptions& given) {
    JoinOptions options = part_options(all, {0, 1}, static_cast<std::size_t>(given.rank), "part");
    options.store = store;
    const auto transport = inproc::open().value();
    return mesh::join(std::shared_ptr<Connector>(transport, transport->connector()), "another",
                      options, [](const std::string&) { return Chooser(choose); });
  });
  EXPECT_EQ(part.communicators[0]->backend(), "another");
  EXPECT_THAT(sums(part), ElementsAre(3, 3));
}

// --- A scripted peer ---

// Rank 0 of two. The peer may connect for groups that rank 0 has not made.
class MeshDoorStranger : public testing::Test {
 protected:
  MeshDoorStranger() {
    options_ = options_of(0, 2, store_);
    std::thread joining([&] { communicator_ = join_inproc(options_); });
    peer_.join();
    joining.join();
  }
  // A connection of the peer.
  struct Visit {
    std::shared_ptr<Connection> connection;
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<Hello> answer;
    std::optional<std::string> ended;

    void await_end() {
      std::unique_lock lock(mutex);
      ASSERT_TRUE(changed.wait_until(lock, soon().point(), [&] { return ended.has_value(); }));
    }
  };
  std::shared_ptr<Visit> visit(const Hello& hello) {
    auto made = std::make_shared<Visit>();
    made->connection = peer_.connect();
    made->connection->send(encode(hello), {}, Pin(), Fence());
    made->connection->receive({[weak = std::weak_ptr(made)](const Arrival& arrival) {
                                 const auto visit = weak.lock();
                                 if (!visit) return;
                                 const auto hello = decode_hello(arrival.header);
                                 std::lock_guard lock(visit->mutex);
                                 if (hello) visit->answer = hello.value();
                                 visit->connection->accept({}, Pin(), Fence());
                               },
                               [weak = std::weak_ptr(made)](const Error& why) {
                                 const auto visit = weak.lock();
                                 if (!visit) return;
                                 std::lock_guard lock(visit->mutex);
                                 visit->ended = why.text();
                                 visit->changed.notify_all();
                               }});
    return made;
  }
  Hello hello_for(const std::string& name) const {
    Hello hello = peer_.hello;
    hello.group = group_of(hello.token, name);
    hello.traffic = Traffic::Messages;
    return hello;
  }

  std::shared_ptr<harness::MemoryBootstrap> store_ = std::make_shared<harness::MemoryBootstrap>();
  JoinOptions options_;
  ScriptedPeer peer_{store_};
  std::shared_ptr<Communicator> communicator_;
};

TEST_F(MeshDoorStranger, ConnectionsForUnknownGroupsAreBounded) {
  const log::Capture capture([](LogLevel, std::string_view) {});
  std::vector<std::shared_ptr<Visit>> visits;
  for (int i = 0; i < 17; ++i) visits.push_back(visit(hello_for("group " + std::to_string(i))));
  visits[0]->await_end();
  EXPECT_THAT(*visits[0]->ended, HasSubstr("groups that this rank has not made"));
  std::lock_guard lock(visits[16]->mutex);
  EXPECT_FALSE(visits[16]->ended);
}

TEST_F(MeshDoorStranger, UnknownTokenIsTurnedAwayForEveryGroup) {
  const log::Capture capture([](LogLevel, std::string_view) {});
  Hello hello = hello_for("part");
  hello.token[5] ^= std::byte{1};
  const auto stranger = visit(hello);
  stranger->await_end();
  EXPECT_THAT(*stranger->ended, HasSubstr("it does not show the group's token"));
}

// As long as the group exists, the hello has to be one of its ranks'.
TEST_F(MeshDoorStranger, HelloOfAnotherSizeIsTurnedAway) {
  const log::Capture capture([](LogLevel, std::string_view) {});
  Hello hello = peer_.hello;
  hello.ranks = 7;
  const auto stranger = visit(hello);
  stranger->await_end();
  EXPECT_THAT(*stranger->ended, HasSubstr("this group has 2"));
}

TEST_F(MeshDoorStranger, GroupThatHasBeenLeftIsAnswered) {
  JoinOptions options = options_;
  options.group_name = "part";
  options.parent = communicator_;
  options.parent_ranks = {0, 1};
  options.timeout = std::chrono::milliseconds(100);
  EXPECT_THROW(join_inproc(options), Error);  // rank 1 does not come
  const auto late = visit(hello_for("part"));
  late->await_end();
  std::lock_guard lock(late->mutex);
  ASSERT_TRUE(late->answer);
  EXPECT_EQ(late->answer->answer, Answer::Left);
}

// --- Tables and names ---

TEST(MeshPart, TableHasItsRanksInTheirOrder) {
  const Table whole{{}, "", {"a", "b", "c", "d"}, {0, 1, 1, 2}};
  const Table part = mesh::part_of(whole, {3, 1, 2}, "shm");
  EXPECT_EQ(part.addresses, (std::vector<std::string>{"d", "b", "c"}));
  EXPECT_EQ(part.hosts, (std::vector<std::uint32_t>{0, 1, 1}));
  EXPECT_EQ(part.transport, "");
}

TEST(MeshPart, RanksOfOneHostUseItsTransport) {
  const Table whole{{}, "tcp", {"a", "b", "c"}, {0, 1, 1}};
  EXPECT_EQ(mesh::part_of(whole, {1, 2}, "shm").transport, "shm");
  EXPECT_EQ(mesh::part_of(whole, {0, 2}, "shm").transport, "");
}

TEST(MeshPart, UnknownHostsKeepTheTransportOfAll) {
  EXPECT_EQ(mesh::part_of({{}, "shm", {"a", "b"}, {0, 0}}, {1, 0}, "shm").transport, "shm");
  EXPECT_EQ(mesh::part_of({{}, "tcp", {"a", "b"}, {0, 0}}, {1, 0}, "shm").transport, "tcp");
  EXPECT_EQ(mesh::part_of({{}, "", {"a", "b"}, {0, 0}}, {1, 0}, "shm").transport, "");
}

TEST(MeshPart, GroupsOfATokenHaveDifferentNames) {
  Token token{}, other{};
  other[0] = std::byte{1};
  EXPECT_EQ(group_of(token, "a"), group_of(token, "a"));
  EXPECT_NE(group_of(token, "a"), group_of(token, "b"));
  EXPECT_NE(group_of(token, "a"), group_of(other, "a"));
  EXPECT_NE(group_of(token, "a"), Token());
}

// The hosts are those that rank 0 of the first group has found.
TEST(MeshPart, TwoLevelsAreKept) {
  const std::vector<int> hosts{0, 0, 1, 1, 2};
  const auto on_hosts = [&](const JoinOptions& options) {
    const int host = hosts[static_cast<std::size_t>(
        options.parent_ranks.empty()
            ? options.rank
            : options.parent_ranks[static_cast<std::size_t>(options.rank)])];
    return mesh::join(std::make_shared<OnHost>(std::to_string(host)), "inproc", options,
                      [](const std::string&) { return Chooser(choose); });
  };
  Group all(5, on_hosts);
  std::mutex mutex;
  std::string said;
  const log::Capture capture([&](LogLevel, std::string_view text) {
    std::lock_guard lock(mutex);
    said += text;
  });
  const Group part = part_of(all, {2, 3, 4}, "part", on_hosts);
  EXPECT_THAT(sums(part), ElementsAre(7, 7, 7));
  std::lock_guard lock(mutex);
  EXPECT_THAT(said, HasSubstr("two levels, within and between 2 hosts"));
}

}  // namespace
}  // namespace weft::transport::mesh
