// SPDX-License-Identifier: Apache-2.0
// References. Their behaviour over a faulty network is in rref_faults_test.cc.
#include <sstream>
#include <thread>
#include <unordered_map>

#include <gtest/gtest.h>

#include <weft/engine/call/core.h>
#include <weft/tests/engine/rpc/refs.h>

namespace weft {
namespace {

using harness::after;
using harness::error_of;
using harness::expect_counters;
using harness::run_one;
using harness::run_workers;
using harness::Setting;
using namespace std::chrono_literals;

class Refs : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {  // one process may run several tests
    std::lock_guard lock(refs::gates);
    refs::open_gates.clear();
  }
};

TEST_P(Refs, ResultsStayAndAreFetched) {
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
    const auto sparse = at::eye(2).to_sparse();
    EXPECT_TRUE(
        at::equal(agent.remote<&refs::add>(after(agent, 1), sparse, sparse).to_here().to_dense(),
                  at::eye(2) * 2));
    const auto my_sparse = agent.remote<&refs::add>(agent.self(), sparse, sparse);
    EXPECT_TRUE(at::equal(my_sparse.local_value().to_dense(), at::eye(2) * 2));
    agent.remote<&refs::nothing>(after(agent, 1)).to_here();
  });
}

TEST_P(Refs, PassToTheirOwnerAndToOthers) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto one = at::ones({2});
    const auto a = agent.remote<&refs::add>(after(agent, 1), one, one);
    const auto b = agent.remote<&refs::add>(after(agent, 1), one, one * 2);
    EXPECT_TRUE(at::equal(agent.remote<&refs::add_held>(after(agent, 1), a, b).to_here(), one * 5));
    EXPECT_TRUE(at::equal(agent.remote<&refs::add_held>(after(agent, 2), a, b).to_here(), one * 5));
    EXPECT_TRUE(at::equal(agent.sync<&refs::add_held>(after(agent, 2), a, b), one * 5));
  });
}

TEST_P(Refs, ManyAreFetchedLaterInOrder) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto& to : {after(agent, 1), agent.self()}) {
      std::vector<RRef<at::Tensor>> dense;
      std::vector<RRef<at::Tensor>> sparse;
      for (int size = 1; size <= 10; ++size) {
        dense.push_back(
            agent.remote<&refs::add>(to, at::ones({size, size}), at::ones({size, size})));
        sparse.push_back(
            agent.remote<&refs::add>(to, at::eye(size).to_sparse(), at::eye(size).to_sparse()));
      }
      for (int size = 1; size <= 10; ++size) {
        const auto index = static_cast<std::size_t>(size - 1);
        EXPECT_TRUE(at::equal(dense[index].to_here(), at::full({size, size}, 2.0)));
        EXPECT_TRUE(at::equal(sparse[index].to_here().to_dense(), at::eye(size) * 2));
      }
    }
    EXPECT_TRUE(at::equal(agent.remote_op("aten::mul", after(agent, 1), at::ones({2}), 3).to_here(),
                          at::full({2}, 3.0)));
  });
}

TEST_P(Refs, AreArgumentsInAllModes) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto one = at::eye(2).to_sparse();
    const auto a = agent.remote<&refs::add>(after(agent, 1), one, one);
    const auto b = agent.remote<&refs::add>(after(agent, 1), one, one);
    for (int steps = 0; steps < 3; ++steps) {
      EXPECT_TRUE(at::equal(agent.sync<&refs::add_held>(after(agent, steps), a, b).to_dense(),
                            at::eye(2) * 4));
      EXPECT_TRUE(
          at::equal(agent.async<&refs::add_held>(after(agent, steps), a, b).get().to_dense(),
                    at::eye(2) * 4));
      EXPECT_TRUE(
          at::equal(agent.remote<&refs::add_held>(after(agent, steps), a, b).to_here().to_dense(),
                    at::eye(2) * 4));
    }
  });
}

TEST_P(Refs, AreArgumentAndResultAtOnce) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto there = agent.remote<&refs::number>(after(agent, 1), 3);
    const auto back = agent.sync<&refs::give_back>(after(agent, 2), there);
    EXPECT_EQ(back.owner(), after(agent, 1));
    EXPECT_EQ(back.to_here(), 3);
    const RRef<RRef<int>> outer = agent.remote<&refs::give_back>(after(agent, 2), there);
    EXPECT_EQ(outer.to_here().to_here(), 3);
  });
}

