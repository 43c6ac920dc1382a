// SPDX-License-Identifier: Apache-2.0
// When a connection ends, an agent asks whether the worker lives and which references have arrived.
// The network is simulated by inproc links with faults.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/engine/call/core.h>
#include <weft/tests/engine/rpc/refs.h>
#include <weft/transport/inproc/faults.h>

namespace lost {

using namespace weft;

std::vector<RRef<int>> own_many(int count) {
  std::vector<RRef<int>> all;
  for (int i = 0; i < count; ++i) all.push_back(RRef<int>(i));
  return all;
}
RRef<int> kept;
std::atomic<bool> has_kept{false};
void keep(RRef<int> given) {
  kept = std::move(given);
  has_kept = true;
}

}  // namespace lost

namespace weft {
namespace {

using namespace std::chrono_literals;
using harness::comes_true;

// Records all inproc connections made in this process while it lives, and breaks them.
class Links {
 public:
  Links() {
    transport::inproc::on_link(
        [this](const transport::inproc::Faults& there, const transport::inproc::Faults& back) {
          std::lock_guard lock(mutex_);
          ways_.push_back(there);
          ways_.push_back(back);
          if (broken_) cut();
        });
  }
  ~Links() { transport::inproc::on_link({}); }
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;
  std::size_t made() const {
    std::lock_guard lock(mutex_);
    return ways_.size() / 2;
  }
  // The two ways of connection `index`, in the order of their making: from its maker, and to it.
  transport::inproc::Faults there(std::size_t index) const {
    std::lock_guard lock(mutex_);
    return ways_.at(2 * index);
  }
  transport::inproc::Faults back(std::size_t index) const {
    std::lock_guard lock(mutex_);
    return ways_.at(2 * index + 1);
  }
  void break_all() {
    std::lock_guard lock(mutex_);
    cut();
  }
  // While `broken`, breaks later connections as well.
  void keep_broken(bool broken) {
    std::lock_guard lock(mutex_);
    broken_ = broken;
    if (broken) cut();
  }

 private:
  void cut() {
    for (auto& way : ways_) way.cut_at(way.written());
  }
  mutable std::mutex mutex_;
  std::vector<transport::inproc::Faults> ways_;
  bool broken_ = false;
};

// A store that, when told so, holds back or refuses answers about workers.
class Unwilling : public c10d::HashStore {
 public:
  void hold() { change(State::Holds); }
  void refuse() { change(State::Refuses); }
  void answer() { change(State::Answers); }
  // Answers again; returns false if an answer was held for more than 10 s.
  bool release() {
    answer();
    std::lock_guard lock(mutex_);
    return !held_too_long_;
  }
  // Waits until it has been asked so often since the last change.
  bool is_asked(int times) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, 20s, [&] { return asked_ >= times; });
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    if (value == 0 && key.ends_with("joined")) asked();
    return c10d::HashStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    if (keys.front().find("worker/") != std::string::npos) asked();
    return c10d::HashStore::check(keys);
  }

 private:
  void asked() {
    std::unique_lock lock(mutex_);
    ++asked_;
    changed_.notify_all();
    if (state_ == State::Refuses) throw std::runtime_error("the store is away");
    if (!changed_.wait_for(lock, 10s, [&] { return state_ != State::Holds; }))
      held_too_long_ = true;
  }
  enum class State { Answers, Holds, Refuses };
  void change(State state) {
    std::lock_guard lock(mutex_);
    state_ = state;
    asked_ = 0;
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::Answers;
  int asked_ = 0;
  bool held_too_long_ = false;
};

rpc::Agent join(int rank, const c10::intrusive_ptr<c10d::Store>& store,
                std::optional<int> size = std::nullopt) {
  rpc::Options options{.rank = rank, .store = store, .transports = {"inproc"}};
  options.world_size = size;
  return rpc::init("worker" + std::to_string(rank), options);
}

// Each agent joins on its own thread, because joining waits for the others.
std::vector<rpc::Agent> join_all(int workers, bool open) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<rpc::Agent> agents(static_cast<std::size_t>(workers));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < workers; ++rank) {
    threads.emplace_back([&, rank] {
      agents[static_cast<std::size_t>(rank)] =
          join(rank, store, open ? std::nullopt : std::optional(workers));
    });
  }
  for (auto& thread : threads) thread.join();
  return agents;
}

