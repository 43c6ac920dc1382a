// SPDX-License-Identifier: Apache-2.0
// WEFT_DEBUG=detail finds tensors that are changed while they are being sent. Options::faults holds
// messages back for a while, so that the change happens before they are sent.
#include <cstdlib>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ops/from_blob.h>
#include <torch/types.h>

#include <weft/tests/engine/rpc/workers.h>

namespace detail_of_calls {

using namespace weft;

// Set before the library reads the configuration.
const bool kDetail = [] { return ::setenv("WEFT_DEBUG", "detail", 1) == 0; }();

double sum(std::vector<at::Tensor> all) {
  double total = 0;
  for (const at::Tensor& one : all) total += one.to_dense().sum().item<double>();
  return total;
}
at::Tensor kept;
at::Tensor give_kept() { return kept; }
at::Tensor give_copy() { return kept.clone(); }

}  // namespace detail_of_calls

namespace weft::harness {
namespace {

using namespace detail_of_calls;
using namespace std::chrono_literals;

class Changed : public testing::TestWithParam<Setting> {};

struct Change {
  const char* name;
  const char* found;  // a part of the error
  void (*run)(at::Tensor& tensor);
};

TEST_P(Changed, ArgumentsFailTheirCall) {
  ASSERT_TRUE(kDetail);
  const Change changes[] = {
      {"in place", "an operation in place", [](at::Tensor& tensor) { tensor.add_(1); }},
      {"a view of it", "an operation in place",
       [](at::Tensor& tensor) { tensor.narrow(0, 2, 1).fill_(9); }},
      {"by .data()", "a pointer into a tensor's memory",
       [](at::Tensor& tensor) { tensor.data().add_(1); }},
      {"by a pointer", "a pointer into a tensor's memory",
       [](at::Tensor& tensor) { tensor.mutable_data_ptr<float>()[1] += 5; }},
  };
  const rpc::Options slow{
      .faults = {.delay = {{rpc::MessageKind::Call, 300ms}, {rpc::MessageKind::Create, 300ms}}}};
  const auto body = [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    LogWatch& log = LogWatch::current();
    log.allow("an argument was changed while its bytes were being sent");
    for (const Change& change : changes) {
      for (const int elements : {4, 100'000}) {
        const auto tensor = at::ones({elements}, at::kFloat);
        const auto expect = [&](const Error& error) {
          EXPECT_EQ(error.blame(), Blame::Caller) << change.name;
          EXPECT_NE(error.text().find(change.found), std::string::npos)
              << change.name << ": " << error.text();
          EXPECT_NE(error.text().find("detail_of_calls::sum"), std::string::npos) << error.text();
          EXPECT_NE(error.text().find("until its future is done"), std::string::npos)
              << error.text();
        };
        auto changing = tensor.clone();
        const auto called = agent.async<&sum>("worker1", std::vector{tensor, changing});
        change.run(changing);
        expect(error_of([&] { called.get(); }));
        const auto created = agent.remote<&sum>("worker1", std::vector{changing}).created();
        change.run(changing);
        expect(error_of([&] { created.get(); }));
      }
    }
    EXPECT_NE(log.text(), "");
  };
  run_workers(GetParam(), body, slow);
}

// A program may change tensors that have arrived, bytes that are not sent, and memory that was
// copied when it was packed.
TEST_P(Changed, AllowedChangesAreNotReported) {
  const rpc::Options slow{.faults = {.delay = {{rpc::MessageKind::Call, 50ms}}}};
  const auto body = [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const LogWatch& log = LogWatch::current();
    const auto matrix = at::ones({4, 8}, at::kFloat);
    const auto row = agent.async<&sum>("worker1", std::vector{matrix[1]});
    matrix.data()[3].fill_(100);  // none of these bytes are sent
    EXPECT_EQ(row.get(), 8.0);
    std::vector<float> memory(16, 1.0F);
    const auto borrowed =
        agent.async<&sum>("worker1", std::vector{at::from_blob(memory.data(), {16})});
    memory[0] = 50;
    EXPECT_EQ(borrowed.get(), 16.0);
    const auto weight = at::ones({4}, at::kFloat).requires_grad_();
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(agent.sync<&sum>("worker1", std::vector{weight, at::eye(4).to_sparse()}),
                8.0 + 4.0 * step);
      const c10::AutoGradMode no_grad(false);
      weight.add_(1);
    }
    EXPECT_EQ(log.text(), "");
  };
  run_workers(GetParam(), body, slow);
}

INSTANTIATE_TEST_SUITE_P(All, Changed, testing::ValuesIn(settings({2})), name_of);

// If another call or thread changes a result, the worker that ran the function logs it.
TEST(ChangedResults, AreLoggedByTheirWorker) {
  for (const bool copies : {true, false}) {
    kept = at::ones({8});
    run_workers(
        {As::Threads, "inproc", 2},
        [&](rpc::Agent& agent) {
          if (agent.self().rank == 0) {
            const auto result =
                copies ? agent.async<&give_copy>("worker1") : agent.async<&give_kept>("worker1");
            result.get();
            return;
          }
          LogWatch& log = LogWatch::current();
          log.allow("was changed while its bytes were being sent");
          // A call counts as served when its result has been packed.
          EXPECT_TRUE(comes_true([&] { return agent.debug_info().calls_served >= 1; }));
          kept.add_(1);
          const auto was_said = [&] {
            return log.text().find(
                       "the result of detail_of_calls::give_kept for worker0 (rank 0) was "
                       "changed") != std::string::npos;
          };
          if (copies) {
            agent.shutdown({.timeout = std::chrono::seconds(30)});  // waits until the reply is sent
            EXPECT_EQ(log.text(), "");
          } else {
            EXPECT_TRUE(comes_true(was_said)) << log.text();
          }
        },
        {.faults = {.delay = {{rpc::MessageKind::Reply, 2s}}}});
  }
}

}  // namespace
}  // namespace weft::harness