TEST_P(Refs, FunctionsActAsTensorMethods) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto& to : {after(agent, 1), agent.self()}) {
      const auto tensor = agent.remote<&refs::add>(to, at::ones({2, 3}), at::ones({2, 3}));
      const auto calls = tensor.timeout(20s);  // used for several calls
      EXPECT_EQ(calls.sync<&refs::size_of>(1), 3);
      EXPECT_TRUE(
          at::equal(calls.async<&refs::plus>(at::ones({2, 3})).get(), at::full({2, 3}, 3.0)));
      EXPECT_EQ(calls.remote<&refs::viewed>(std::vector<std::int64_t>{3, 2}).to_here().sizes(),
                (at::IntArrayRef{3, 2}));
      EXPECT_EQ(calls.sync<&refs::size_of>(0), 2);
    }
  });
}

TEST_P(Refs, CreatedWaitsOrThrowsTheError) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto failed = agent.remote<&refs::throws>(after(agent, 1), "no luck");
    EXPECT_NE(error_of([&] { failed.created().get(); }).text().find("no luck"), std::string::npos);
    const auto late =
        agent.remote<&refs::number_behind>(after(agent, 1), 1, agent.self().name + "/created");
    const auto created = late.created();
    EXPECT_EQ(error_of([&] { created.wait(5ms); }).blame(), Blame::Timeout);
    EXPECT_FALSE(created.done());
    agent.sync<&refs::open_gate>(after(agent, 1), agent.self().name + "/created");
    created.get();
    EXPECT_EQ(late.to_here(), 1);
  });
}

TEST_P(Refs, OwnersFetchKeepsItsTimeLimit) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const std::string gate = agent.self().name + "/own";
    const auto mine =
        agent.remote<&refs::number_behind>(rpc::to(agent.self()).timeout(0ms), 1, gate);
    EXPECT_EQ(error_of([&] { mine.fetch(5ms).get(); }).blame(), Blame::Timeout);
    EXPECT_EQ(error_of([&] { mine.to_here(5ms); }).blame(), Blame::Timeout);
    const auto waiting = mine.fetch(20s);
    refs::open_gate(gate);
    EXPECT_EQ(waiting.get(), 1);
    EXPECT_EQ(mine.fetch(5ms).get(), 1);
    EXPECT_EQ(mine.to_here(), 1);
  });
}

TEST_P(Refs, EmptyReferenceIsNotNullopt) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto there_and_back = [&](const std::optional<RRef<int>>& given) {
      return agent.sync<&refs::give_back_if>(after(agent, 1), given);
    };
    EXPECT_FALSE(there_and_back(std::nullopt));
    const auto empty = there_and_back(RRef<int>());
    ASSERT_TRUE(empty);
    EXPECT_FALSE(*empty);
    const auto full = there_and_back(RRef<int>(agent, 4));
    ASSERT_TRUE(full);
    EXPECT_EQ(full->to_here(), 4);
  });
}

TEST_P(Refs, TimedOutCallsLeaveTheValue) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = after(agent, 1);
    const std::string gate_of_value = agent.self().name + "/value";
    const auto late = agent.remote<&refs::number_behind>(to, 1, gate_of_value);
    EXPECT_EQ(error_of([&] { late.timeout(10ms).sync<&refs::increase>(1); }).blame(),
              Blame::Timeout);
    EXPECT_EQ(error_of([&] { late.timeout(10ms).async<&refs::increase>(1).get(); }).blame(),
              Blame::Timeout);
    const auto more = late.timeout(10ms).remote<&refs::plus_number>(1);
    EXPECT_THROW(more.to_here(), rpc::CreationError);
    EXPECT_EQ(error_of([&] { late.to_here(10ms); }).blame(), Blame::Timeout);
    // A method that runs for long.
    const auto ready = agent.remote<&refs::number>(to, 1);
    const std::string gate = agent.self().name + "/method";
    EXPECT_EQ(error_of([&] { ready.timeout(10ms).sync<&refs::wait_behind>(gate); }).blame(),
              Blame::Timeout);
    EXPECT_EQ(error_of([&] { ready.timeout(10ms).async<&refs::wait_behind>(gate).get(); }).blame(),
              Blame::Timeout);
    EXPECT_THROW(ready.timeout(10ms).remote<&refs::wait_behind>(gate).to_here(),
                 rpc::CreationError);
    agent.sync<&refs::open_gate>(to, gate);
    agent.sync<&refs::open_gate>(to, gate_of_value);
    EXPECT_EQ(ready.sync<&refs::wait_behind>(gate), 1);
    EXPECT_GE(late.to_here(), 1);
  });
}

