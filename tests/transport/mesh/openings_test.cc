// SPDX-License-Identifier: Apache-2.0
// When a mesh opens connections, and which one it keeps if two ranks connect to each other at once.
#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <optional>

#include <weft/tests/transport/mesh/mesh_group.h>
#include <weft/transport/mesh/openings.h>

namespace weft::transport::mesh {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(MeshOpenings, JoiningOpensATreeOfConnections) {
  constexpr std::size_t kRanks = 16;
  Links links(/*held=*/false);
  Group group(kRanks);
  // Both ends of an edge may connect, and an end again, if this machine is slow. All pairs would be
  // 120, with two connections each.
  EXPECT_GE(links.made(), kRanks - 1);
  EXPECT_LE(links.made(), 3 * (kRanks - 1));
}

TEST(MeshOpenings, FirstMessageOpensItsConnection) {
  Group group(3);  // ranks 1 and 2 are not connected after joining
  std::vector<float> sent(4, 7), received(4);
  Links links(/*held=*/false);
  const Op send = group.messages(1).send(elements_of(sent, Dtype::Float32), 2, 0, Pin(), Fence());
  group.settle();
  EXPECT_EQ(links.made(), 1u);
  const Op receive =
      group.messages(2).recv(elements_of(received, Dtype::Float32), 1, 0, Pin(), Fence());
  expect_done(send, "send");
  expect_done(receive, "recv");
  EXPECT_EQ(received, sent);
  expect_done(group.messages(1).send(elements_of(sent, Dtype::Float32), 2, 0, Pin(), Fence()),
              "the next send");
  EXPECT_EQ(links.made(), 1u);
}

// The four directions of the two connections are released in each order.
TEST(MeshOpenings, RanksThatConnectAtOnceKeepTheHigherOnes) {
  std::array<std::size_t, 4> order{};
  std::iota(order.begin(), order.end(), 0);
  do {
    Group group(2);
    std::vector<float> numbers(16, 1), from_0(16), from_1(16);
    const Elements sent = elements_of(numbers, Dtype::Float32);
    Links links(/*held=*/true);
    std::vector<Op> ops;
    ops.push_back(group.messages(0).send(sent, 1, 0, Pin(), Fence()));
    ops.push_back(group.messages(1).send(sent, 0, 0, Pin(), Fence()));
    group.settle();
    ASSERT_GE(links.made(), 2u);
    for (const std::size_t way : order) {
      links.way(way).release();
      group.settle();
    }
    ops.push_back(
        group.messages(0).recv(elements_of(from_1, Dtype::Float32), 1, 0, Pin(), Fence()));
    ops.push_back(
        group.messages(1).recv(elements_of(from_0, Dtype::Float32), 0, 0, Pin(), Fence()));
    const std::string text = "in order " + testing::PrintToString(order);
    for (const Op& op : ops) expect_done(op, text);
    EXPECT_EQ(from_0, numbers) << text;
    EXPECT_EQ(from_1, numbers) << text;
    // All that follows goes over the connection that rank 1 has made, the second. (On a machine
    // that stops for a second rank 0 connects once more, in vain.)
    group.settle();
    std::vector<std::uint64_t> before;
    for (std::size_t way = 0; way < 2 * links.made(); ++way)
      before.push_back(links.way(way).written());
    for (const std::size_t from : {0, 1}) {
      const Op receive = group.messages(1 - from).recv(elements_of(from_0, Dtype::Float32),
                                                       static_cast<int>(from), 1, Pin(), Fence());
      expect_done(group.messages(from).send(sent, static_cast<int>(1 - from), 1, Pin(), Fence()),
                  text);
      expect_done(receive, text);
    }
    for (std::size_t way = 0; way < before.size(); ++way) {
      const bool is_used = way == 2 || way == 3;
      EXPECT_EQ(links.way(way).written() > before[way], is_used) << text << ", way " << way;
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(MeshOpenings, RankThatHasLeftIsNamed) {
  Group group(3);
  group.communicators[2].reset();
  std::vector<float> numbers(4);
  const Elements data = elements_of(numbers, Dtype::Float32);
  for (const Op& op : {group.messages(1).recv(data, 2, 0, Pin(), Fence()),
                       group.messages(1).send(data, 2, 0, Pin(), Fence())}) {
    const Error error = expect_failed(op, "a message to a rank that has left");
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("the connection with rank 2 has ended"));
    EXPECT_THAT(error.ranks(), ElementsAre(2));
  }
  expect_done(group.messages(1).send(data, 0, 0, Pin(), Fence()), "a message to another rank");
}

TEST(MeshOpenings, ReceiverOfALostRankNeedNotSend) {
  Group group(3);
  group.communicators[2].reset();
  std::vector<float> numbers(4);
  const Op op = group.messages(1).recv(elements_of(numbers, Dtype::Float32), 2, 0, Pin(), Fence());
  EXPECT_EQ(expect_failed(op, "recv").blame(), Blame::PeerLost);
}

TEST(MeshOpenings, FailureReachesRanksWithoutAConnection) {
  Group group(3);
  group.communicators[1]->abort(Error(Blame::Cancelled, "enough"));
  std::vector<float> numbers(4);
  const Op op = group.messages(2).recv(elements_of(numbers, Dtype::Float32), 1, 0, Pin(), Fence());
  EXPECT_THAT(expect_failed(op, "recv").text(), HasSubstr("enough"));
}

TEST(MeshOpenings, TransportOfEveryPeerIsNamed) {
  Group group(3);
  for (const int peer : {0, 1, 2}) EXPECT_EQ(group.communicators[1]->transport(peer), "inproc");
}

// Calls a function when its user first sends something.
class TellsOfItsFirst final : public Connection {
 public:
  TellsOfItsFirst(std::shared_ptr<Connection> inner, std::function<void()> first)
      : inner_(std::move(inner)), first_(std::move(first)) {}

  std::string_view transport() const override { return inner_->transport(); }
  std::string peer() const override { return inner_->peer(); }
  const Capabilities& capabilities() const override { return inner_->capabilities(); }
  void receive(Handlers handlers) override { inner_->receive(std::move(handlers)); }
  Op send(std::span<const std::byte> header, std::span<const Slice> payloads, Pin pin,
          Fence ready) noexcept override {
    if (const auto first = std::exchange(first_, {})) first();
    return inner_->send(header, payloads, std::move(pin), std::move(ready));
  }
  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept override {
    return inner_->accept(destinations, std::move(pin), std::move(ready));
  }
  void close(const Error& why) noexcept override { inner_->close(why); }

 private:
  const std::shared_ptr<Connection> inner_;
  std::function<void()> first_;
};

// The connections of inproc, which tell of their first messages.
class Telling final : public Connector {
 public:
  Capabilities capabilities() const override { return inner().capabilities(); }
  int preference() const override { return inner().preference(); }
  std::optional<std::string> why_unreachable(const std::string& address) const override {
    return inner().why_unreachable(address);
  }
  std::unique_ptr<Listener> listen(const ListenOptions& options) override {
    return inner().listen(options);
  }
  std::shared_ptr<Connection> connect(const std::string& address,
                                      const ConnectOptions& options) override {
    return std::make_shared<TellsOfItsFirst>(inner().connect(address, options), first);
  }

  std::function<void()> first;

 private:
  Connector& inner() const { return *transport_->connector(); }
  const std::shared_ptr<Transport> transport_ = inproc::open().value();
};

// The connection of rank 1 is taken in while rank 0 says its hello on its own one.
TEST(MeshOpenings, OwnConnectionMayBeDroppedWhileItIsMade) {
  const auto connector = std::make_shared<Telling>();
  Group group(2, [&](const JoinOptions& options) {
    if (options.rank == 1) return join_inproc(options);
    return mesh::join(connector, "inproc", options,
                      [](const std::string&) { return Chooser(choose); });
  });
  std::vector<float> numbers(4, 3), received(4);
  Op from_1;
  connector->first = [&] {
    from_1 = group.messages(1).send(elements_of(numbers, Dtype::Float32), 0, 0, Pin(), Fence());
    group.settle();
  };
  const Op from_0 =
      group.messages(0).send(elements_of(numbers, Dtype::Float32), 1, 0, Pin(), Fence());
  expect_done(group.messages(0).recv(elements_of(received, Dtype::Float32), 1, 0, Pin(), Fence()),
              "recv");
  expect_done(group.messages(1).recv(elements_of(received, Dtype::Float32), 0, 0, Pin(), Fence()),
              "recv");
  expect_done(from_0, "send");
  expect_done(from_1, "send");
  group.communicators.clear();
}

// A connection to a rank, made by hand.
class ByHand {
 public:
  ByHand(Connector& connector, const std::string& address)
      : connection_(connector.connect(address, {.loop = loop_, .deadline = soon()})) {
    connection_->receive({[this](const Arrival& arrival) {
                            answer_ = decode_hello(arrival.header).value().answer;
                            connection_->accept({}, Pin(), Fence());
                          },
                          [this](const Error& why) {
                            end_ = why.text();
                            has_ended_ = true;
                          }});
  }
  ~ByHand() {
    connection_->close(Error(Blame::Cancelled, "enough"));
    await_end();
  }
  ByHand(const ByHand&) = delete;
  ByHand& operator=(const ByHand&) = delete;

  void say(const Hello& hello) { connection_->send(encode(hello), {}, Pin(), Fence()); }
  void await_end() {
    EXPECT_TRUE(loop_->drive([this] { return has_ended_.load(); }, soon()));
  }
  bool has_ended() const { return has_ended_; }
  const std::string& end() const { return end_; }
  Answer await_answer() {
    EXPECT_TRUE(loop_->drive([this] { return answer_.load().has_value() || has_ended_; }, soon()));
    return answer_.load().value_or(Answer::Crossed);
  }

 private:
  const std::shared_ptr<EventLoop> loop_ = std::make_shared<EventLoop>("by hand");
  const std::shared_ptr<Connection> connection_;
  std::atomic<std::optional<Answer>> answer_{std::nullopt};
  std::string end_;
  std::atomic<bool> has_ended_{false};
};

// Rank 1 connects again while its old connection is still ending, and waits for that. A stranger
// that came later is turned away before, because it has said nothing for as long as it may.
TEST(MeshOpenings, HelloThatWaitsForAnOldConnectionIsNotTimed) {
  const auto transport = inproc::open().value();
  const std::shared_ptr<Connector> connector(transport, transport->connector());
  const JoinOptions options = options_of(0, 2, nullptr);
  const auto door = Door::make(connector, "inproc", options, "rank 0", {});
  const auto openings =
      std::make_shared<Openings>(door, Token(), std::vector{0, 1}, options, "rank 0");
  Table table;
  table.addresses = {door->address(), ""};
  door->open(table.token);
  openings->begin(table, nullptr, soon());
  openings->leave(1, Traffic::Messages);
  ByHand again(*connector, door->address());
  again.say(
      {.token = table.token, .rank = 1, .ranks = 2, .traffic = Traffic::Messages, .closed = 1});
  ByHand stranger(*connector, door->address());
  stranger.await_end();
  EXPECT_THAT(stranger.end(), HasSubstr("it sent no hello"));
  EXPECT_FALSE(again.has_ended()) << again.end();
  openings->left(1, Traffic::Messages);
  EXPECT_EQ(again.await_answer(), Answer::Takes);
  openings->close();
}

}  // namespace
}  // namespace weft::transport::mesh
