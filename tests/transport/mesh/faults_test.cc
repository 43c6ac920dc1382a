// SPDX-License-Identifier: Apache-2.0
// Peers that send nonsense, leave, or never join: every pending operation ends with an error that
// names them.
#include <future>

#include <weft/base/log.h>
#include <weft/tests/transport/mesh/mesh_ranks.h>
#include <weft/transport/inproc/faults.h>
#include <weft/transport/mesh/messages.h>

namespace weft::transport::mesh {
namespace {

using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Rank 0 of two; the peer is scripted.
class MeshFaults : public testing::Test {
 protected:
  // Joins on a thread while `meet` runs the peer's side.
  void join(
      const std::function<void(ScriptedPeer&)>& meet = [](ScriptedPeer& script) { script.join(); },
      std::chrono::milliseconds timeout = kTimeout) {
    std::thread joining([&] {
      try {
        communicator = join_inproc(options_of(0, 2, store, timeout));
      } catch (const Error& error) {
        join_error = error;
      }
    });
    meet(peer);
    joining.join();
  }
  Op sum() {
    return communicator->all_reduce(elements_of(data, Dtype::Float32), ReduceOp::Sum, Pin(),
                                    Fence());
  }
  // The header of the part that rank 1 sends in a sum().
  Header part(std::uint64_t sequence = 1) {
    Header header;
    header.call = {Kind::AllReduce, Dtype::Float32, ReduceOp::Sum, 0, data.size() * 4};
    header.sequence = sequence;
    return header;
  }
  void expect_broken(Blame blame, const std::string& text) {
    const Error error =
        expect_failed(communicator->barrier(Fence()), "an operation of a broken communicator");
    EXPECT_EQ(error.blame(), blame) << error.what();
    EXPECT_THAT(error.text(), HasSubstr(text));
  }