class LostWorker : public testing::TestWithParam<bool> {};

// Each liveness probe needs a connection, whose end must not cause another probe.
TEST_P(LostWorker, IsProbedOnlyAFewTimes) {
  Links links;  // open jobs make some connections at joining
  auto agents = join_all(2, /*open=*/GetParam());
  const auto held = agents[1].remote<&refs::number>(0, 4);
  EXPECT_EQ(held.to_here(), 4);
  EXPECT_EQ(agents[0].debug_info().owner_rrefs, 1U);
  // The store says that the worker has not left, but it cannot be reached.
  const auto before = links.made();
  links.keep_broken(true);
  EXPECT_TRUE(comes_true([&] { return agents[0].debug_info().owner_rrefs == 0; }))
      << "its references have ended";
  // This worker probes three times; the other side may probe as well.
  EXPECT_LE(links.made() - before, 20U);
  agents[1].leave();
  agents[0].leave();
}

TEST_P(LostWorker, BrokenConnectionsAloneLoseNobody) {
  auto agents = join_all(2, /*open=*/GetParam());
  Links links;
  const auto held = agents[1].remote<&refs::number>(0, 4);
  EXPECT_EQ(held.to_here(), 4);
  for (int again = 0; again < 5; ++again) {
    links.break_all();
    EXPECT_TRUE(comes_true([&] {
      try {
        return held.to_here() == 4;
      } catch (const Error& error) {  // this call was on a connection that broke
        EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
        return false;
      }
    }));
  }
  agents[1].leave();
  agents[0].leave();
}

// Includes calls whose connection was made just when the previous one ended.
TEST_P(LostWorker, CallsEndWhileConnectionsBreak) {
  auto agents = join_all(2, /*open=*/GetParam());
  Links links;
  std::atomic<int> ended{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      while (!over) {
        try {
          agents[1].async<&refs::number>(rpc::to(0).timeout(0ms), 1).wait(20s);
        } catch (const Error& error) {
          EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
          if (error.blame() != Blame::PeerLost) over = true;
        }
        ++ended;
      }
    });
  }
  for (int again = 0; again < 300 && !over; ++again) {
    const int before = ended;
    EXPECT_TRUE(comes_true([&] { return over || ended >= before + 4; }));
    links.break_all();
  }
  over = true;
  for (auto& caller : callers) caller.join();
  agents[1].leave();
  agents[0].leave();
}

// There are more references than one message asks about.
TEST_P(LostWorker, ReferencesSurviveBrokenConnections) {
  Links links;  // before they join: in open jobs each then connects to the other
  auto agents = join_all(2, /*open=*/GetParam());
  const int many = 10'000;
  auto all = agents[1].sync<&lost::own_many>(0, many);
  links.break_all();
  // It is asked whether it lives (in open jobs also at joining), and three times which references
  // have arrived.
  EXPECT_TRUE(
      comes_true([&] { return agents[1].debug_info().calls_served >= (GetParam() ? 5U : 4U); }));
  EXPECT_EQ(agents[0].debug_info().owner_rrefs, static_cast<std::size_t>(many));
  for (const int one : {0, 4095, 4096, many - 1})
    EXPECT_EQ(all[static_cast<std::size_t>(one)].to_here(), one);
  all.clear();
  EXPECT_TRUE(comes_true([&] { return agents[0].debug_info().owner_rrefs == 0; }));
  agents[1].leave();
  agents[0].leave();
}

INSTANTIATE_TEST_SUITE_P(Rpc, LostWorker, testing::Bool(),
                         [](const auto& is_open) { return is_open.param ? "Open" : "Fixed"; });