TEST_P(Refs, OwnersCompareAndHash) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto a = agent.remote<&refs::number>(after(agent, 1), 1);
    const auto b = agent.remote<&refs::number>(after(agent, 1), 2);
    const RRef<int> mine(agent, 3);
    EXPECT_EQ(a.owner(), b.owner());
    EXPECT_NE(a.owner(), mine.owner());
    std::unordered_map<rpc::WorkerInfo, int> counts;
    for (const auto& one : {a, b, mine}) ++counts[one.owner()];
    EXPECT_EQ(counts.at(after(agent, 1)), 2);
    EXPECT_EQ(counts.at(agent.self()), 1);
  });
}

TEST_P(Refs, PrintRisingIdsWithMakersRank) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto printed = [](const auto& reference) {
      return (std::ostringstream() << reference).str();
    };
    const std::string rank = std::to_string(agent.self().rank);
    const RRef<int> mine(agent, 1);
    const auto there = agent.remote<&refs::number>(after(agent, 1), 1);
    EXPECT_EQ(printed(mine).rfind("RRef (" + rank + ", ", 0), 0U) << printed(mine);
    EXPECT_NE(printed(mine).find("owned here"), std::string::npos);
    EXPECT_EQ(printed(there).rfind("RRef (" + rank + ", ", 0), 0U) << printed(there);
    EXPECT_NE(printed(there).find("of " + after(agent, 1).name), std::string::npos);
    EXPECT_LT(mine.handle()->id(), there.handle()->id());
    EXPECT_NE(there.handle()->id(), there.handle()->fork());
    EXPECT_EQ(printed(RRef<int>()), "empty RRef");
  });
}

TEST_P(Refs, EndOfTheCreationIsAFuture) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto& to : {after(agent, 1), agent.self()}) {
      agent.remote<&refs::number>(to, 1).created().get();
      agent.remote_op("aten::add", to, at::ones({1}), 1).created().get();
      agent.remote<refs::Account>(to, 1).created().get();
      agent.remote<&refs::nothing>(to).created().get();
    }
    // A worker that was given the reference may ask as well.
    EXPECT_TRUE(agent.sync<&refs::is_created>(after(agent, 2),
                                              agent.remote<&refs::number>(after(agent, 1), 1)));
  });
}

TEST_P(Refs, UnsendableValueIsUsedInPlace) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto quantized = agent.remote<&refs::quantized>(after(agent, 1));
    EXPECT_EQ(quantized.sync<&refs::size_of>(0), 2);
    const auto error = error_of([&] { quantized.to_here(); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("cannot be sent"), std::string::npos) << error.what();
  });
}

TEST_P(Refs, RemoteModuleIsCalledAndTrained) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto net = agent.remote<refs::Net>(after(agent, 1), 3);
    const auto one = net.sync<&refs::Net::forward>(at::ones({4, 3}));
    EXPECT_TRUE(at::equal(net.async<&refs::Net::forward>(at::ones({4, 3})).get(), one));
    const auto parameters = net.sync<&refs::parameters_of>();
    ASSERT_EQ(parameters.size(), 2U);
    EXPECT_EQ(parameters[0].owner(), after(agent, 1));
    EXPECT_EQ(parameters[0].to_here().sizes(), (at::IntArrayRef{2, 3}));
    net.sync<&torch::nn::Module::train>(false);
    EXPECT_FALSE(net.sync<&torch::nn::Module::is_training>());
    net.sync<&torch::nn::Module::train>(true);
    EXPECT_TRUE(net.sync<&torch::nn::Module::is_training>());
  });
}

TEST_P(Refs, LocalValuesPassInAllModes) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const RRef<int> a(agent, 40);
    const RRef b(agent, 50);
    for (const auto& to : {after(agent, 1), agent.self()}) {
      EXPECT_EQ(agent.sync<&refs::fetch_sum>(to, a, b), 90);
      EXPECT_EQ(agent.async<&refs::fetch_sum>(to, a, b).get(), 90);
      EXPECT_EQ(agent.remote<&refs::fetch_sum>(to, a, b).to_here(), 90);
    }
    const RRef sparse(agent, at::eye(2).to_sparse());
    for (const auto& to : {after(agent, 1), agent.self()}) {
      EXPECT_TRUE(
          at::equal(agent.sync<&refs::add_held>(to, sparse, sparse).to_dense(), at::eye(2) * 2));
      EXPECT_TRUE(at::equal(agent.async<&refs::add_held>(to, sparse, sparse).get().to_dense(),
                            at::eye(2) * 2));
      EXPECT_TRUE(at::equal(agent.remote<&refs::add_held>(to, sparse, sparse).to_here().to_dense(),
                            at::eye(2) * 2));
    }
  });
}