  std::vector<float> data = std::vector<float>(16, 1);
  std::shared_ptr<harness::MemoryBootstrap> store = std::make_shared<harness::MemoryBootstrap>();
  ScriptedPeer peer{store};
  std::shared_ptr<Communicator> communicator;
  std::optional<Error> join_error;
};

TEST_F(MeshFaults, ScriptedPeerCanTakePart) {
  join();
  ASSERT_NE(communicator, nullptr) << join_error->what();
  const Op op = sum();
  peer.say(Traffic::Collectives, part(), 64);
  expect_done(op, "all_reduce");
  EXPECT_EQ(data[15], 1);  // the script sends zeros
}

TEST_F(MeshFaults, JoiningLeavesNothingInTheStore) {
  join();
  EXPECT_FALSE(store->exists("mesh/table"));
  EXPECT_FALSE(store->exists("mesh/address/0"));
  EXPECT_FALSE(store->exists("mesh/address/1"));
}

TEST_F(MeshFaults, StrangersAreTurnedAwayAndLogged) {
  std::mutex mutex;
  std::vector<std::string> lines;
  const log::Capture capture([&](LogLevel, std::string_view text) {
    std::lock_guard lock(mutex);
    lines.emplace_back(text);
  });
  join([](ScriptedPeer& script) {
    script.meet();
    std::vector<std::shared_ptr<Connection>> strangers;
    const auto greet = [&](const Hello& hello) {
      strangers.push_back(script.connect());
      strangers.back()->send(encode(hello), {}, Pin(), Fence());
    };
    for (int i = 0; i < 300; ++i) strangers.push_back(script.connect());  // these send nothing
    strangers.push_back(script.connect());
    strangers.back()->send(std::vector<std::byte>(5), {}, Pin(), Fence());
    Hello hello = script.hello;
    hello.token[0] ^= std::byte{1};
    greet(hello);
    hello = script.hello;
    hello.ranks = 3;
    greet(hello);
    hello = script.hello;
    hello.rank = 0;
    greet(hello);
    script.say_hello(Traffic::Messages);
    hello = script.hello;  // a second hello for the same connection
    greet(hello);
    script.say_hello(Traffic::Collectives);
    Header barrier;
    barrier.call.kind = Kind::Barrier;
    script.say(Traffic::Collectives, barrier);
    script.hear(Traffic::Collectives);
  });
  ASSERT_NE(communicator, nullptr) << join_error->what();
  const Op op = sum();
  peer.say(Traffic::Collectives, part(), 64);
  expect_done(op, "all_reduce");
  std::lock_guard lock(mutex);
  std::string all;
  for (const std::string& line : lines) all += line + "\n";
  for (const char* text : {"turned away", "a hello of 5 bytes", "group's token", "one of 3 ranks",
                           "does not connect here"}) {
    EXPECT_THAT(all, HasSubstr(text));
  }
  // On a machine that is busy for 10 s the time limit is first.
  EXPECT_THAT(all, AnyOf(HasSubstr("too many connect"), HasSubstr("it sent no hello within")));
}

TEST_F(MeshFaults, RankThatNeverJoinsIsNamed) {
  join([](ScriptedPeer&) {}, std::chrono::milliseconds(200));
  ASSERT_TRUE(join_error);
  EXPECT_EQ(join_error->blame(), Blame::Timeout);
  EXPECT_THAT(join_error->text(), HasSubstr("missing: rank 1"));
  EXPECT_THAT(join_error->text(), HasSubstr("200 ms"));
}

TEST_F(MeshFaults, RankLostWhileJoiningIsNamed) {
  join([](ScriptedPeer& script) {
    script.meet();
    script.say_hello(Traffic::Collectives);
    script.say_hello(Traffic::Messages);
    script.close();
  });
  ASSERT_TRUE(join_error);
  EXPECT_EQ(join_error->blame(), Blame::PeerLost) << join_error->what();
  EXPECT_THAT(join_error->text(), HasSubstr("rank 1"));
}

TEST(MeshJoin, AllMissingRanksAreNamed) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::vector<std::thread> threads;
  for (const int rank : {0, 2}) {  // of four
    threads.emplace_back([&, rank] {
      try {
        join_inproc(options_of(rank, 4, store, std::chrono::milliseconds(300)));
        ADD_FAILURE() << "rank " << rank << " joined half a group";
      } catch (const Error& error) {
        EXPECT_EQ(error.blame(), Blame::Timeout);
        EXPECT_THAT(error.text(), HasSubstr("missing: ranks 1, 3"));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

struct Nonsense {
  const char* name;
  Traffic traffic;
  std::function<Header(Header part)> header;
  std::size_t payload;
  Blame blame = Blame::Protocol;
};

class MeshNonsense : public MeshFaults, public testing::WithParamInterface<Nonsense> {};

TEST_P(MeshNonsense, BreaksOnlyTheCommunicator) {
  const Nonsense& nonsense = GetParam();
  join();
  ASSERT_NE(communicator, nullptr);
  std::vector<float> more(4);
  const Op op = sum();
  const Op receive =
      communicator->point_to_point()->recv(elements_of(more, Dtype::Float32), 1, 5, Pin(), Fence());
  peer.say(nonsense.traffic, nonsense.header(part()), nonsense.payload);
  for (const Op& one : {op, receive}) {
    const Error error = expect_failed(one, "an operation whose peer sends nonsense");
    EXPECT_EQ(error.blame(), nonsense.blame) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("rank 1"));
  }
}

Header with(Type type, std::uint64_t bytes = 0, std::uint64_t sequence = 0) {
  Header header;
  header.type = type;
  header.call.bytes = bytes;
  header.call.dtype = Dtype::Float32;
  header.sequence = sequence;
  return header;
}

INSTANTIATE_TEST_SUITE_P(
    Mesh, MeshNonsense,
    testing::Values(Nonsense{"UnexpectedPart", Traffic::Collectives,
                             [](Header h) { return h.number = 1, h; }, 64},
                    Nonsense{"PartFarBeyondTheLast", Traffic::Collectives,
                             [](Header h) { return h.number = ~0u, h; }, 64},
                    Nonsense{"PartOfAnotherSize", Traffic::Collectives, [](Header h) { return h; },
                             60, Blame::Caller},
                    Nonsense{"EndedOperation", Traffic::Collectives,
                             [](Header h) { return h.sequence = 0, h; }, 64, Blame::Caller},
                    Nonsense{"MessageOnCollectivesConnection", Traffic::Collectives,
                             [](Header) { return with(Type::Eager, 8); }, 8},
                    Nonsense{"CollectiveOnMessagesConnection", Traffic::Messages,
                             [](Header h) { return h; }, 64},
                    Nonsense{"UnknownType", Traffic::Messages,
                             [](Header) { return with(static_cast<Type>(99)); }, 0},
                    Nonsense{"EagerMessageTooLong", Traffic::Messages,
                             [](Header) { return with(Type::Eager, kEagerBytes + 1); },
                             kEagerBytes + 1},
                    Nonsense{"ClearWithoutRequest", Traffic::Messages,
                             [](Header) { return with(Type::Clear, 0, 7); }, 0},
                    Nonsense{"PayloadWithoutRequest", Traffic::Messages,
                             [](Header) { return with(Type::Payload, 16, 7); }, 16},
                    Nonsense{"CreditBeyondTheLimit", Traffic::Messages,
                             [](Header) { return with(Type::Credit, ~std::uint64_t{0}); }, 0},
                    Nonsense{"RequestWithPayload", Traffic::Messages,
                             [](Header) { return with(Type::Request, 16, 7); }, 16}),
    [](const auto& one) { return one.param.name; });

// A rank drops it only where it may itself send such parts.
TEST_F(MeshFaults, GatheredPartOnOneHostIsRefused) {
  join();
  std::vector<float> numbers(8);
  const std::vector<Slice> halves{{numbers.data(), 16, Device::host()},
                                  {numbers.data() + 4, 16, Device::host()}};
  const Op op = communicator->all_to_all(halves, halves, Dtype::Float32, Pin(), Fence());
  Header header = part();
  header.call = {.kind = Kind::AllToAll, .dtype = Dtype::Float32, .bytes = 16};
  peer.say(Traffic::Collectives, header, 16);
  const Error error = expect_failed(op, "all_to_all");
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), HasSubstr("rank 1 called all_to_all of parts of 4 elements"));
}

TEST_F(MeshFaults, ExceedingTheCreditIsRefused) {
  join();
  for (std::size_t sent = 0; sent <= kCredit; sent += kEagerBytes) {
    peer.say(Traffic::Messages, with(Type::Eager, kEagerBytes), kEagerBytes);
  }
  expect_broken(Blame::Protocol, "exceeds its credit");
}

TEST_F(MeshFaults, AnnouncementsAreBounded) {
  join();
  for (std::uint64_t i = 0; i <= kMaxRequests; ++i)
    peer.say(Traffic::Messages, with(Type::Request, 1 << 20, i));
  expect_broken(Blame::Protocol, "too many announcements");
}

TEST_F(MeshFaults, WronglyAnnouncedSizeIsRefused) {
  join();
  std::vector<float> more(4);
  const Op receive =
      communicator->point_to_point()->recv(elements_of(more, Dtype::Float32), 1, 0, Pin(), Fence());
  peer.say(Traffic::Messages, with(Type::Request, 16, 3));
  EXPECT_EQ(peer.hear(Traffic::Messages).header.type, Type::Clear);
  peer.say(Traffic::Messages, with(Type::Payload, 12, 3), 12);
  EXPECT_EQ(expect_failed(receive, "recv").blame(), Blame::Protocol);
}

TEST_F(MeshFaults, DtypeMismatchBreaksBothSides) {
  join();
  std::vector<float> numbers(4);
  const Op receive = communicator->point_to_point()->recv(elements_of(numbers, Dtype::Float32), 1,
                                                          0, Pin(), Fence());
  Header integers = with(Type::Request, 16, 3);
  integers.call.dtype = Dtype::Int32;
  peer.say(Traffic::Messages, integers);
  const Error error = expect_failed(receive, "recv");
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(),
              HasSubstr("sent a message of int32 (tag 0), which rank 0 receives as float32"));
  EXPECT_EQ(expect_failed(sum(), "a later operation").blame(), Blame::Caller);
  const Message told = peer.hear(Traffic::Collectives);
  EXPECT_EQ(told.header.type, Type::Failure);
  EXPECT_EQ(told.header.blame, Blame::Caller);
}

TEST_F(MeshFaults, PeersReasonIsPassedOn) {
  join();
  const Op op = sum();
  peer.say_raw(Traffic::Collectives, encode_failure(Error(Blame::Caller, "wrong weather")));
  const Error error = expect_failed(op, "all_reduce");
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_THAT(error.text(), HasSubstr("rank 1 has given up: wrong weather"));
  EXPECT_THAT(error.ranks(), IsEmpty());
}

TEST_F(MeshFaults, RanksNamedByAPeerArePassedOn) {
  join();
  const Op op = sum();
  peer.say_raw(Traffic::Collectives,
               encode_failure(Error(Blame::PeerLost, "rank 0 is lost").with_ranks({0})));
  EXPECT_THAT(expect_failed(op, "all_reduce").ranks(), ElementsAre(0));
}

TEST_F(MeshFaults, PeerThatCancelsIsTheLostOne) {
  join();
  const Op op = sum();
  peer.say_raw(Traffic::Collectives, encode_failure(Error(Blame::Cancelled, "enough")));
  const Error error = expect_failed(op, "all_reduce");
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_THAT(error.ranks(), ElementsAre(1));
}

TEST_F(MeshFaults, LostPeerEndsPendingInEveryPhase) {
  join();
  PointToPoint& messages = *communicator->point_to_point();
  std::vector<float> small(4), large(1 << 20);
  std::vector<Op> ops;
  ops.push_back(sum());
  ops.push_back(communicator->barrier(Fence()));  // queued behind the sum
  ops.push_back(
      messages.recv(elements_of(small, Dtype::Float32), 1, 0, Pin(), Fence()));  // no message
  ops.push_back(messages.recv(elements_of(small, Dtype::Float32), kAnySource, 1, Pin(),
                              Fence()));  // from any rank
  ops.push_back(
      messages.send(elements_of(large, Dtype::Float32), 1, 2, Pin(), Fence()));  // not cleared
  ops.push_back(
      messages.recv(elements_of(large, Dtype::Float32), 1, 3, Pin(), Fence()));  // cleared
  peer.say(Traffic::Messages, [] {
    Header header = with(Type::Request, 4 << 20, 1);
    header.call.root = 3;
    return header;
  }());
  EXPECT_EQ(peer.hear(Traffic::Messages).header.type, Type::Request);
  EXPECT_EQ(peer.hear(Traffic::Messages).header.type, Type::Clear);
  peer.close();
  for (const Op& op : ops) {
    const Error error = expect_failed(op, "an operation whose peer is lost");
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("rank 1"));
  }
  EXPECT_EQ(expect_failed(sum(), "a later operation").blame(), Blame::PeerLost);
  EXPECT_EQ(expect_failed(messages.send(elements_of(small, Dtype::Float32), 1, 0, Pin(), Fence()),
                          "a later send")
                .blame(),
            Blame::PeerLost);
}

TEST_F(MeshFaults, EarlierMessagesOutliveTheirSender) {
  join();
  PointToPoint& messages = *communicator->point_to_point();
  std::vector<float> small(4, 7), more(4);
  peer.say(Traffic::Messages, with(Type::Eager, 16), 16);
  const Op behind = messages.recv(elements_of(more, Dtype::Float32), 1, 1, Pin(), Fence());
  peer.close();
  EXPECT_EQ(expect_failed(behind, "a receive of a message that was never sent").blame(),
            Blame::PeerLost);
  expect_done(messages.recv(elements_of(small, Dtype::Float32), 1, 0, Pin(), Fence()), "recv");
  EXPECT_EQ(small[0], 0);
}

// The operation does not wait for the rest of the part, which no connection writes any more: it
// ends before the operations behind it, which have nothing to wait for.
TEST_F(MeshFaults, LossInTheMiddleOfAPartEndsTheOperationFirst) {
  std::vector<inproc::Faults> ways;  // of the script's connections, in their order
  inproc::on_link(
      [&, script = std::this_thread::get_id()](const inproc::Faults& there, const inproc::Faults&) {
        if (std::this_thread::get_id() == script) ways.push_back(there);
      });
  join();
  inproc::on_link({});
  ASSERT_EQ(ways.size(), 2u);
  std::vector<float> large(1 << 20);
  const Op op = communicator->broadcast(elements_of(large, Dtype::Float32), 1, Pin(), Fence());
  const Op behind = communicator->barrier(Fence());
  std::promise<bool> has_ended_before;
  behind.on_ended([&] { has_ended_before.set_value(op.done().query()); });
  Header whole;
  whole.call = {Kind::Broadcast, Dtype::Float32, ReduceOp::Sum, 1, large.size() * 4};
  whole.sequence = 1;
  ways[0].cut_at(ways[0].written() + (1 << 20));
  peer.say(Traffic::Collectives, whole, large.size() * 4);
  EXPECT_EQ(expect_failed(op, "a broadcast whose root is lost").blame(), Blame::PeerLost);
  EXPECT_EQ(expect_failed(behind, "a barrier behind it").blame(), Blame::PeerLost);
  EXPECT_TRUE(has_ended_before.get_future().get());
}

TEST_F(MeshFaults, DelayedPartOfALostPeerStillCounts) {
  std::vector<inproc::Faults> ways;  // of the script's connections, in their order
  inproc::on_link(
      [&, script = std::this_thread::get_id()](const inproc::Faults& there, const inproc::Faults&) {
        if (std::this_thread::get_id() == script) ways.push_back(there);
      });
  join();
  inproc::on_link({});
  ASSERT_EQ(ways.size(), 2u);
  const Op op = sum();
  ways[0].hold_at(ways[0].written());
  peer.say(Traffic::Collectives, part(), 64);
  peer.close();
  const Op behind = communicator->barrier(Fence());
  EXPECT_FALSE(op.done().synchronize(Deadline::in(std::chrono::milliseconds(100))))
      << "the peer's part was held back, yet the operation ended";
  ways[0].release();
  expect_done(op, "an operation whose last part was sent before its peer left");
  EXPECT_EQ(expect_failed(behind, "an operation that the peer never entered").blame(),
            Blame::PeerLost);
}

TEST_F(MeshFaults, PeerWithOneConnectionLeftIsLost) {
  join();
  const Op op = sum();
  peer.close(Traffic::Messages);
  EXPECT_EQ(expect_failed(op, "an operation with a peer that has closed one connection").blame(),
            Blame::PeerLost);
}

TEST_F(MeshFaults, LateRankIsNamedAndBreaksTheGroup) {
  join([](ScriptedPeer& script) { script.join(); }, std::chrono::milliseconds(700));
  ASSERT_NE(communicator, nullptr) << join_error->what();
  const Error error = expect_failed(sum(), "an operation that no other rank enters");
  EXPECT_EQ(error.blame(), Blame::Timeout);
  EXPECT_THAT(error.text(), HasSubstr("still expected: rank 1"));
  EXPECT_THAT(error.ranks(), ElementsAre(1));
  expect_broken(Blame::Timeout, "700 ms");
  Message told = peer.hear(Traffic::Collectives);
  while (told.header.type == Type::Collective) told = peer.hear(Traffic::Collectives);
  EXPECT_EQ(told.header.type, Type::Failure);
  EXPECT_EQ(told.header.blame, Blame::Timeout);
  EXPECT_THAT(told.about, ElementsAre(1));
}

TEST_F(MeshFaults, UnsentMessageTimesOut) {
  join([](ScriptedPeer& script) { script.join(); }, std::chrono::milliseconds(700));
  std::vector<float> more(4);
  const Op op =
      communicator->point_to_point()->recv(elements_of(more, Dtype::Float32), 1, 4, Pin(), Fence());
  const Error error = expect_failed(op, "recv");
  EXPECT_EQ(error.blame(), Blame::Timeout);
  EXPECT_THAT(error.text(), HasSubstr("recv from rank 1 (tag 4)"));
}

TEST_F(MeshFaults, AbortEndsAllAndTellsThePeer) {
  join();
  PointToPoint& messages = *communicator->point_to_point();
  std::vector<float> small(4), large(1 << 20);
  const auto gate = std::make_shared<HostFlag>();
  std::vector<Op> ops;
  ops.push_back(sum());
  ops.push_back(communicator->barrier(Fence(gate)));
  ops.push_back(messages.send(elements_of(large, Dtype::Float32), 1, 2, Pin(), Fence()));
  ops.push_back(messages.recv(elements_of(small, Dtype::Float32), 1, 0, Pin(), Fence(gate)));
  ops.push_back(messages.send(elements_of(small, Dtype::Float32), 0, 0, Pin(), Fence(gate)));
  std::thread([&] { communicator->abort(Error(Blame::Cancelled, "enough")); }).join();
  communicator->abort(Error(Blame::Cancelled, "twice"));
  ops.push_back(sum());
  ops.push_back(messages.send(elements_of(small, Dtype::Float32), 1, 0, Pin(), Fence()));
  for (const Op& op : ops) {
    const Error error = expect_failed(op, "an aborted operation");
    EXPECT_EQ(error.blame(), Blame::Cancelled) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("enough"));
  }
  gate->raise();  // the operations that waited for it are over
  Message told = peer.hear(Traffic::Collectives);
  while (told.header.type == Type::Collective) told = peer.hear(Traffic::Collectives);
  EXPECT_EQ(told.header.type, Type::Failure);
  EXPECT_THAT(told.text, HasSubstr("enough"));
}

TEST_F(MeshFaults, PinsAreHeldWhileMemoryIsInUse) {
  join();
  bool freed = false;
  std::mutex mutex;
  std::condition_variable changed;
  Pin pin(new int, [&](const int* memory) {
    delete memory;
    std::lock_guard lock(mutex);
    freed = true;
    changed.notify_all();
  });
  const Op op = communicator->all_reduce(elements_of(data, Dtype::Float32), ReduceOp::Sum,
                                         std::move(pin), Fence());
  {
    std::lock_guard lock(mutex);
    EXPECT_FALSE(freed);
  }
  communicator->abort(Error(Blame::Cancelled, "enough"));
  expect_failed(op, "all_reduce");
  std::unique_lock lock(mutex);
  EXPECT_TRUE(changed.wait_until(lock, soon().point(), [&] { return freed; }));
}

TEST_F(MeshFaults, DroppingEndsPendingOperations) {
  join();
  const Op op = sum();
  communicator.reset();
  EXPECT_EQ(expect_failed(op, "all_reduce").blame(), Blame::Cancelled);
}

}  // namespace
}  // namespace weft::transport::mesh
