// References: groups RR and RF of the behaviours.
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <thread>

#include <torch/torch.h>

#include <weft/tests/engine/rpc/workers.h>

namespace refs {

using namespace weft;

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
at::Tensor add_held(RRef<at::Tensor> a, RRef<at::Tensor> b) { return a.to_here() + b.to_here(); }
at::Tensor fetch(RRef<at::Tensor> a) { return a.to_here(); }
int fetch_sum(RRef<int> a, RRef<int> b) { return a.to_here() + b.to_here(); }
int number(int value) { return value; }
int throws(std::string text) { throw std::runtime_error(text); }
void nothing() {}
std::atomic<bool> finished{false};
void finish() { finished = true; }
RRef<int> own(int value) { return RRef<int>(value); }
std::vector<RRef<int>> own_three() { return {RRef<int>(0), RRef<int>(1), RRef<int>(2)}; }
RRef<int> make_on(rpc::WorkerInfo third, int value) { return rpc::this_agent().remote<&number>(third, value); }
std::vector<RRef<int>> make_two_on(rpc::WorkerInfo third) {
  return {rpc::this_agent().remote<&number>(third, 1), rpc::this_agent().remote<&number>(third, 2)};
}
int fetched_from_third(rpc::WorkerInfo third) { return rpc::this_agent().remote<&number>(third, 7).to_here(); }
int sum_of(std::vector<RRef<int>> all) {
  int sum = 0;
  for (const auto& one : all) sum += one.to_here();
  return sum;
}
void increase(int& value, int by) { value += by; }
int slow_number(int value, int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  return value;
}
rpc::DebugInfo info() { return rpc::this_agent().debug_info(); }
std::vector<std::uint64_t> counters() {
  const auto now = rpc::this_agent().debug_info();
  return {now.owner_rrefs, now.forks, now.pending_users};
}

// Counts how many live.
std::atomic<int> living{0};
struct Account {
  explicit Account(int start) : value(start) { ++living; }
  Account(const Account&) = delete;
  Account& operator=(const Account&) = delete;
  ~Account() { --living; }
  int add(int more) { return value += more; }
  int get() const { return value; }
  void fail() { throw std::runtime_error("overdrawn"); }
  Future<int> add_later(int more) {
    return rpc::this_agent().async<&number>(rpc::this_call().caller, more).then([this](int got) { return value += got; });
  }
  static int twice(int a) { return 2 * a; }
  static int peek(const Account& account) { return account.value; }
  int value;
};
int account_value(Account& account, int plus) { return account.value + plus; }
struct Broken {
  explicit Broken(std::string why) { throw std::runtime_error(why); }
};

struct Net : torch::nn::Module {
  explicit Net(int width) : layer(register_module("layer", torch::nn::Linear(width, 2))) {}
  at::Tensor forward(at::Tensor x) { return layer(x); }
  torch::nn::Linear layer;
};

struct Node {
  int value = 0;
  RRef<Node> next;
  WEFT_FIELDS(value, next)
};
Node node(int value, RRef<Node> next) { return {value, next}; }
int walk(RRef<Node> at) {
  int sum = 0;
  for (; at;) {
    const Node here = at.to_here();
    sum += here.value;
    at = here.next;
  }
  return sum;
}

}  // namespace refs

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::run_workers;
using harness::Setting;
using namespace std::chrono_literals;

class Refs : public testing::TestWithParam<Setting> {};

rpc::WorkerInfo after(rpc::Agent& agent, int steps) {
  const int workers = static_cast<int>(agent.workers().size());
  return agent.worker((agent.self().rank + steps) % workers);
}

TEST_P(Refs, RR001_002_ResultsStayAndAreFetchedFromPeersAndOneself) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto one = at::ones({2, 2});
    const auto remote = agent.remote<&refs::add>(after(agent, 1), one, one);
    EXPECT_EQ(remote.owner(), after(agent, 1));
    EXPECT_FALSE(remote.is_owner());
    EXPECT_TRUE(at::equal(remote.to_here(), one * 2));
    remote.created().get();
    EXPECT_TRUE(remote.confirmed());
    const auto mine = agent.remote<&refs::add>(agent.self(), one, one);
    EXPECT_TRUE(mine.is_owner());
    EXPECT_TRUE(mine.confirmed());
    EXPECT_TRUE(at::equal(mine.local_value(), one * 2));
    EXPECT_TRUE(at::equal(mine.to_here(), one * 2));
    agent.remote<&refs::nothing>(after(agent, 1)).to_here();
  });
}