// The creation is lost, and its creator leaves. The owner hears of the value only later, from
// another worker, and must fail those that wait for it.
TEST(LostCreator, FailsThoseThatAwaitItsValue) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<rpc::Agent> agents(3);
  harness::run_threads(3, [&](int rank) {
    rpc::Options options{.rank = rank, .world_size = 3, .store = store, .transports = {"inproc"}};
    if (rank == 1) options.faults.drop = {rpc::MessageKind::Create};
    if (rank == 2)
      options.faults.delay = {
          {rpc::MessageKind::Fork, 1s}};  // by then the owner has forgotten rank 1
    agents[static_cast<std::size_t>(rank)] = rpc::init("worker" + std::to_string(rank), options);
  });
  agents[1].async<&lost::keep>(2, agents[1].remote<&refs::number>(0, 4));
  EXPECT_TRUE(comes_true([&] { return agents[2].debug_info().pending_users == 1; }))
      << "the reference has arrived";
  agents[1].leave();
  EXPECT_TRUE(comes_true([] { return lost::has_kept.load(); }));
  const auto fetched = std::exchange(lost::kept, {}).fetch();
  EXPECT_TRUE(comes_true([&] { return fetched.done(); }, 10s));
  const auto error = harness::error_of([&] { fetched.wait(0ms); });
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
  EXPECT_NE(error.text().find("its creator, rank 1, is gone"), std::string::npos) << error.text();
  agents[2].leave();
  agents[0].leave();
}

// Holds the bytes that are written on a way from now on, and then loses them with the connection.
class Loss {
 public:
  explicit Loss(transport::inproc::Faults way) : way_(std::move(way)), at_(way_.written()) {
    way_.hold_at(at_);
  }
  ~Loss() { happens(); }
  Loss(const Loss&) = delete;
  Loss& operator=(const Loss&) = delete;
  bool is_coming() const {
    return comes_true([&] { return way_.written() > at_; });
  }
  void happens() const {
    way_.cut_at(at_);
    way_.release();
  }

 private:
  const transport::inproc::Faults way_;
  const std::uint64_t at_;
};

// Which part of a control message's exchange is lost. The message is sent again, so it arrives once
// or, if its reply is lost, twice.
enum class Lost { Message, Answer };
class LostControl : public testing::TestWithParam<Lost> {
 protected:
  static bool message() { return GetParam() == Lost::Message; }
  static transport::inproc::Faults way(const Links& links, std::size_t index) {
    return message() ? links.there(index) : links.back(index);
  }
  static bool holds(const rpc::Agent& owner, rref::Id id, rref::ForkId fork) {
    return rref::references_of(*owner.shared_core()).values().holds(id, fork);
  }
  static void expect_nothing_left(const std::vector<rpc::Agent>& agents) {
    for (const auto& agent : agents) {
      EXPECT_TRUE(comes_true([&] {
        const auto now = agent.debug_info();
        return now.owner_rrefs + now.forks + now.pending_users + now.calls_waiting == 0;
      })) << agent.self().name;
    }
  }
};

TEST_P(LostControl, EndOfAReferenceIsSentAgain) {
  auto agents = join_all(2, /*open=*/false);
  Links links;
  auto first = agents[1].remote<&refs::number>(0, 4);
  auto other = agents[1].sync<&refs::give_back>(0, first);  // this one is another fork
  const auto id = first.handle()->id();
  const auto fork = first.handle()->fork(), fork_of_other = other.handle()->fork();
  EXPECT_TRUE(holds(agents[0], id, fork));
  {
    const Loss loss(way(links, 0));
    first = {};
    EXPECT_TRUE(loss.is_coming());
    EXPECT_EQ(holds(agents[0], id, fork), message());
  }
  EXPECT_TRUE(comes_true([&] { return agents[1].debug_info().calls_waiting == 0; }));
  EXPECT_FALSE(holds(agents[0], id, fork));
  EXPECT_TRUE(holds(agents[0], id, fork_of_other)) << "ending a fork twice ends no other fork";
  EXPECT_EQ(other.to_here(), 4);
  other = {};
  expect_nothing_left(agents);
  for (auto& agent : agents) agent.leave();
}

