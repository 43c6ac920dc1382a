// SPDX-License-Identifier: Apache-2.0
// A job of two different programs: this one calls, and serving.cc serves what it exposes. A
// function that a program calls is entered by that call, so serving.cc makes no calls.
#include <csignal>

#include <spawn.h>

#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/engine/launch/process.h>
#include <weft/tests/engine/rpc/two_programs/apart.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>

extern char** environ;

namespace apart {

int changed(int value) { return value; }

}  // namespace apart

namespace weft {
namespace {

using harness::error_of;

class TwoPrograms : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string address = "file://" + folder_.path() + "/job";
    std::string words[] = {WEFT_TEST_SERVING, address, GetParam()};
    char* arguments[] = {words[0].data(), words[1].data(), words[2].data(), nullptr};
    pid_t process = 0;
    ASSERT_EQ(::posix_spawn(&process, WEFT_TEST_SERVING, nullptr, nullptr, arguments, environ), 0);
    serving_.add(process);
    agent =
        rpc::init("calling",
                  {.rank = 0, .world_size = 2, .init_method = address, .transports = {GetParam()}});
  }
  void TearDown() override {
    agent.shutdown({.timeout = std::chrono::seconds(30)});
    const auto ended = serving_.wait(std::chrono::seconds(30));
    ASSERT_NE(ended.process, 0) << "the serving program does not end";
    EXPECT_EQ(ended.status, 0) << launch::describe_status(ended.status);
  }

  rpc::Agent agent;

 private:
  harness::Folder folder_;
  launch::Children serving_;
};

TEST_P(TwoPrograms, ExposedFunctionsWorkInAllModes) {
  EXPECT_EQ(agent.sync<&apart::plus>("serving", 1, 2), 3);
  EXPECT_EQ(agent.async<&apart::greet>("serving", "you").get(), "hello you");
  EXPECT_EQ(agent.sync<rpc::inline_<&apart::plus>>("serving", 2, 2), 4);
  EXPECT_EQ(agent.sync<&apart::later>("serving", 5), 5);
  agent.sync<&apart::nothing>("serving");
  EXPECT_TRUE(at::equal(agent.sync<&apart::doubled>("serving", at::ones({3})), at::full({3}, 2)));
  try {
    agent.sync<&apart::throws>("serving", "no such luck");
    ADD_FAILURE() << "the call throws nothing";
  } catch (const rpc::RemoteError& error) {
    EXPECT_EQ(error.text(), "no such luck");
  }
}

TEST_P(TwoPrograms, RemoteResultsAreFetchedAndCopied) {
  const auto sum = agent.remote<&apart::plus>("serving", 1, 2);
  EXPECT_EQ(sum.to_here(), 3);
  EXPECT_EQ(sum.fetch().get(), 3);
  EXPECT_EQ(agent.remote<&apart::later>("serving", 6).to_here(), 6);
  agent.remote<&apart::nothing>("serving").to_here();
  EXPECT_EQ(sum.copy_to("calling").local_value(), 3);
  const auto there = RRef<int>(agent, 7).copy_to("serving");
  EXPECT_EQ(there.owner().name, "serving");
  EXPECT_EQ(agent.sync<&apart::sum_of>("serving", sum, std::vector{there, RRef<int>(agent, 10)}),
            20);
}

// No call of this program has created these references.
TEST_P(TwoPrograms, ReferencesInResultsAreUsable) {
  const auto [text, characters] = agent.sync<&apart::owned>("serving", "three");
  EXPECT_EQ(characters, 5);
  text.created().get();
  EXPECT_EQ(text.to_here(), "three");
  apart::Node node = agent.sync<&apart::chain>("serving", 4);
  int nodes = 1;
  for (; node.next; ++nodes) node = node.next.to_here();
  EXPECT_EQ(nodes, 4);
}