TEST_P(Refs, RR005_006_PassToTheirOwnerAndToOthers) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto one = at::ones({2});
    const auto a = agent.remote<&refs::add>(after(agent, 1), one, one);
    const auto b = agent.remote<&refs::add>(after(agent, 1), one, one * 2);
    EXPECT_TRUE(at::equal(agent.remote<&refs::add_held>(after(agent, 1), a, b).to_here(), one * 5));
    EXPECT_TRUE(at::equal(agent.remote<&refs::add_held>(after(agent, 2), a, b).to_here(), one * 5));
    EXPECT_TRUE(at::equal(agent.sync<&refs::add_held>(after(agent, 2), a, b), one * 5));
  });
}

TEST_P(Refs, RR008_017_LocalValuesPassInAllModes) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const RRef<int> a(agent, 40);
    const RRef b(agent, 50);
    for (const auto& to : {after(agent, 1), agent.self()}) {
      EXPECT_EQ(agent.sync<&refs::fetch_sum>(to, a, b), 90);
      EXPECT_EQ(agent.async<&refs::fetch_sum>(to, a, b).get(), 90);
      EXPECT_EQ(agent.remote<&refs::fetch_sum>(to, a, b).to_here(), 90);
    }
  });
}

TEST_P(Refs, RR009_012_ComeBackFromWorkersThatDoNotOwnThem) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&refs::fetched_from_third>(after(agent, 1), after(agent, 2)), 7);
    const auto third = agent.sync<&refs::make_on>(after(agent, 1), after(agent, 2), 5);
    EXPECT_EQ(third.owner(), after(agent, 2));
    EXPECT_EQ(third.to_here(), 5);
    const auto outer = agent.remote<&refs::make_two_on>(after(agent, 1), after(agent, 2));
    const auto inner = outer.to_here();
    ASSERT_EQ(inner.size(), 2U);
    EXPECT_EQ(inner[0].to_here() + inner[1].to_here(), 3);
  });
}

TEST_P(Refs, RR011_TwentyNestedOnesAtOnce) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::vector<RRef<std::vector<RRef<int>>>> outer;
    for (int i = 0; i < 20; ++i) outer.push_back(agent.remote<&refs::make_two_on>(after(agent, 1), after(agent, 2)));
    for (const auto& one : outer) EXPECT_EQ(agent.sync<&refs::sum_of>(after(agent, 1), one.to_here()), 3);
  });
}

TEST_P(Refs, RR016_ReturnedLocalOnesAreChangedThroughTheirOwner) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto three = agent.sync<&refs::own_three>(after(agent, 1));
    int expected = 11;
    for (const auto& one : three) {
      one.sync<&refs::increase>(11);
      EXPECT_EQ(one.to_here(), expected++);
    }
  });
}

TEST_P(Refs, RR018_020_MethodsRunWhereTheValueLives) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto& to : {after(agent, 1), agent.self()}) {
      const auto account = agent.remote<refs::Account>(to, 10);
      EXPECT_EQ(account.sync<&refs::Account::add>(2), 12);
      EXPECT_EQ(account.async<&refs::Account::add>(5).get(), 17);
      EXPECT_EQ(account.remote<&refs::Account::add>(7).to_here(), 24);
      EXPECT_EQ(account.sync<&refs::Account::get>(), 24);
      EXPECT_EQ(account.timeout(5s).sync<&refs::Account::add_later>(1), 25);
      EXPECT_EQ(account.sync<&refs::Account::twice>(4), 8);
      EXPECT_EQ(account.sync<&refs::Account::peek>(), 25);
      EXPECT_EQ(account.sync<&refs::account_value>(100), 125);
      EXPECT_EQ(error_of([&] { account.sync<&refs::Account::fail>(); }).blame(), Blame::Remote);
    }
  });
}

