// SPDX-License-Identifier: Apache-2.0
// Ranks that may keep few connections close idle ones and open them again: nothing is lost, and no
// rank keeps more than it may.
#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <map>
#include <random>

#include <sys/wait.h>
#include <unistd.h>

#include <weft/tests/harness/file_bootstrap.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/transport/mesh/mesh_group.h>
#include <weft/transport/mesh/mesh.h>

namespace weft::transport::shm {
Result<std::shared_ptr<Transport>> open();
}
namespace weft::transport::tcp {
Result<std::shared_ptr<Transport>> open();
}

namespace weft::transport::mesh {
namespace {

using testing::ElementsAre;

// Passes all calls on, and counts the connections of a rank that are not destroyed.
class Counted final : public Connection {
 public:
  Counted(std::shared_ptr<Connection> inner, std::shared_ptr<std::atomic<int>> count)
      : inner_(std::move(inner)), count_(std::move(count)) {
    ++*count_;
  }
  ~Counted() override { --*count_; }
  std::string_view transport() const override { return inner_->transport(); }
  std::string peer() const override { return inner_->peer(); }
  const Capabilities& capabilities() const override { return inner_->capabilities(); }
  void receive(Handlers handlers) override { inner_->receive(std::move(handlers)); }
  Op send(std::span<const std::byte> header, std::span<const Slice> payloads, Pin pin,
          Fence ready) noexcept override {
    return inner_->send(header, payloads, std::move(pin), std::move(ready));
  }
  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept override {
    return inner_->accept(destinations, std::move(pin), std::move(ready));
  }
  void close(const Error& why) noexcept override { inner_->close(why); }

 private:
  const std::shared_ptr<Connection> inner_;
  const std::shared_ptr<std::atomic<int>> count_;
};

class Counting final : public Connector {
 public:
  Counting(std::shared_ptr<Transport> transport, std::shared_ptr<std::atomic<int>> count)
      : transport_(std::move(transport)),
        inner_(*transport_->connector()),
        count_(std::move(count)) {}
  Capabilities capabilities() const override { return inner_.capabilities(); }
  int preference() const override { return inner_.preference(); }
  std::optional<std::string> why_unreachable(const std::string& address) const override {
    return inner_.why_unreachable(address);
  }
  std::unique_ptr<Listener> listen(const ListenOptions& options) override {
    ListenOptions counted = options;
    counted.accepted = [count = count_, accepted = options.accepted](auto connection) {
      accepted(std::make_shared<Counted>(std::move(connection), count));
    };
    return inner_.listen(counted);
  }
  std::shared_ptr<Connection> connect(const std::string& address,
                                      const ConnectOptions& options) override {
    return std::make_shared<Counted>(inner_.connect(address, options), count_);
  }

 private:
  const std::shared_ptr<Transport> transport_;
  Connector& inner_;
  const std::shared_ptr<std::atomic<int>> count_;
};

std::shared_ptr<Transport> transport_named(const std::string& name) {
  auto found = name == "tcp" ? tcp::open() : name == "shm" ? shm::open() : inproc::open();
  return std::move(found).value();
}

// A group whose ranks may keep so many connections each; `most` is repeated for further ranks.
class Bounded {
 public:
  Bounded(int ranks, std::vector<std::size_t> most, const std::string& transport = "inproc")
      : most_(std::move(most)), group_(ranks, [&](JoinOptions options) {
          options.max_connections = most_of(options.rank);
          return mesh::join(
              std::make_shared<Counting>(transport_named(transport), count(options.rank)),
              transport, options, [](const std::string&) { return Chooser(choose); });
        }) {}

  Group& operator*() { return group_; }
  Group* operator->() { return &group_; }
  std::size_t most_of(int rank) const {
    return most_[static_cast<std::size_t>(rank) % most_.size()];
  }
  int open(int rank) { return *count(rank); }
  // Fails unless every rank soon has as few connections as it may keep.
  void expect_few() {
    const Deadline deadline = soon();
    for (int rank = 0; rank < static_cast<int>(group_.communicators.size()); ++rank) {
      const auto most = static_cast<int>(most_of(rank));
      while (open(rank) > most && !deadline.passed()) group_.settle();
      EXPECT_LE(open(rank), most) << "rank " << rank;
    }
  }

 private:
  std::shared_ptr<std::atomic<int>> count(int rank) {
    std::lock_guard lock(mutex_);
    auto& count = counts_[rank];
    if (!count) count = std::make_shared<std::atomic<int>>(0);
    return count;
  }