class RefsAmongMany : public Refs {};

TEST_P(RefsAmongMany, ComeBackFromNonOwners) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&refs::fetched_from_third>(after(agent, 1), after(agent, 2)), 7);
    EXPECT_EQ(agent.remote<&refs::fetched_from_third>(after(agent, 1), after(agent, 2)).to_here(),
              7);
    const auto third = agent.sync<&refs::make_on>(after(agent, 1), after(agent, 2), 5);
    EXPECT_EQ(third.owner(), after(agent, 2));
    EXPECT_EQ(third.to_here(), 5);
    const auto outer = agent.remote<&refs::make_two_on>(after(agent, 1), after(agent, 2));
    const auto inner = outer.to_here();
    ASSERT_EQ(inner.size(), 2U);
    EXPECT_EQ(inner[0].to_here() + inner[1].to_here(), 3);
  });
}

TEST_P(RefsAmongMany, SparseOnesComeBackFromNonOwners) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto sparse = at::eye(2).to_sparse();
    const auto third = after(agent, 2);
    const auto fetched = agent.remote<&refs::add_on>(after(agent, 1), third, sparse, sparse);
    EXPECT_TRUE(at::equal(fetched.to_here().to_dense(), at::eye(2) * 2));
    std::vector<RRef<std::vector<RRef<at::Tensor>>>> outer;
    for (int i = 0; i < 20; ++i) {
      outer.push_back(
          agent.remote<&refs::add_twice_on>(after(agent, 1), third, sparse * i, sparse));
    }
    for (int i = 0; i < 20; ++i) {
      const auto inner = outer[static_cast<std::size_t>(i)].to_here();
      ASSERT_EQ(inner.size(), 2U);
      EXPECT_EQ(inner[0].owner(), third);
      EXPECT_TRUE(at::equal(inner[0].to_here().to_dense(), at::eye(2) * (i + 1)));
      EXPECT_TRUE(at::equal(inner[1].to_here().to_dense(), at::eye(2) * 2));
    }
  });
}

TEST_P(Refs, TwentyNestedOnesWorkAtOnce) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::vector<RRef<std::vector<RRef<int>>>> outer;
    for (int i = 0; i < 20; ++i)
      outer.push_back(agent.remote<&refs::make_two_on>(after(agent, 1), after(agent, 2)));
    for (const auto& one : outer)
      EXPECT_EQ(agent.sync<&refs::sum_of>(after(agent, 1), one.to_here()), 3);
  });
}

TEST_P(Refs, ReturnedOnesChangeTheOwnersValue) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto three = agent.sync<&refs::own_three>(after(agent, 1));
    int expected = 11;
    for (const auto& one : three) {
      one.sync<&refs::increase>(11);
      EXPECT_EQ(one.to_here(), expected++);
    }
  });
}

TEST_P(Refs, MethodsRunWhereTheValueLives) {
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
      account.sync<&refs::Account::put>(1);
      EXPECT_EQ(account.sync<&refs::Account::get>(), 1);
      account.async<&refs::Account::put>(2).get();
      EXPECT_EQ(account.async<&refs::Account::get>().get(), 2);
      account.remote<&refs::Account::put>(3).to_here();
      EXPECT_EQ(account.remote<&refs::Account::get>().to_here(), 3);
      EXPECT_EQ(account.async<&refs::Account::twice>(4).get(), 8);
      EXPECT_EQ(account.remote<&refs::Account::peek>().to_here(), 3);
      // By functions that run on the owner and take the reference.
      const auto other = agent.remote<refs::Account>(to, 10);
      EXPECT_EQ(agent.sync<&refs::add_to>(other.owner(), other, 2), 12);
      EXPECT_EQ(agent.async<&refs::add_to>(other.owner(), other, 5).get(), 17);
      EXPECT_EQ(agent.remote<&refs::add_to>(other.owner(), other, 7).to_here(), 24);
    }
  });
}

TEST_P(Refs, ModulesAreMadeInPlace) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto net = agent.remote<refs::Net>(after(agent, 1), 3);
    EXPECT_EQ(net.sync<&refs::Net::forward>(at::ones({4, 3})).sizes(), (at::IntArrayRef{4, 2}));
  });
}