TEST_P(Refs, ModulesAreMadeInPlace) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto net = agent.remote<refs::Net>(after(agent, 1), 3);
    EXPECT_EQ(net.sync<&refs::Net::forward>(at::ones({4, 3})).sizes(), (at::IntArrayRef{4, 2}));
  });
}

TEST_P(Refs, CanBePassedAndCalledOnBeforeTheirValueExists) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto late = agent.remote<&refs::slow_number>(after(agent, 1), 20, 100);
    const auto sum = agent.remote<&refs::fetch_sum>(after(agent, 2), late, late);
    const auto more = agent.remote<&refs::fetch_sum>(after(agent, 1), sum, late);
    late.sync<&refs::increase>(1);
    EXPECT_EQ(late.to_here(), 21);
    EXPECT_GE(more.to_here(), 60);
    EXPECT_LE(more.to_here(), 63);
  });
}

TEST_P(Refs, StructsMayReferToTheirOwnKind) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    RRef<refs::Node> list;
    for (int i = 1; i <= 5; ++i) list = agent.remote<&refs::node>(after(agent, i), i, list);
    EXPECT_EQ(agent.sync<&refs::walk>(after(agent, 1), list), 15);
    EXPECT_EQ(agent.sync<&refs::walk>(after(agent, 1), RRef<refs::Node>()), 0);
  });
}

TEST_P(Refs, RR033_ACreationThatFailsIsACreationErrorAtEveryUse) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto& to : {after(agent, 1), agent.self()}) {
      const auto failed = agent.remote<&refs::throws>(to, "no luck");
      EXPECT_THROW(failed.created().get(), Error);
      for (int again = 0; again < 2; ++again) {
        const auto error = error_of([&] { failed.to_here(); });
        EXPECT_NE(error.text().find("no luck"), std::string::npos) << error.what();
        EXPECT_THROW(failed.to_here(), rpc::CreationError);
        EXPECT_THROW(failed.sync<&refs::increase>(1), rpc::CreationError);
        EXPECT_THROW(agent.sync<&refs::fetch_sum>(after(agent, 1), failed, failed), Error);
      }
      const auto broken = agent.remote<refs::Broken>(to, "in two");
      EXPECT_THROW(broken.sync<&refs::nothing>(), rpc::CreationError);
    }
  });
}

TEST_P(Refs, RR015_ALocalValueElsewhereIsTheCallersError) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto there = agent.remote<&refs::number>(after(agent, 1), 1);
    const auto error = error_of([&] { there.local_value(); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find(after(agent, 1).name), std::string::npos) << error.what();
    EXPECT_EQ(error_of([] { RRef<int>(3); }).blame(), Blame::Caller) << "outside of a call";
    EXPECT_EQ(error_of([] { RRef<int>().to_here(); }).blame(), Blame::Caller);
    EXPECT_THROW(encode(there), Error);
  });
}

// The counters of every worker come to zero, once what was held has gone.
TEST_P(Refs, ValuesGoWithTheirLastReference) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    {
      const auto account = agent.remote<refs::Account>(after(agent, 1), 1);
      const auto copy = account;
      EXPECT_EQ(agent.sync<&refs::fetch_sum>(after(agent, 2), agent.remote<&refs::number>(after(agent, 1), 1),
                                             RRef<int>(agent, 2)),
                3);
      EXPECT_EQ(copy.sync<&refs::Account::get>(), 1);
    }
    for (const auto& worker : agent.workers()) {
      const auto deadline = Deadline::in(20s);
      std::vector<std::uint64_t> now;
      do {
        now = agent.sync<&refs::counters>(worker);
      } while (now != std::vector<std::uint64_t>{0, 0, 0} && !deadline.passed());
      // Others may still be at it; each ends at zero by itself, which the last check after shutdown would not show.
      EXPECT_LE(now[2], 100U);
    }
  });
}

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const char* transport : {"inproc", "shm", "tcp"}) all.push_back({As::Threads, transport, 3});
  all.push_back({As::Threads, "shm", 2});
  all.push_back({As::Processes, "shm", 3});
  all.push_back({As::Processes, "tcp", 4});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Rpc, Refs, testing::ValuesIn(settings()),
                         [](const auto& setting) { return harness::name(setting.param); });