  const std::vector<std::size_t> most_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<std::atomic<int>>> counts_;
  Group group_;
};

// Numbered messages between two ranks: each recv() must get the next one.
class Conversation {
 public:
  Conversation(Group& group, int from, int to) : group_(group), from_(from), to_(to) {}
  void send() {
    numbers_.push_back(std::make_unique<std::vector<std::int64_t>>(1, sent_++));
    ops_.push_back(group_.messages(static_cast<std::size_t>(from_))
                       .send(elements_of(*numbers_.back(), Dtype::Int64), to_, 0, Pin(), Fence()));
  }
  void recv() {
    got_.push_back(std::make_unique<std::vector<std::int64_t>>(1, -1));
    ops_.push_back(group_.messages(static_cast<std::size_t>(to_))
                       .recv(elements_of(*got_.back(), Dtype::Int64), from_, 0, Pin(), Fence()));
  }
  // Calls what is missing, and checks everything.
  void finish(const std::string& what) {
    while (static_cast<std::size_t>(sent_) < got_.size()) send();
    while (got_.size() < static_cast<std::size_t>(sent_)) recv();
    for (const Op& op : ops_) expect_done(op, what);
    for (std::size_t at = 0; at < got_.size(); ++at)
      ASSERT_EQ(got_[at]->front(), static_cast<std::int64_t>(at)) << what;
    ops_.clear();
    numbers_.clear();
    got_.clear();
    sent_ = 0;
  }

 private:
  Group& group_;
  const int from_, to_;
  std::int64_t sent_ = 0;
  std::vector<std::unique_ptr<std::vector<std::int64_t>>> numbers_, got_;
  std::vector<Op> ops_;
};

// Sums over all ranks, of which each rank calls its part on its own.
class Sums {
 public:
  explicit Sums(Group& group) : group_(group), called_(group.communicators.size()) {}
  void call(std::size_t rank) {
    auto& mine = called_[rank];
    mine.push_back(std::make_unique<std::vector<std::int64_t>>(
        5, static_cast<std::int64_t>(mine.size() + rank)));
    ops_.push_back(group_.communicators[rank]->all_reduce(elements_of(*mine.back(), Dtype::Int64),
                                                          ReduceOp::Sum, Pin(), Fence()));
  }
  void finish(const std::string& what) {
    const auto most = std::max_element(called_.begin(), called_.end(), [](auto& a, auto& b) {
                        return a.size() < b.size();
                      })->size();
    for (std::size_t rank = 0; rank < called_.size(); ++rank) {
      while (called_[rank].size() < most) call(rank);
    }
    for (const Op& op : ops_) expect_done(op, what);
    const auto ranks = static_cast<std::int64_t>(called_.size());
    for (auto& mine : called_) {
      for (std::size_t at = 0; at < most; ++at) {
        const std::int64_t sum = ranks * static_cast<std::int64_t>(at) + ranks * (ranks - 1) / 2;
        ASSERT_EQ(*mine[at], std::vector<std::int64_t>(5, sum)) << what;
      }
      mine.clear();
    }
    ops_.clear();
  }

 private:
  Group& group_;
  std::vector<std::vector<std::unique_ptr<std::vector<std::int64_t>>>> called_;
  std::vector<Op> ops_;
};

class MeshClosingsOver : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Mesh, MeshClosingsOver, testing::Values("inproc", "tcp", "shm"),
                         [](const auto& one) { return one.param; });

std::size_t descriptors() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

TEST_P(MeshClosingsOver, RanksKeepAsFewAsTheyMay) {
  constexpr int kRanks = 12;
  Bounded group(kRanks, {2, 4, 3}, GetParam());
  group.expect_few();
  const std::size_t before = descriptors();
  std::mt19937 random(1);
  Sums sums(*group);
  std::map<std::pair<int, int>, Conversation> conversations;
  const int rounds = GetParam() == "shm" ? 8 : 40;  // its segments take long to make
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < 30; ++i) {
      const int from = static_cast<int>(random() % kRanks);
      const int to = (from + 1 + static_cast<int>(random() % (kRanks - 1))) % kRanks;
      auto& conversation = conversations.try_emplace({from, to}, *group, from, to).first->second;
      random() % 2 == 0 ? conversation.send() : conversation.recv();
      if (random() % 8 == 0) sums.call(random() % kRanks);
    }
    const std::string text = "round " + std::to_string(round);
    sums.finish(text);
    for (auto& [pair, conversation] : conversations) conversation.finish(text);
    if (HasFatalFailure()) return;
  }
  group.expect_few();
  // The descriptors of both ends. Which ranks keep how many changes.
  const std::size_t most = static_cast<std::size_t>(kRanks) * 3;
  const Deadline deadline = soon();
  while (descriptors() > before + most && !deadline.passed()) group->settle();
  EXPECT_LE(descriptors(), before + most);
}