TEST_P(LostControl, OwnerIsToldOfAForkAgain) {
  auto agents = join_all(3, /*open=*/false);
  Links links;
  agents[0].sync<&refs::nothing>(2);
  RRef<int> given;
  {
    const Loss loss(way(links, 0));
    given = agents[0].sync<&refs::make_on>(1, agents[0].worker(2), 5);
    EXPECT_TRUE(loss.is_coming());
    EXPECT_FALSE(given.confirmed());
    EXPECT_EQ(holds(agents[2], given.handle()->id(), given.handle()->fork()), !message());
    EXPECT_TRUE(comes_true([&] { return agents[2].debug_info().forks == (message() ? 1U : 2U); }))
        << "the giver keeps its own reference";
  }
  EXPECT_TRUE(comes_true([&] { return given.confirmed() && agents[2].debug_info().forks == 1; }));
  EXPECT_TRUE(holds(agents[2], given.handle()->id(), given.handle()->fork()));
  EXPECT_EQ(given.to_here(), 5);
  given = {};
  expect_nothing_left(agents);
  for (auto& agent : agents) agent.leave();
}

TEST_P(LostControl, GiverIsToldOfItsChildAgain) {
  auto agents = join_all(3, /*open=*/false);
  Links links;
  agents[0].sync<&refs::nothing>(1);
  const auto keeps_parent = [&](const RRef<int>& given) {
    return rref::references_of(*agents[1].shared_core())
        .parents()
        .keeps_parent_of(given.handle()->fork());
  };
  // Holds the reply with the reference until the loss is prepared.
  const auto there = links.there(0), back = links.back(0);
  const auto before = back.written();
  back.hold_at(before);
  auto asked = agents[0].async<&refs::make_on>(1, agents[0].worker(2), 5);
  EXPECT_TRUE(
      comes_true([&] { return back.written() > before && agents[2].debug_info().forks == 1; }));
  RRef<int> given;
  {
    const Loss loss(way(links, 0));
    if (message()) back.release();
    given = asked.get();
    asked = {};  // it holds another copy of the reference
    EXPECT_TRUE(comes_true([&] { return given.confirmed(); }));
    EXPECT_TRUE(loss.is_coming());
    EXPECT_TRUE(comes_true([&] { return keeps_parent(given) == message(); }));
  }
  EXPECT_TRUE(comes_true(
      [&] { return !keeps_parent(given) && agents[0].debug_info().calls_waiting == 0; }));
  EXPECT_TRUE(comes_true([&] { return agents[2].debug_info().forks == 1; }))
      << "the giver's own reference has ended";
  EXPECT_EQ(given.to_here(), 5);
  given = {};
  expect_nothing_left(agents);
  for (auto& agent : agents) agent.leave();
}

INSTANTIATE_TEST_SUITE_P(Rpc, LostControl, testing::Values(Lost::Message, Lost::Answer),
                         [](const auto& lost) {
                           return lost.param == Lost::Message ? "Message" : "Answer";
                         });

// If the store does not answer, nothing says that the worker is lost.
TEST(LostStore, LiveWorkersKeepTheirReferences) {
  Links links;  // before they join: each then connects to the other
  const auto store = c10::make_intrusive<Unwilling>();
  rpc::Agent first = join(0, store), second = join(1, store);
  const auto held = second.remote<&refs::number>(0, 4);
  EXPECT_EQ(held.to_here(), 4);
  store->refuse();
  links.break_all();
  EXPECT_TRUE(store->is_asked(1));
  store->answer();
  EXPECT_TRUE(comes_true([&] {
    try {
      return held.to_here() == 4;
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
      return error.blame() != Blame::PeerLost;
    }
  }));
  EXPECT_EQ(first.debug_info().owner_rrefs, 1U);
  second.leave();
  first.leave();
}