// One worker acts, the others serve: so counts are exact.
void run_one(const std::function<void(rpc::Agent&)>& body, const rpc::Options& options = {}, int workers = 3) {
  run_workers(
      {As::Threads, "inproc", workers}, [&](rpc::Agent& agent) { if (agent.self().rank == 0) body(agent); }, options);
}

void expect_counters(rpc::Agent& agent, int worker, std::vector<std::uint64_t> expected) {
  const auto deadline = Deadline::in(20s);
  std::vector<std::uint64_t> now;
  do {
    now = agent.sync<&refs::counters>(worker);
  } while (now != expected && !deadline.passed());
  EXPECT_EQ(now, expected) << "worker" << worker;
}

TEST(RefCounters, RR014_AValueThatWasNeverSharedCountsNowhere) {
  run_one([](rpc::Agent& agent) {
    const RRef<int> mine(agent, 1);
    expect_counters(agent, 0, {0, 0, 0});
  });
}

TEST(RefCounters, CountOwnersWorkersAndEndAtZero) {
  run_one([](rpc::Agent& agent) {
    {
      const auto account = agent.remote<refs::Account>(1, 1);
      account.created().get();
      expect_counters(agent, 1, {1, 1, 0});
      const auto copy = account;
      expect_counters(agent, 1, {1, 1, 0});
      const auto held = agent.remote<&refs::own>(1, 1).to_here();
      expect_counters(agent, 1, {2, 2, 0});
    }
    expect_counters(agent, 1, {0, 0, 0});
    expect_counters(agent, 0, {0, 0, 0});
    EXPECT_EQ(refs::living, 0);
  });
}

class ControlFaults : public testing::TestWithParam<rpc::MessageKind> {};

TEST_P(ControlFaults, RefusedControlMessagesAreSentAgain) {
  run_one(
      [](rpc::Agent& agent) {
        {
          const auto a = agent.remote<&refs::number>(1, 4);
          EXPECT_EQ(agent.sync<&refs::fetch_sum>(2, a, a), 8);
          EXPECT_EQ(agent.sync<&refs::make_on>(1, agent.worker(2), 5).to_here(), 5);
          EXPECT_EQ(agent.sync<&refs::sum_of>(2, agent.sync<&refs::own_three>(1)), 3);
        }
        for (const int worker : {0, 1, 2}) expect_counters(agent, worker, {0, 0, 0});
      },
      {.faults = {.fail_first = {{GetParam(), 3}}}});
}

TEST_P(ControlFaults, DelayedControlMessagesChangeNothing) {
  run_one(
      [](rpc::Agent& agent) {
        {
          const auto a = agent.remote<&refs::number>(1, 4);
          EXPECT_EQ(agent.sync<&refs::fetch_sum>(2, a, a), 8);
          EXPECT_EQ(agent.sync<&refs::make_on>(1, agent.worker(2), 5).to_here(), 5);
          EXPECT_EQ(agent.sync<&refs::sum_of>(2, agent.sync<&refs::own_three>(1)), 3);
        }
        for (const int worker : {0, 1, 2}) expect_counters(agent, worker, {0, 0, 0});
      },
      {.faults = {.delay = {{GetParam(), 50ms}}}});
}

INSTANTIATE_TEST_SUITE_P(Rpc, ControlFaults,
                         testing::Values(rpc::MessageKind::Fork, rpc::MessageKind::ChildAccept, rpc::MessageKind::UserDelete),
                         [](const auto& kind) {
                           return kind.param == rpc::MessageKind::Fork          ? "Fork"
                                  : kind.param == rpc::MessageKind::ChildAccept ? "ChildAccept"
                                                                                : "UserDelete";
                         });

TEST(CreationFaults, RF003_ADroppedCreationIsACreationError) {
  run_one(
      [](rpc::Agent& agent) {
        for (const int to : {0, 1}) {
          const auto lost = agent.remote<&refs::number>(rpc::to(to).timeout(30ms), 1);
          EXPECT_THROW(lost.to_here(), rpc::CreationError) << to;
          EXPECT_EQ(error_of([&] { lost.to_here(); }).blame(), Blame::Timeout);
        }
      },
      {.faults = {.drop = {rpc::MessageKind::Create}}});
}