class MeshClosingsBetween : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Mesh, MeshClosingsBetween, testing::Values("tcp", "shm"),
                         [](const auto& one) { return one.param; });

TEST_P(MeshClosingsBetween, ConnectionHasOneDescriptor) {
  constexpr int kRanks = 4;
  Bounded group(kRanks, {256}, GetParam());
  const auto fixed = [&] {
    std::size_t open = 0;
    for (int rank = 0; rank < kRanks; ++rank) open += static_cast<std::size_t>(group.open(rank));
    return descriptors() - open;
  };
  const std::size_t before = fixed();
  for (int from = 0; from < kRanks; ++from) {
    for (int to = 0; to < from; ++to) {
      Conversation messages(*group, from, to);
      messages.send();
      messages.finish("send");
    }
  }
  const Deadline deadline = soon();
  while (fixed() != before && !deadline.passed()) group->settle();
  EXPECT_EQ(fixed(), before);
}

TEST_P(MeshClosingsOver, PairsAtRandomExchangeMessages) {
  constexpr int kRanks = 8;
  Bounded group(kRanks, {2}, GetParam());
  std::mt19937 random(2);
  std::vector<std::int64_t> sent(1), received(1);
  const int turns = GetParam() == "shm" ? 300 : 2000;
  for (int turn = 0; turn < turns; ++turn) {
    const auto from = static_cast<std::size_t>(random() % kRanks);
    const auto to = (from + 1 + random() % (kRanks - 1)) % kRanks;
    sent[0] = turn;
    const auto recv = [&] {
      return group->messages(to).recv(elements_of(received, Dtype::Int64), static_cast<int>(from),
                                      0, Pin(), Fence());
    };
    const bool receives_first = random() % 2 == 0;
    Op receive = receives_first ? recv() : Op();
    const Op send = group->messages(from).send(elements_of(sent, Dtype::Int64),
                                               static_cast<int>(to), 0, Pin(), Fence());
    if (!receives_first) receive = recv();
    expect_done(send, "send");
    expect_done(receive, "recv");
    ASSERT_EQ(received[0], turn);
  }
  group.expect_few();
}

TEST_P(MeshClosingsOver, OperationHasWhatItNeeds) {
  constexpr std::size_t kRanks = 6;
  Bounded group(kRanks, {2}, GetParam());
  for (int turn = 0; turn < 3; ++turn) {
    std::vector<std::vector<std::int32_t>> from(kRanks), to(kRanks);
    std::vector<Op> ops;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      std::vector<Slice> inputs, outputs;
      from[rank].assign(kRanks, static_cast<std::int32_t>(rank));
      to[rank].assign(kRanks, -1);
      for (std::size_t peer = 0; peer < kRanks; ++peer) {
        inputs.push_back({&from[rank][peer], 4, Device::host()});
        outputs.push_back({&to[rank][peer], 4, Device::host()});
      }
      ops.push_back(
          group->communicators[rank]->all_to_all(outputs, inputs, Dtype::Int32, Pin(), Fence()));
    }
    for (const Op& op : ops) expect_done(op, "all_to_all");
    for (std::size_t rank = 0; rank < kRanks; ++rank)
      EXPECT_THAT(to[rank], ElementsAre(0, 1, 2, 3, 4, 5));
    group.expect_few();
  }
}

// --- The orders of the steps ---

// The bounds of two ranks with two connections, so that one of them or both ask.
const std::vector<std::vector<std::size_t>> kBounds = {{1, 1}, {1, 2}, {2, 1}};

// Delivers the bytes that one of the ranks has sent on the first connections; later ones wait.
void deliver(Links& links, std::size_t connections, Group& group, bool from_maker) {
  for (std::size_t at = 0; at < connections; ++at) {
    const inproc::Faults way = links.way(2 * at + (from_maker ? 0 : 1));
    way.release();
    group.settle();
    way.hold_at(way.written());
  }
}