// The message that ends a reference is retried, and each attempt looks up its receiver.
TEST(LostStore, RetriesBlockNoCalls) {
  const auto store = c10::make_intrusive<Unwilling>();
  rpc::Agent first = join(0, store), second = join(1, store), third = join(2, store);
  EXPECT_EQ(first.sync<&refs::number>(2, 1), 1);
  auto theirs = first.remote<&refs::number>(1, 4);
  EXPECT_EQ(theirs.to_here(), 4);
  store->hold();
  second.leave();
  std::thread drops([&] { theirs = {}; });  // this thread may be the one that asks the store
  EXPECT_TRUE(store->is_asked(1));
  const auto answered = first.async<&refs::number>(2, 2);
  EXPECT_TRUE(comes_true([&] { return answered.done(); }));
  EXPECT_TRUE(store->release());
  drops.join();
  third.leave();
  first.leave();
}

// The connection tells that a reply goes to host memory, so the first worker need not look up its
// caller, which joined later.
TEST(LostStore, IsNotAskedForATensorsReply) {
  const auto store = c10::make_intrusive<Unwilling>();
  rpc::Agent first = join(0, store), second = join(1, store);
  EXPECT_EQ(second.sync<&refs::number>(0, 4), 4);
  store->refuse();
  EXPECT_EQ(second.sync<&refs::add>(0, at::ones({3}), at::ones({3})).sum().item<float>(), 6);
  store->answer();
  second.leave();
  first.leave();
}

// All connections break though both workers live. The one that is marked as lost learns so, and
// does nothing more under its name.
TEST(LostStore, WorkerMarkedLostLeaves) {
  Links links;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  rpc::Agent first = join(0, store), second = join(1, store);
  EXPECT_EQ(first.sync<&refs::number>(1, 4) + second.sync<&refs::number>(0, 4), 8);
  links.keep_broken(true);
  std::optional<Error> left;
  EXPECT_TRUE(comes_true([&] {
    for (rpc::Agent* agent : {&first, &second}) {
      try {
        agent->sync<&refs::nothing>(agent == &first ? 1 : 0);
      } catch (const Error& error) {
        if (error.text().find("others have taken it for lost") != std::string::npos) left = error;
      }
    }
    return left.has_value();
  }));
  ASSERT_TRUE(left);
  EXPECT_EQ(left->blame(), Blame::PeerLost) << left->text();
  links.keep_broken(false);
  for (rpc::Agent* agent : {&first, &second}) agent->leave();
}

TEST(LostStore, LeavingWorkerMakesNoConnection) {
  Links links;
  const auto store = c10::make_intrusive<Unwilling>();
  const auto come = [&](const std::string& name, int rank) {
    return rpc::init(name,
                     {.rank = rank, .store = store, .timeout = 20s, .transports = {"inproc"}});
  };
  auto owner = come("owner", 1), user = come("user", 0);
  const auto value = user.remote<&refs::number>("owner", 4);
  EXPECT_EQ(value.to_here(), 4);
  // The owner confirms the reference over a connection of its own, which must be there to be
  // broken.
  ASSERT_TRUE(
      comes_true([&] { return !owner.shared_core()->connections().transport_to(0).empty(); }));
  store->hold();
  links.break_all();
  // Each worker asks the store whether the other lives.
  ASSERT_TRUE(store->is_asked(2));
  ASSERT_TRUE(
      comes_true([&] { return user.shared_core()->connections().transport_to(1).empty(); }));
  std::thread asks([&] {
    const Error error = harness::error_of([&] { value.to_here(); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
  });
  EXPECT_TRUE(store->is_asked(3)) << "the call asks for the worker's new address";
  std::thread leaves([&] { user.leave(); });
  EXPECT_TRUE(comes_true([&] { return user.shared_core()->closed(); }));
  EXPECT_TRUE(store->release());
  leaves.join();
  asks.join();
  EXPECT_EQ(user.shared_core()->connections().transport_to(1), "");
  owner.leave();
}

}  // namespace
}  // namespace weft