TEST(CreationFaults, RF004_ADelayedCreationFailsByItsLimitAndForGood) {
  run_one(
      [](rpc::Agent& agent) {
        {
          const auto late = agent.remote<refs::Account>(rpc::to(1).timeout(10ms), 1);
          EXPECT_EQ(error_of([&] { late.created().get(); }).blame(), Blame::Timeout);
          EXPECT_THROW(late.sync<&refs::Account::get>(), rpc::CreationError);
          std::this_thread::sleep_for(300ms);  // it comes meanwhile
          EXPECT_THROW(late.sync<&refs::Account::get>(), rpc::CreationError);
        }
        expect_counters(agent, 1, {0, 0, 0});
        EXPECT_EQ(refs::living, 0);
      },
      {.faults = {.delay = {{rpc::MessageKind::Create, 150ms}}}});
}

TEST(CreationFaults, APassedReferenceMayOvertakeItsCreation) {
  run_one(
      [](rpc::Agent& agent) {
        const auto late = agent.remote<&refs::number>(1, 4);
        EXPECT_EQ(agent.sync<&refs::fetch_sum>(2, late, late), 8);
        EXPECT_EQ(agent.sync<&refs::fetch_sum>(1, late, late), 8);
      },
      {.faults = {.delay = {{rpc::MessageKind::Create, 100ms}}}});
}

TEST(CreationFaults, RF009_AFetchThatTimesOutCanBeDoneAgain) {
  run_one([](rpc::Agent& agent) {
    const auto late = agent.remote<&refs::slow_number>(1, 4, 200);
    const auto error = error_of([&] { late.to_here(10ms); });
    EXPECT_EQ(error.blame(), Blame::Timeout);
    EXPECT_EQ(late.to_here(0ms), 4);
    const auto mine = agent.remote<&refs::slow_number>(0, 4, 200);
    EXPECT_EQ(error_of([&] { mine.to_here(10ms); }).blame(), Blame::Timeout);
    EXPECT_EQ(mine.to_here(), 4);
  });
}

TEST(RefLife, RS009_AfterShutdownAReferenceIsTheCallersError) {
  std::optional<RRef<int>> kept;
  run_one([&](rpc::Agent& agent) {
    kept = agent.remote<&refs::number>(1, 4);
    kept->created().get();
  });
  EXPECT_EQ(error_of([&] { kept->to_here(); }).blame(), Blame::Caller);
  EXPECT_NE(error_of([&] { kept->to_here(); }).text().find("after deletion"), std::string::npos);
}

class KilledHolder : public testing::TestWithParam<std::string> {};

TEST_P(KilledHolder, ReleasesWhatItHeldAndItsUsersSeePeerLost) {
  const std::string transport = GetParam();
  harness::Processes workers(3, [&](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank), {.rank = rank, .world_size = 3, .transports = {transport}});
    if (rank == 1) {
      const auto account = agent.remote<refs::Account>(0, 1);
      account.sync<&refs::Account::get>();
      harness::Processes::say("holds");
      agent.sync<&refs::slow_number>(1, 0, 600'000);
    }
    if (rank == 2) {
      const auto theirs = agent.remote<&refs::number>(1, 5);
      EXPECT_EQ(theirs.to_here(), 5);
      harness::Processes::say("holds");
      while (agent.sync<&refs::counters>(0)[0] != 0) {
      }
      EXPECT_EQ(error_of([&] { theirs.to_here(5s); }).blame(), Blame::PeerLost);
      agent.sync<&refs::finish>(0);
      return;
    }
    while (refs::living == 0) std::this_thread::yield();
    while (refs::living != 0) std::this_thread::yield();
    harness::Processes::say("released");
    while (!refs::finished) std::this_thread::yield();
  });
  workers.wait_for(1, "holds");
  workers.wait_for(2, "holds");
  workers.signal(1, SIGKILL);
  workers.wait_for(0, "released");
  workers.expect_success({1});
}

INSTANTIATE_TEST_SUITE_P(Rpc, KilledHolder, testing::Values("shm", "tcp"), [](const auto& transport) { return transport.param; });

}  // namespace
}  // namespace weft