// The questions about the idle connection are on their way when the ranks go on to use it: in every
// order of that and of the steps arriving.
TEST(MeshClosings, EveryOrderOfStepsAndUses) {
  enum Step { There, ThereAgain, Back, BackAgain, Call0, Call1 };
  for (const auto& most : kBounds) {
    std::array<int, 6> order = {There, ThereAgain, Back, BackAgain, Call0, Call1};
    do {
      if (std::find(order.begin(), order.end(), ThereAgain) <
              std::find(order.begin(), order.end(), There) ||
          std::find(order.begin(), order.end(), BackAgain) <
              std::find(order.begin(), order.end(), Back))
        continue;
      const std::string text = testing::PrintToString(most) + testing::PrintToString(order);
      Links links(/*held=*/false);
      Bounded group(2, most);
      Conversation messages(*group, 0, 1);
      Sums sums(*group);
      const std::size_t first = links.made();
      for (std::size_t way = 0; way < 2 * first; ++way)
        links.way(way).hold_at(links.way(way).written());
      messages.send();  // opens the second connection, so the ranks would close the first
      messages.finish(text);
      group->settle();
      for (const int step : order) {
        if (step >= Call0) {
          sums.call(step == Call0 ? 0 : 1);
        } else {
          deliver(links, first, *group, step < Back);
        }
        group->settle();
      }
      links.release();
      sums.finish(text);
      messages.send();
      messages.finish(text);
      group.expect_few();
      if (HasFailure()) return;
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST(MeshClosings, RandomOrdersOfStepsAndUses) {
  std::mt19937 random(3);
  for (const auto& most : kBounds) {
    Links links(/*held=*/false);
    Bounded group(2, most);
    Conversation there(*group, 0, 1), back(*group, 1, 0);
    Sums sums(*group);
    for (int round = 0; round < 60; ++round) {
      const std::string text = testing::PrintToString(most) + " round " + std::to_string(round);
      links.hold();
      for (int step = 0; step < 40; ++step) {
        switch (random() % 10) {
          case 0: there.send(); break;
          case 1: there.recv(); break;
          case 2: back.send(); break;
          case 3: back.recv(); break;
          case 4: sums.call(0); break;
          case 5: sums.call(1); break;
          default: {
            // The last connections are the open ones; others have ended.
            const std::size_t ways = 2 * links.made();
            const inproc::Faults way =
                links.way(ways - 1 - random() % std::min<std::size_t>(ways, 6));
            way.release();
            group->settle();
            way.hold_at(way.written());
          }
        }
        group->settle();
      }
      links.release();
      sums.finish(text);
      there.finish(text);
      back.finish(text);
      group.expect_few();
      if (HasFailure()) return;
    }
  }
}

// The hello of a connection that rank 0 has dropped arrives when the one that both ranks used in
// its place has been closed.
TEST(MeshClosings, DroppedConnectionIsNotTakenInLater) {
  Bounded group(2, {1});
  Conversation there(*group, 0, 1), back(*group, 1, 0);
  Sums sums(*group);
  Links links(/*held=*/true);
  there.send();
  back.send();
  group->settle();
  ASSERT_EQ(links.made(), 2u);  // first that of rank 0
  links.hold_new(false);
  for (const std::size_t way : {2, 3}) links.way(way).release();
  there.finish("over the connection of rank 1");
  back.finish("over the connection of rank 1");
  for (int turn = 0; turn < 2; ++turn) {  // so that no connection for messages is left
    sums.call(0);
    sums.finish("sum");
    // Rank 1 still has an end of the dropped one.
    const Deadline deadline = soon();
    while ((group.open(0) > 1 || group.open(1) > 2) && !deadline.passed()) group->settle();
  }
  for (const std::size_t way : {0, 1}) links.way(way).release();
  group->settle();
  for (Conversation* const one : {&there, &back}) {
    one->send();
    one->finish("over a new connection");
  }
  sums.call(0);
  sums.finish("the last sum");
  group.expect_few();
}

// --- Deaths ---

// Rank 1 ends while a question or its answer is on the way; the test delivers these steps before.
TEST(MeshClosings, RankThatEndsMeanwhileIsLost) {
  using Steps =
      std::vector<bool>;  // true: bytes of the connections' maker arrive; false: those to it
  for (const auto& most : kBounds) {
    for (const Steps& steps :
         {Steps{}, {true}, {false}, {true, false}, {false, true}, {true, false, true}}) {
      const std::string text = testing::PrintToString(most) + testing::PrintToString(steps);
      Links links(/*held=*/false);
      Bounded group(2, most);
      Conversation messages(*group, 0, 1);
      const std::size_t first = links.made();
      for (std::size_t way = 0; way < 2 * first; ++way)
        links.way(way).hold_at(links.way(way).written());
      messages.send();
      messages.finish(text);
      group->settle();
      for (const bool there : steps) deliver(links, first, *group, there);
      group->communicators[1].reset();
      links.release();
      std::vector<float> numbers(4);
      const Elements data = elements_of(numbers, Dtype::Float32);
      const Error lost = expect_failed(group->messages(0).recv(data, 1, 0, Pin(), Fence()), text);
      EXPECT_EQ(lost.blame(), Blame::PeerLost) << text << ": " << lost.what();
      EXPECT_THAT(lost.ranks(), ElementsAre(1)) << text;
      const Error sum = expect_failed(
          group->communicators[0]->all_reduce(data, ReduceOp::Sum, Pin(), Fence()), text);
      EXPECT_THAT(sum.ranks(), ElementsAre(1)) << text << ": " << sum.what();
    }
  }
}

// Rank 1 of some processes kills itself before one of their messages. All messages of the others
// arrive, and each learns who is lost.
class MeshClosingsKilled : public testing::TestWithParam<std::tuple<std::string, int>> {};
INSTANTIATE_TEST_SUITE_P(Mesh, MeshClosingsKilled,
                         testing::Combine(testing::Values("tcp", "shm"),
                                          testing::Values(3, 10, 17, 40, 77)),
                         [](const auto& one) {
                           return std::get<0>(one.param) + "Turn" +
                                  std::to_string(std::get<1>(one.param));
                         });

constexpr int kVictim = 1;

void expect_victim(const Error& error) {
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
  EXPECT_THAT(error.ranks(), ElementsAre(kVictim)) << error.what();
}

void exchange_until_killed(Communicator& communicator, int last_turn) {
  std::mt19937 random(static_cast<unsigned>(last_turn));
  std::vector<std::int64_t> number(1);
  const Elements data = elements_of(number, Dtype::Int64);
  PointToPoint& messages = *communicator.point_to_point();
  const auto ranks = static_cast<unsigned>(communicator.size());
  for (int turn = 0; turn < 2 * last_turn + 20; ++turn) {
    const int from = static_cast<int>(random() % ranks);
    const int to =
        static_cast<int>((static_cast<unsigned>(from) + 1 + random() % (ranks - 1)) % ranks);
    if (communicator.rank() == kVictim && turn == last_turn) ::raise(SIGKILL);
    if (communicator.rank() != from && communicator.rank() != to) continue;
    number[0] = communicator.rank() == from ? turn : -1;
    const Op op = communicator.rank() == from ? messages.send(data, to, 0, Pin(), Fence())
                                              : messages.recv(data, from, 0, Pin(), Fence());
    ASSERT_TRUE(op.done().synchronize(soon())) << "turn " << turn;
    if (const auto error = op.error()) {
      EXPECT_TRUE(turn >= last_turn && (from == kVictim || to == kVictim)) << turn;
      expect_victim(*error);
    } else {
      EXPECT_EQ(number[0], turn);
    }
  }
  expect_victim(expect_failed(messages.recv(data, kVictim, 0, Pin(), Fence()), "recv"));
}

TEST_P(MeshClosingsKilled, RankIsNamed) {
  constexpr int kRanks = 5;
  const auto& [transport, last_turn] = GetParam();
  const harness::Folder folder;
  std::vector<pid_t> children;
  for (int rank = 0; rank < kRanks; ++rank) {
    children.push_back(::fork());
    ASSERT_GE(children.back(), 0);
    if (children.back() != 0) continue;
    try {
      const auto store = std::make_shared<harness::FileBootstrap>(folder.path());
      JoinOptions options = options_of(rank, kRanks, store);
      options.max_connections = 1;
      const auto communicator = transport_named(transport)->join(options);
      exchange_until_killed(*communicator, last_turn);
      store->set("end/" + std::to_string(rank), {});
      for (const int other : {0, 2, 3, 4}) store->get("end/" + std::to_string(other), soon());
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
    std::_Exit(HasFailure() ? 1 : 0);
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    int status = 0;
    ASSERT_EQ(::waitpid(children[static_cast<std::size_t>(rank)], &status, 0),
              children[static_cast<std::size_t>(rank)]);
    if (rank == kVictim) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    } else {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
    }
  }
}

}  // namespace
}  // namespace weft::transport::mesh