TEST_P(Refs, CanBeUsedBeforeTheirValueExists) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto late =
        agent.remote<&refs::number_behind>(after(agent, 1), 20, agent.self().name + "/passed");
    const auto sum = agent.remote<&refs::fetch_sum>(after(agent, 2), late, late);
    const auto more = agent.remote<&refs::fetch_sum>(after(agent, 1), sum, late);
    const auto increased = late.async<&refs::increase>(1);
    const auto fetched = late.fetch();
    for (const auto& future : {increased, detail::end_of(fetched)}) EXPECT_FALSE(future.done());
    agent.sync<&refs::open_gate>(after(agent, 1), agent.self().name + "/passed");
    increased.get();
    EXPECT_EQ(late.to_here(), 21);
    EXPECT_GE(more.to_here(), 60);
    EXPECT_LE(more.to_here(), 63);
  });
}

TEST_P(Refs, CopiesGoFromOwnerToOwner) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto one = at::ones({3, 2});
    for (int from = 0; from < 3; ++from) {
      for (int to = 0; to < 3; ++to) {
        const auto value = agent.remote<&refs::add>(after(agent, from), one, one * from);
        const auto copy = value.copy_to(after(agent, to));
        EXPECT_EQ(copy.owner(), after(agent, to));
        EXPECT_EQ(copy.sync<&refs::size_of>(0), 3);
        EXPECT_TRUE(at::equal(copy.to_here(), one * (1 + from))) << from << " to " << to;
        copy.created().get();
        EXPECT_TRUE(at::equal(agent.sync<&refs::fetch>(after(agent, 3), copy), one * (1 + from)));
      }
    }
    EXPECT_EQ(error_of([&] { RRef<int>(agent, 1).copy_to("nobody"); }).blame(), Blame::Caller);
  });
}

TEST_P(Refs, CopyIsASnapshot) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto value = agent.remote<&refs::number>(after(agent, 1), 1);
    for (int to = 0; to < 3; ++to) {
      const auto copy = value.copy_to(after(agent, to));
      copy.created().get();
      value.sync<&refs::increase>(10);
      copy.sync<&refs::increase>(3);
      EXPECT_EQ(copy.to_here(), 4 + 10 * to);
      EXPECT_EQ(value.to_here(), 11 + 10 * to);
    }
  });
}

TEST_P(Refs, CopyMayBeUsedBeforeItsValue) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const std::string gate = agent.self().name + "/copied";
    auto value = agent.remote<&refs::number_behind>(after(agent, 1), 1, gate);
    const auto sum = agent.async<&refs::local_sum>(after(agent, 2), value.copy_to(after(agent, 2)),
                                                   value.copy_to(after(agent, 2)));
    for (int link = 2; link < 8; ++link) {  // the previous references end at once
      const auto next = after(agent, link);
      value = agent.remote<&refs::plus_local>(next, value.copy_to(next), 1);
    }
    EXPECT_EQ(error_of([&] { value.to_here(5ms); }).blame(), Blame::Timeout);
    EXPECT_FALSE(sum.done());
    agent.sync<&refs::open_gate>(after(agent, 1), gate);
    EXPECT_EQ(value.to_here(), 7);
    EXPECT_EQ(sum.get(), 2);
  });
}

TEST_P(Refs, CopyOfAFailedValueFails) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (int to = 0; to < 3; ++to) {
      const std::string gate = agent.self().name + "/no copy " + std::to_string(to);
      const auto there = after(agent, to);
      const auto failed = agent.remote<&refs::throws_behind>(after(agent, 1), gate);
      const auto copy = failed.copy_to(there);
      const auto used = agent.async<&refs::plus_local>(there, copy, 1);
      agent.sync<&refs::open_gate>(after(agent, 1), gate);
      EXPECT_NE(error_of([&] { used.get(); }).text().find("no luck behind"), std::string::npos);
      for (int again = 0; again < 2; ++again) {
        EXPECT_THROW(copy.to_here(), rpc::CreationError);
        EXPECT_NE(error_of([&] { copy.to_here(); }).text().find("no luck behind"),
                  std::string::npos);
      }
    }
    const auto quantized = agent.remote<&refs::quantized>(after(agent, 1)).copy_to(after(agent, 2));
    EXPECT_THROW(quantized.to_here(), rpc::CreationError);
    EXPECT_NE(error_of([&] { quantized.to_here(); }).text().find("cannot be sent"),
              std::string::npos);
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

