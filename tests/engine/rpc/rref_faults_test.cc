// SPDX-License-Identifier: Apache-2.0
// References over a network that refuses, delays and drops messages.
#include <mutex>
#include <thread>

#include <gtest/gtest.h>

#include <weft/tests/engine/rpc/refs.h>
#include <weft/transport/inproc/faults.h>

namespace weft {
namespace {

// Packs bytes of another type than unpacking expects.
struct Unreadable {
  template <class Packer>
  void msgpack_pack(Packer& packer) const {
    packer.pack(std::string("no number"));
  }
  void msgpack_unpack(const msgpack::object& object) { object.as<int>(); }
};
struct UnreadableOwn {
  Unreadable first;
  RRef<int> number;
  WEFT_FIELDS(first, number)
};
UnreadableOwn unreadable_own() { return {{}, RRef<int>(1)}; }

std::atomic<int> late_made{0}, late_called{0};
int make_late(int value) {
  ++late_made;
  return value;
}
void call_late() { ++late_called; }

// Its destructor makes a call.
struct Outlasting {
  explicit Outlasting(rpc::WorkerInfo to) : agent(rpc::this_agent()), other(std::move(to)) {}
  Outlasting(const Outlasting&) = delete;
  Outlasting& operator=(const Outlasting&) = delete;
  ~Outlasting() {
    try {
      agent.sync<&refs::nothing>(other);
      ++could_call;
    } catch (const Error&) {
    }
    ++ended;
  }
  Future<int> later(int value, std::string gate) {
    return agent.async<&refs::number_behind>(other, value, gate);
  }
  static inline std::atomic<int> could_call{0}, ended{0};
  rpc::Agent agent;
  rpc::WorkerInfo other;
};

using harness::As;
using harness::comes_true;
using harness::error_of;
using harness::expect_counters;
using harness::run_one;
using harness::Setting;
using namespace std::chrono_literals;

// Shares references among three workers by every control message, and checks that none is left.
void share_and_drop(rpc::Agent& agent) {
  {
    const auto a = agent.remote<&refs::number>(1, 4);
    EXPECT_EQ(agent.sync<&refs::fetch_sum>(2, a, a), 8);
    EXPECT_EQ(agent.sync<&refs::make_on>(1, agent.worker(2), 5).to_here(), 5);
    EXPECT_EQ(agent.sync<&refs::sum_of>(2, agent.sync<&refs::own_three>(1)), 3);
    EXPECT_EQ(agent.sync<&refs::plus_local>(2, a.copy_to(2), 1), 5);
  }
  for (const int worker : {0, 1, 2}) expect_counters(agent, worker, {0, 0, 0});
}

class ControlFaults : public testing::TestWithParam<std::tuple<rpc::MessageKind, Setting>> {};

TEST_P(ControlFaults, RefusedMessagesAreSentAgain) {
  const auto& [kind, setting] = GetParam();
  run_one(setting, share_and_drop, {.faults = {.fail_first = {{kind, 3}}}});
}

TEST_P(ControlFaults, DelayedMessagesChangeNothing) {
  const auto& [kind, setting] = GetParam();
  run_one(setting, share_and_drop, {.faults = {.delay = {{kind, 50ms}}}});
}

INSTANTIATE_TEST_SUITE_P(Rpc, ControlFaults,
                         testing::Combine(testing::Values(rpc::MessageKind::Fork,
                                                          rpc::MessageKind::ChildAccept,
                                                          rpc::MessageKind::UserDelete),
                                          testing::ValuesIn(harness::settings_of_faults())),
                         [](const auto& one) {
                           const auto kind = std::get<0>(one.param);
                           return std::string(kind == rpc::MessageKind::Fork ? "Fork"
                                              : kind == rpc::MessageKind::ChildAccept
                                                  ? "ChildAccept"
                                                  : "UserDelete") +
                                  "_" + harness::name(std::get<1>(one.param));
                         });

// Faults of messages, which have the same effect over every transport.
class DroppedAndDelayed : public testing::TestWithParam<Setting> {};

TEST_P(DroppedAndDelayed, DroppedCreationIsACreationError) {
  run_one(GetParam(),
          [](rpc::Agent& agent) {
            for (const int to : {0, 1}) {
              const auto lost = agent.remote<&refs::number>(rpc::to(to).timeout(30ms), 1);
              const auto operation =
                  agent.remote_op("aten::add", rpc::to(to).timeout(30ms), at::ones({1}), 1);
              EXPECT_THROW(lost.to_here(), rpc::CreationError) << to;
              EXPECT_EQ(error_of([&] { lost.to_here(); }).blame(), Blame::Timeout);
              EXPECT_THROW(operation.to_here(), rpc::CreationError) << to;
              EXPECT_EQ(error_of([&] { operation.to_here(); }).blame(), Blame::Timeout);
            }
          },
          {.faults = {.drop = {rpc::MessageKind::Create}}});
}

TEST_P(DroppedAndDelayed, DelayedCreationFailsForGood) {
  run_one(GetParam(),
          [](rpc::Agent& agent) {
            {
              const auto late = agent.remote<refs::Account>(rpc::to(1).timeout(10ms), 1);
              EXPECT_EQ(error_of([&] { late.created().get(); }).blame(), Blame::Timeout);
              EXPECT_THROW(late.sync<&refs::Account::get>(), rpc::CreationError);
              while (agent.sync<&refs::accounts_living>(1) == 0)
                std::this_thread::yield();  // it arrives nevertheless
              EXPECT_THROW(late.sync<&refs::Account::get>(), rpc::CreationError);
            }
            expect_counters(agent, 1, {0, 0, 0});
            EXPECT_EQ(agent.sync<&refs::accounts_living>(1), 0);
          },
          {.faults = {.delay = {{rpc::MessageKind::Create, 300ms}}}});
}

// The time limit passes while the test holds the calls on their way; then it lets them arrive.
TEST(LateCreations, RunDespiteTheirTimeLimit) {
  static std::mutex mutex;
  static std::vector<transport::inproc::Faults> ways;
  ways.clear();
  transport::inproc::on_link([](const auto& there, const auto&) {
    std::lock_guard lock(mutex);
    ways.push_back(there);
  });
  late_made = late_called = 0;
  constexpr int kCalls = 5;
  harness::run_workers(
      {As::Threads, "inproc", 2},
      [](rpc::Agent& agent) {
        if (agent.self().rank != 0) return;
        agent.sync<&refs::nothing>(1);  // makes the connection
        const auto held = [] {
          std::lock_guard lock(mutex);
          return ways;
        }();
        for (const auto& way : held) way.hold_at(way.written());
        std::vector<RRef<int>> late;
        std::vector<Future<void>> calls;
        for (int i = 0; i < kCalls; ++i) {
          late.push_back(agent.remote<&make_late>(rpc::to(1).timeout(1ms), i));
          calls.push_back(agent.async<&call_late>(rpc::to(1).timeout(1ms)));
        }
        for (const auto& one : late)
          EXPECT_EQ(error_of([&] { one.created().get(); }).blame(), Blame::Timeout);
        for (const auto& one : calls)
          EXPECT_EQ(error_of([&] { one.get(); }).blame(), Blame::Timeout);
        EXPECT_EQ(late_made + late_called, 0);
        for (const auto& way : held) way.release();
        EXPECT_TRUE(comes_true([] { return late_made == kCalls && late_called == kCalls; }))
            << late_made << " " << late_called;
        for (const auto& one : late)
          EXPECT_THROW(one.to_here(), rpc::CreationError) << "a failed creation stays failed";
        late.clear();
        expect_counters(agent, 1, {0, 0, 0});
      },
      {.worker_threads = 2 * kCalls});
  transport::inproc::on_link({});
}

// The end of the reference would overtake the delayed calls.
TEST(LateCalls, FindTheValueOfADroppedReference) {
  run_one(
      [](rpc::Agent& agent) {
        Future<int> fetched, called;
        RRef<int> left;
        {
          const auto account = agent.remote<refs::Account>(1, 4);
          const auto number = agent.remote<&refs::number>(1, 5);
          account.created().get();
          number.created().get();
          called = account.async<&refs::Account::get>();
          fetched = number.fetch();
          left = account.remote<&refs::Account::get>();
        }
        EXPECT_EQ(called.get(), 4);
        EXPECT_EQ(fetched.get(), 5);
        EXPECT_EQ(left.to_here(), 4);
        left = {};
        expect_counters(agent, 1, {0, 0, 0});
      },
      {.faults = {.delay = {{rpc::MessageKind::Call, 50ms},
                            {rpc::MessageKind::Fetch, 50ms},
                            {rpc::MessageKind::Create, 50ms}}}});
}

// References to values of the callee, and of a third worker.
TEST(LateReplies, TheirReferencesEnd) {
  run_one(
      [](rpc::Agent& agent) {
        // The reply is on its way when the call is cancelled.
        const auto to = rpc::to(1).timeout(50ms);
        EXPECT_EQ(error_of([&] { agent.sync<&refs::own_three>(to); }).blame(), Blame::Timeout);
        EXPECT_EQ(error_of([&] { agent.sync<&refs::make_on>(to, agent.worker(2), 5); }).blame(),
                  Blame::Timeout);
        for (const int worker : {0, 1, 2}) expect_counters(agent, worker, {0, 0, 0});
      },
      {.faults = {.delay = {{rpc::MessageKind::Reply, 400ms}}}});
}

// More calls run out of time than a worker remembers, so it has forgotten the oldest when their
// references come. Only these bring any: each costs several messages.
TEST(LateReplies, ReferencesOfForgottenCallsEnd) {
  run_one(
      [](rpc::Agent& agent) {
        std::vector<Future<std::vector<RRef<int>>>> forgotten;
        for (int i = 0; i < 10; ++i)
          forgotten.push_back(agent.async<&refs::own_three>(rpc::to(1).timeout(200ms)));
        for (const auto& call : forgotten)
          EXPECT_EQ(error_of([&] { call.get(); }).blame(), Blame::Timeout);
        std::vector<Future<void>> remembered;
        for (int i = 0; i < 4200; ++i)
          remembered.push_back(agent.async<&refs::nothing>(rpc::to(1).timeout(1ms)));
        for (const auto& call : remembered)
          EXPECT_EQ(error_of([&] { call.get(); }).blame(), Blame::Timeout);
        expect_counters(agent, 1, {0, 0, 0});
      },
      {.faults = {.delay = {{rpc::MessageKind::Reply, 1500ms}}}});
}

// Here the value that cannot be read precedes the reference.
TEST(LateReplies, ReferencesInUnreadableOnesEnd) {
  run_one(
      [](rpc::Agent& agent) {
        EXPECT_EQ(error_of([&] { agent.sync<&unreadable_own>(rpc::to(1).timeout(50ms)); }).blame(),
                  Blame::Timeout);
        expect_counters(agent, 1, {0, 0, 0});
        EXPECT_NE(error_of([&] { agent.sync<&unreadable_own>(1); }).blame(), Blame::Timeout);
        expect_counters(agent, 1, {0, 0, 0});
      },
      {.faults = {.delay = {{rpc::MessageKind::Reply, 400ms}}}});
}

// The giver keeps its own reference until the owner knows the new one.
TEST(ForkFaults, LateForkStillFetchesItsValue) {
  harness::run_alone({harness::As::Threads, "inproc", 3}, [](rpc::Options options) {
    const int rank = *options.rank;
    if (rank == 0) options.faults.fail_first = {{rpc::MessageKind::Fork, 7}};
    auto agent = rpc::init("worker" + std::to_string(rank), options);
    if (rank == 0) {
      {
        const auto given = agent.sync<&refs::make_on>(1, agent.worker(2), 5);
        while (agent.debug_info().pending_users > 0) std::this_thread::yield();
        EXPECT_TRUE(given.confirmed());
        EXPECT_EQ(given.to_here(), 5);
      }
      for (const int worker : {1, 2}) expect_counters(agent, worker, {0, 0, 0});
    }
    agent.shutdown();
  });
}

// A worker has asked for the method's result before the method fails.
TEST(CreationFaults, MethodOfAWrongTypeFailsItsWaiter) {
  run_one(
      [](rpc::Agent& agent) {
        const auto number = agent.remote<&refs::number>(1, 4);
        EXPECT_EQ(number.to_here(), 4);
        const RRef<refs::Account> wrong(number.handle());
        const auto made = wrong.remote<&refs::Account::get>();
        const auto fetched = agent.async<&refs::fetch_sum>(rpc::to(2).timeout(20s), made, made);
        const auto error = error_of([&] { fetched.get(); });
        EXPECT_EQ(error.blame(), Blame::Remote) << error.text();
        EXPECT_NE(error.text().find("and its value is a int; use RRef<int>"), std::string::npos)
            << error.text();
      },
      {.faults = {.delay = {{rpc::MessageKind::Reply, 400ms}}}});
}

// The caller has given up and its reference has ended. The value's last reference is dropped on the
// event loop, when the reply arrives that the method waits for.
TEST(Destructors, MayBlockAfterALateLastMethod) {
  run_one([](rpc::Agent& agent) {
    auto outlasting = agent.remote<Outlasting>(1, agent.self());
    outlasting.created().get();
    const auto value =
        std::exchange(outlasting, {}).timeout(1s).async<&Outlasting::later>(7, "the last");
    EXPECT_EQ(error_of([&] { value.get(); }).blame(), Blame::Timeout);
    expect_counters(agent, 1, {0, 0, 0});
    EXPECT_EQ(Outlasting::ended, 0);
    refs::open_gate("the last");
    while (Outlasting::ended == 0) std::this_thread::yield();
    EXPECT_EQ(Outlasting::could_call, 1);
  });
}

TEST(CreationFaults, OvertakingReferenceMayEndEarly) {
  run_one(
      [](rpc::Agent& agent) {
        const auto late = agent.remote<&refs::number>(1, 4);
        const auto fetched = late.fetch();
        agent.sync<&refs::take>(2, late);  // the fork ends there before the creation arrives
        EXPECT_EQ(fetched.get(), 4) << "the value was given up though its creator holds it";
      },
      {.faults = {.delay = {{rpc::MessageKind::Create, 300ms}}}});
}

// The creation arrives after its creator has given the value up.
TEST(CreationFaults, FetchOfAnEndedValueFails) {
  run_one(
      [](rpc::Agent& agent) {
        Future<int> fetched;
        {
          const auto lost = agent.remote<&refs::number>(rpc::to(1).timeout(10ms), 1);
          fetched = lost.fetch();
        }
        EXPECT_THROW(fetched.get(), rpc::CreationError);
        expect_counters(agent, 1, {0, 0, 0});
      },
      {.faults = {.delay = {{rpc::MessageKind::Create, 300ms}, {rpc::MessageKind::Fetch, 400ms}}}});
}

// A worker that was given the reference fetches after the creator has given the value up.
TEST(CreationFaults, FetchOfAnAbandonedValueFails) {
  run_one(
      [](rpc::Agent& agent) {
        Future<int> fetched;
        {
          const auto lost = agent.remote<&refs::number>(rpc::to(1).timeout(200ms), 4);
          fetched = agent.async<&refs::fetch_behind>(2, lost, std::string("given up"));
          EXPECT_EQ(error_of([&] { lost.created().get(); }).blame(), Blame::Timeout);
        }
        std::this_thread::sleep_for(50ms);  // lets the owner learn of it
        agent.sync<&refs::open_gate>(2, std::string("given up"));
        const auto error = error_of([&] { fetched.get(); });
        EXPECT_NE(error.text().find("its creator gave it up"), std::string::npos) << error.text();
        expect_counters(agent, 1, {0, 0, 0});
      },
      {.faults = {.drop = {rpc::MessageKind::Create}}});
}

TEST_P(DroppedAndDelayed, FunctionEndsWithALostReference) {
  run_one(GetParam(),
          [](rpc::Agent& agent) {
            {
              const auto lost = agent.remote<&refs::number>(rpc::to(1).timeout(300ms), 4);
              EXPECT_EQ(error_of([&] {
                          agent.sync<&refs::fetch_sum>(rpc::to(1).timeout(100ms), lost, lost);
                        }).blame(),
                        Blame::Timeout);
            }  // the function there ends once the creation is known to have failed
            expect_counters(agent, 1, {0, 0, 0});
          },
          {.faults = {.drop = {rpc::MessageKind::Create}}});
}

// The function that waits for the copy fails, whichever worker was to send the copy.
TEST_P(DroppedAndDelayed, LostCopyFailsItsWaiters) {
  run_one(GetParam(),
          [](rpc::Agent& agent) {
            for (const auto& value : {RRef<int>(agent, 1), agent.sync<&refs::own>(1, 1)}) {
              const auto copy = value.copy_to(rpc::to(2).timeout(1s));
              const auto used = agent.async<&refs::plus_local>(rpc::to(2).timeout(0ms), copy, 1);
              EXPECT_NE(error_of([&] { used.get(); }).text().find("not created"),
                        std::string::npos);
              EXPECT_THROW(copy.to_here(), rpc::CreationError);
            }
            for (const int worker : {1, 2}) expect_counters(agent, worker, {0, 0, 0});
          },
          {.faults = {.drop = {rpc::MessageKind::Create}}});
}

// The copy is lost on its way from owner to owner.
TEST(CreationFaults, CopyLostByItsOwnerFailsItsWaiters) {
  harness::run_alone({harness::As::Threads, "inproc", 3}, [](rpc::Options options) {
    if (options.rank == 1) options.faults.drop = {rpc::MessageKind::Create};
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    if (options.rank == 0) {
      {
        const auto value = agent.sync<&refs::own>(1, 1);
        const auto copy = value.copy_to(rpc::to(2).timeout(1s));
        const auto used = agent.async<&refs::plus_local>(rpc::to(2).timeout(0ms), copy, 1);
        EXPECT_NE(error_of([&] { used.get(); }).text().find("not created"), std::string::npos);
        EXPECT_EQ(error_of([&] { copy.to_here(); }).blame(), Blame::Timeout);
        EXPECT_EQ(value.to_here(), 1);
      }
      for (const int worker : {1, 2}) expect_counters(agent, worker, {0, 0, 0});
    }
    agent.shutdown();
  });
}

// A function on another worker waits for the copy; it fails once its own reference is known.
TEST(CreationFaults, FailedCopyFailsItsHolders) {
  run_one([](rpc::Agent& agent) {
    {
      const auto broken = agent.remote<&refs::throws_behind>(1, "given on");
      const auto copy = broken.copy_to(2);
      const auto used = agent.async<&refs::fetch_sum>(1, copy, copy);
      agent.sync<&refs::open_gate>(1, "given on");
      EXPECT_NE(error_of([&] { used.get(); }).text().find("no luck behind"), std::string::npos);
      EXPECT_THROW(copy.to_here(), rpc::CreationError);
    }
    for (const int worker : {1, 2}) expect_counters(agent, worker, {0, 0, 0});
  });
}

// The maker of the copy gives up before the value exists.
TEST(CreationFaults, AbandonedCopyIsNotSent) {
  run_one([](rpc::Agent& agent) {
    const auto value = agent.remote<&refs::number_behind>(rpc::to(1).timeout(0ms), 4, "too late");
    {
      const auto copy = value.copy_to(rpc::to(2).timeout(20ms));
      EXPECT_EQ(error_of([&] { copy.created().get(); }).blame(), Blame::Timeout);
      EXPECT_THROW(copy.to_here(), rpc::CreationError);
    }
    expect_counters(agent, 2, {0, 0, 0});
    const auto served = agent.sync<&refs::served_and_busy>(2).first;
    agent.sync<&refs::open_gate>(1, "too late");
    EXPECT_EQ(value.to_here(), 4);
    while (agent.sync<&refs::served_and_busy>(1).second > 0) std::this_thread::yield();
    EXPECT_EQ(agent.sync<&refs::served_and_busy>(2).first, served + 1)
        << "only the previous question was served";
    EXPECT_EQ(value.copy_to(2).to_here(), 4);
  });
}

TEST(CreationFaults, RefusedCopyIsACreationError) {
  run_one(
      [](rpc::Agent& agent) {
        {
          const RRef<int> mine(agent, 1);
          const auto theirs = agent.sync<&refs::own>(1, 1);
          for (const auto& value : {mine, theirs}) {
            const auto copy = value.copy_to(2);
            EXPECT_THROW(copy.to_here(), rpc::CreationError);
            EXPECT_THROW(agent.sync<&refs::plus_local>(2, copy, 1), rpc::CreationError);
          }
          for (int again = 0; again < 2; ++again) {  // worker 1 sends these
            EXPECT_THROW(theirs.copy_to(2).to_here(), rpc::CreationError);
          }
          EXPECT_EQ(theirs.copy_to(2).to_here(), 1);
        }
        for (const int worker : {1, 2}) expect_counters(agent, worker, {0, 0, 0});
      },
      {.faults = {.fail_first = {{rpc::MessageKind::Create, 2}}}});
}

TEST(CreationFaults, LateAbandonedCopyIsDropped) {
  run_one(
      [](rpc::Agent& agent) {
        {
          const auto copy = agent.sync<&refs::own>(1, 1).copy_to(2);
          EXPECT_EQ(error_of([&] { copy.to_here(10ms); }).blame(), Blame::Timeout);
        }
        for (const int worker : {1, 2}) expect_counters(agent, worker, {0, 0, 0});
      },
      {.faults = {.delay = {{rpc::MessageKind::Create, 300ms}}}});
}

TEST(CreationFaults, MethodsOfALostCreationFail) {
  run_one(
      [](rpc::Agent& agent) {
        const auto lost = agent.remote<refs::Account>(rpc::to(1).timeout(100ms), 1);
        EXPECT_THROW(lost.sync<&refs::Account::get>(), rpc::CreationError);
        EXPECT_THROW(lost.sync<&refs::Account::get>(), rpc::CreationError);
      },
      {.faults = {.drop = {rpc::MessageKind::Create}}});
}

TEST_P(DroppedAndDelayed, PassedReferenceMayArriveFirst) {
  run_one(GetParam(),
          [](rpc::Agent& agent) {
            const auto late = agent.remote<&refs::number>(1, 4);
            EXPECT_EQ(agent.sync<&refs::fetch_sum>(2, late, late), 8);
            EXPECT_EQ(agent.sync<&refs::fetch_sum>(1, late, late), 8);
          },
          {.faults = {.delay = {{rpc::MessageKind::Create, 100ms}}}});
}

// The owner passes on a reference of its own.
TEST(CreationFaults, OwnerMayPassOnAnUncreatedValue) {
  run_one(
      [](rpc::Agent& agent) {
        const auto late = agent.remote<&refs::number>(1, 4);
        agent.sync<&refs::pass_on>(
            1, late, agent.worker(2));  // all these references end before the creation arrives
        EXPECT_EQ(agent.sync<&refs::fetch_sum>(2, late, late), 8);
      },
      {.faults = {.delay = {{rpc::MessageKind::Create, 500ms}}}});
}

TEST(CreationFaults, AbandonedPassedOnValueFails) {
  run_one(
      [](rpc::Agent& agent) {
        Future<int> fetched;
        {
          const auto lost = agent.remote<&refs::number>(rpc::to(1).timeout(200ms), 4);
          fetched = agent.async<&refs::fetch_elsewhere>(1, lost, agent.worker(2));
          EXPECT_EQ(error_of([&] { lost.created().get(); }).blame(), Blame::Timeout);
        }
        const auto error = error_of([&] { fetched.get(); });
        EXPECT_NE(error.text().find("was not created"), std::string::npos) << error.text();
        expect_counters(agent, 1, {0, 0, 0});
      },
      {.faults = {.drop = {rpc::MessageKind::Create}}});
}

// The fork that ends unconfirmed is not the creator's reference.
TEST(CreationFaults, UnconfirmedForkEndsNoValue) {
  harness::run_alone({harness::As::Threads, "inproc", 4}, [](rpc::Options options) {
    const int rank = *options.rank;
    if (rank == 0) options.faults.delay = {{rpc::MessageKind::Create, 5s}};
    if (rank == 2) options.faults.fail_first = {{rpc::MessageKind::Fork, 6}};
    auto agent = rpc::init("worker" + std::to_string(rank), options);
    if (rank == 0) {
      const auto late = agent.remote<&refs::number>(1, 4);
      const auto fetched = agent.async<&refs::fetch_sum>(3, late, late);
      EXPECT_EQ(error_of([&] { agent.sync<&refs::take>(2, late); }).blame(), Blame::PeerLost);
      EXPECT_EQ(fetched.get(), 8);
      EXPECT_EQ(late.to_here(), 4);
    }
    agent.shutdown();
  });
}

// The creator keeps its reference, and tells the owner of the failure.
TEST(CreationFaults, OthersHearOfAFailedCreation) {
  run_one(
      [](rpc::Agent& agent) {
        const auto lost = agent.remote<&refs::number>(rpc::to(1).timeout(200ms), 4);
        const auto fetched = agent.async<&refs::fetch_sum>(rpc::to(2).timeout(30s), lost, lost);
        EXPECT_NE(error_of([&] { fetched.get(); }).text().find("was not created"),
                  std::string::npos);
      },
      {.faults = {.drop = {rpc::MessageKind::Create}}});
}

// The value is released even if the connection works again only after seconds.
TEST(CreationFaults, RefusedEndIsSentSecondsLater) {
  run_one(
      [](rpc::Agent& agent) {
        EXPECT_EQ(agent.remote<&refs::number>(1, 4).to_here(), 4);
        expect_counters(agent, 1, {0, 0, 0});
      },
      {.faults = {.fail_first = {{rpc::MessageKind::UserDelete, 6}}}});
}

TEST_P(DroppedAndDelayed, DelayedCreationsFailByTheirLimit) {
  run_one(
      GetParam(),
      [](rpc::Agent& agent) {
        for (const int to : {1, 0}) {
          const auto operation =
              agent.remote_op("aten::add", rpc::to(to).timeout(10ms), at::ones({1}), 1);
          const auto function = agent.remote<&refs::number>(rpc::to(to).timeout(10ms), 1);
          EXPECT_EQ(error_of([&] { operation.created().get(); }).blame(), Blame::Timeout) << to;
          EXPECT_THROW(operation.to_here(), rpc::CreationError) << to;
          EXPECT_THROW(function.to_here(), rpc::CreationError) << to;
        }
        const auto there = agent.remote_op("aten::add", rpc::to(1).timeout(0ms), at::ones({1}), 1);
        EXPECT_EQ(error_of([&] { there.to_here(10ms); }).blame(), Blame::Timeout)
            << "the fetch is delayed as well";
        EXPECT_TRUE(at::equal(there.to_here(0ms), at::full({1}, 2.0)));
        agent.set_timeout(20ms);
        const auto mine = agent.remote<&refs::number>(rpc::to(0).timeout(0ms), 1);
        EXPECT_EQ(mine.to_here(), 1) << "an owner's own fetch has no default limit";
        agent.set_timeout(60s);
      },
      {.faults = {.delay = {{rpc::MessageKind::Create, 300ms}, {rpc::MessageKind::Fetch, 300ms}}}});
}

TEST_P(DroppedAndDelayed, FailedCreationCannotBeShared) {
  run_one(GetParam(),
          [](rpc::Agent& agent) {
            const auto lost = agent.remote<&refs::number>(rpc::to(1).timeout(10ms), 1);
            EXPECT_THROW(lost.to_here(), rpc::CreationError);
            EXPECT_THROW(agent.sync<&refs::fetch_sum>(2, lost, lost), rpc::CreationError);
            EXPECT_THROW(agent.remote<&refs::fetch_sum>(2, lost, lost), rpc::CreationError);
            const auto good = agent.remote<&refs::number>(rpc::to(1).timeout(0ms), 1);
            EXPECT_EQ(error_of([&] { good.to_here(1ms); }).blame(), Blame::Timeout);
            EXPECT_EQ(good.to_here(100s), 1);
          },
          {.faults = {.delay = {{rpc::MessageKind::Create, 300ms}}}});
}

TEST_P(DroppedAndDelayed, TimedOutFetchCanBeRepeated) {
  run_one(GetParam(),
          [](rpc::Agent& agent) {
            const auto there = agent.remote<&refs::number>(1, 4);
            there.created().get();
            EXPECT_EQ(error_of([&] { there.to_here(10ms); }).blame(), Blame::Timeout);
            EXPECT_EQ(there.to_here(0ms), 4);
          },
          {.faults = {.delay = {{rpc::MessageKind::Fetch, 300ms}}}});
}

TEST(CreationFaults, EarlyFetchTimesOutAndCanRepeat) {
  run_one([](rpc::Agent& agent) {
    for (const int to : {0, 1}) {
      const std::string gate = "fetch " + std::to_string(to);
      const auto late = agent.remote<&refs::number_behind>(to, 4, gate);
      EXPECT_EQ(error_of([&] { late.to_here(10ms); }).blame(), Blame::Timeout);
      agent.sync<&refs::open_gate>(to, gate);
      EXPECT_EQ(late.to_here(0ms), 4);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, DroppedAndDelayed, testing::ValuesIn(harness::settings_of_faults()),
                         harness::name_of);

}  // namespace
}  // namespace weft