TEST_P(TwoPrograms, ExposedTypesAndMethodsAreCalled) {
  const auto counter = agent.remote<apart::Counter>("serving", 5);
  EXPECT_EQ(counter.sync<&apart::Counter::add>(2), 7);
  EXPECT_EQ(counter.async<&apart::Counter::value>().get(), 7);
  EXPECT_EQ(counter.remote<&apart::Counter::add>(3).to_here(), 10);
  EXPECT_EQ(counter.sync<&apart::value_of>(), 10);
  const auto named = agent.remote<apart::Counter>("serving", 5, "fifth");
  named.created().get();
  EXPECT_EQ(named.sync<&apart::Counter::name>().to_here(), "fifth");
  const auto heap = agent.remote<&apart::heap>("serving", 3);  // its type cannot be sent
  EXPECT_EQ(heap.sync<&apart::pointers>(), 3);
}

TEST_P(TwoPrograms, ParametersOfExposedTypesAreReferredTo) {
  const auto rows = remote_parameters(agent.remote<apart::Weights>("serving", 3));
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_TRUE(at::equal(rows[0].to_here(), at::ones({3})));
}

TEST_P(TwoPrograms, OperatorsNeedNoExposing) {
  const auto ones = at::ones({2});
  EXPECT_TRUE(at::equal(agent.sync_op("aten::add", "serving", ones, ones), at::full({2}, 2)));
  EXPECT_TRUE(at::equal(agent.async_op("aten::mul", "serving", ones, 3).get(), at::full({2}, 3)));
  EXPECT_TRUE(
      at::equal(agent.remote_op("aten::add", "serving", ones, 1).to_here(), at::full({2}, 2)));
  using Values = std::vector<rpc::OperatorValue>;
  EXPECT_EQ(agent
                .sync<&rpc::run_operator_for_list>("serving", "aten::chunk",
                                                   Values{ones, std::int64_t{2}})
                .size(),
            2U);
}

TEST_P(TwoPrograms, ExposedScriptsAreCalled) {
  const auto ones = at::ones({2});
  EXPECT_TRUE(at::equal(agent.sync_script("math.scale", "serving", ones, 3), at::full({2}, 3)));
  EXPECT_TRUE(
      at::equal(agent.remote_script("math.scale", "serving", ones).to_here(), at::full({2}, 2)));
  agent.sync_script<void>("math.scale", "serving", ones);
  // The other program does not know this result type; it can return a ScriptValue instead.
  using Both = std::tuple<at::Tensor, int>;
  const auto other = error_of([&] { agent.sync_script<Both>("math.both", "serving", ones); });
  EXPECT_EQ(other.blame(), Blame::Unsupported) << other.what();
  const auto any = agent.sync_script<rpc::ScriptValue>("math.both", "serving", ones);
  EXPECT_EQ(std::get<std::vector<rpc::ScriptValue>>(any.value).size(), 2U);
  const auto unknown = error_of([&] { agent.sync_script("net.forward", "serving", ones); });
  EXPECT_NE(unknown.text().find("math.scale, math.both"), std::string::npos) << unknown.text();
}

TEST_P(TwoPrograms, HiddenOrChangedFunctionIsNamed) {
  const auto hidden = error_of([&] { agent.sync<&apart::hidden>("serving", 1); });
  EXPECT_EQ(hidden.blame(), Blame::Unsupported);
  EXPECT_NE(hidden.text().find("apart::hidden"), std::string::npos) << hidden.text();
  EXPECT_NE(hidden.text().find("exposes it (weft::rpc::expose<&f>()"), std::string::npos)
      << hidden.text();
  const auto changed = error_of([&] { agent.sync<&apart::changed>("serving", 1); });
  EXPECT_EQ(changed.blame(), Blame::Unsupported);
  EXPECT_NE(changed.text().find("int (int)"), std::string::npos) << changed.text();
  EXPECT_NE(changed.text().find("another signature: "), std::string::npos) << changed.text();
  EXPECT_NE(changed.text().find("int (long)"), std::string::npos) << changed.text();
}

INSTANTIATE_TEST_SUITE_P(Rpc, TwoPrograms, testing::Values("shm", "tcp"),
                         [](const auto& transport) { return transport.param; });

}  // namespace
}  // namespace weft