TEST_P(Refs, FailedCreationFailsEveryUse) {
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

TEST_P(Refs, LocalValueNeedsTheOwner) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto there = agent.remote<&refs::number>(after(agent, 1), 1);
    const auto error = error_of([&] { there.local_value(); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    const std::string reference = "RRef " + rref::to_text(there.handle()->id()) + " (fork " +
                                  rref::to_text(there.handle()->fork()) + ") asked for on rank " +
                                  std::to_string(agent.self().rank) + ",";
    EXPECT_NE(error.text().find(reference), std::string::npos) << error.what();
    EXPECT_NE(error.text().find(after(agent, 1).name), std::string::npos) << error.what();
    EXPECT_EQ(error_of([] { RRef<int>(3); }).blame(), Blame::Caller)
        << "an RRef without an agent needs a running call";
    EXPECT_EQ(error_of([] { RRef<int>().to_here(); }).blame(), Blame::Caller);
  });
}

TEST_P(Refs, DoNotTravelOutsideOfCalls) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto there = agent.remote<&refs::number>(after(agent, 1), 1);
    EXPECT_EQ(error_of([&] { encode(there); }).blame(), Blame::Caller);
    EXPECT_EQ(error_of([&] { encode(std::vector{RRef<int>(agent, 1)}); }).blame(), Blame::Caller);
    EXPECT_EQ(error_of([&] { decode<RRef<int>>(encode(std::tuple(1, 2, 3, 4))); }).blame(),
              Blame::Caller);
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, Refs, testing::ValuesIn(harness::settings()), harness::name_of);
INSTANTIATE_TEST_SUITE_P(Rpc, RefsAmongMany, testing::ValuesIn(harness::settings()),
                         harness::name_of);

// created() asks the owner only until the creation is known; for a value of this worker it asks
// nobody.
TEST(RefLife, CreatedAsksTheOwnerAtMostOnce) {
  run_one([](rpc::Agent& agent) {
    const auto there = agent.remote<&refs::number>(1, 4);
    const auto mine = agent.remote<&refs::number>(0, 4);
    there.created().get();
    const auto served = agent.sync<&refs::served_and_busy>(1).first;
    for (int again = 0; again < 10; ++again) there.created().get();
    EXPECT_EQ(agent.sync<&refs::served_and_busy>(1).first, served + 1)
        << "only the previous question was served";
    const auto served_here = agent.debug_info().calls_served;
    for (int again = 0; again < 10; ++again) mine.created().get();
    EXPECT_EQ(agent.debug_info().calls_served, served_here);
  });
}

TEST(RefTimers, OwnersFetchTimerEndsWithAnswer) {
  run_one([](rpc::Agent& agent) {
    const auto core = call::detail::CoreCalls::of(agent);
    const auto mine = agent.remote<&refs::number_behind>(0, 4, "timer");
    const std::size_t before = core->pauses().size();
    const auto value = mine.fetch(1h);
    EXPECT_EQ(core->pauses().size(), before + 1);
    refs::open_gate("timer");
    EXPECT_EQ(value.get(), 4);
    for (const Deadline deadline = Deadline::in(20s);
         core->pauses().size() > before && !deadline.passed();)
      std::this_thread::yield();
    EXPECT_EQ(core->pauses().size(), before);
  });
}

TEST(RefLife, ReferencesFailAfterShutdown) {
  std::optional<RRef<int>> kept;
  run_one([&](rpc::Agent& agent) {
    kept = agent.remote<&refs::number>(1, 4);
    kept->created().get();
  });
  run_one([&](rpc::Agent& another) {  // another agent's calls work
    for (const auto& error :
         {error_of([&] { kept->to_here(); }), error_of([&] { kept->fetch().get(); }),
          error_of([&] { kept->sync<&refs::increase>(1); }),
          error_of([&] { kept->remote<&refs::plus_number>(1); }),
          error_of([&] { kept->copy_to(2); }), error_of([&] { kept->local_value(); }),
          error_of([&] { another.sync<&refs::take>(1, *kept); }),
          error_of([&] { another.async<&refs::take>(1, *kept).get(); }),
          error_of([&] { another.remote<&refs::give_back>(1, *kept); })}) {
      EXPECT_EQ(error.blame(), Blame::Caller) << error.text();
      EXPECT_NE(error.text().find("after deletion"), std::string::npos) << error.text();
    }
    EXPECT_EQ(another.remote<&refs::number>(1, 4).to_here(), 4);
    for (const int worker : {0, 1}) expect_counters(another, worker, {0, 0, 0});
  });
}

}  // namespace
}  // namespace weft
