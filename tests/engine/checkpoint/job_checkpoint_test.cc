// SPDX-License-Identifier: Apache-2.0
// Checkpoints whose values live on the workers of an RPC job.
#include <atomic>
#include <csignal>
#include <filesystem>
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <weft/checkpoint.h>
#include <weft/rpc.h>
#include <weft/tests/engine/checkpoint/checkpoints.h>
#include <weft/tests/engine/rpc/workers.h>
#include <weft/tests/harness/folder.h>

namespace job_checkpoints {

struct TableImpl : torch::nn::Module {
  explicit TableImpl(int seed)
      : rows(register_parameter("rows", torch::full({64, 512}, seed, torch::kFloat))),
        layer(register_module("layer", torch::nn::Linear(4, 3))) {}
  torch::Tensor rows;
  torch::nn::Linear layer;
};
using Table = std::shared_ptr<TableImpl>;

Table table(int seed) { return std::make_shared<TableImpl>(seed); }
at::Tensor filled(std::vector<std::int64_t> shape, double value) {
  return torch::full(shape, value);
}
at::Tensor rows_of(Table& table) { return table->rows.detach().clone(); }
at::Tensor weight_of(Table& table) { return table->layer->weight.detach().clone(); }
void change(Table& table, double by) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : table->parameters()) parameter.add_(by);
}
void change_tensor(at::Tensor& tensor, double by) { tensor.add_(by); }
std::atomic<bool> met{false};
void meet() { met = true; }
bool has_met() { return met; }
void die() { ::raise(SIGKILL); }

struct Net {
  Net() : layer(4, 4), optimizer(layer->parameters(), torch::optim::AdamWOptions(0.1)) {}
  void step() {
    optimizer.zero_grad();
    layer->forward(torch::ones({2, 4})).sum().backward();
    optimizer.step();
  }
  torch::nn::Linear layer;
  torch::optim::AdamW optimizer;
};

int number_of(int value) { return value; }
void set_number(int& number, int value) { number = value; }
void fill_rows(TableImpl& table, double value) {
  const torch::NoGradGuard no_grad;
  table.rows.fill_(value);
}
double first_of(TableImpl& table) { return table.rows[0][0].item<double>(); }
std::shared_ptr<torch::optim::AdamW> optimizer_of(Net& net) {
  return {std::shared_ptr<void>(), &net.optimizer};
}
int steps_of(Net& net) {
  const auto& state = net.optimizer.state().begin()->second;
  return static_cast<int>(static_cast<torch::optim::AdamWParamState&>(*state).step());
}

}  // namespace job_checkpoints

namespace weft::testing {
namespace {

using namespace job_checkpoints;
using checkpoint::JobPart;
using harness::As;
using harness::error_of;
using harness::run_workers;
using harness::Setting;
using ::testing::AllOf;
using ::testing::HasSubstr;

// The values of one job, whose owners are the workers with these ranks.
struct Values {
  Values(const rpc::Agent& agent, int first, int second, int seed)
      : table(agent.remote<&job_checkpoints::table>(first, seed)),
        tensors{agent.remote<&filled>(first, std::vector<std::int64_t>{3, 2}, seed + 1.0),
                agent.remote<&filled>(second, std::vector<std::int64_t>{5}, seed + 2.0)},
        other(agent.remote<&filled>(second, std::vector<std::int64_t>{70'000, 1}, seed + 3.0)) {}

  std::vector<JobPart> parts() {
    return {{"table", table},     {"tensors", tensors},         {"other", other},
            {"layer", net.layer}, {"optimizer", net.optimizer}, {"epoch", epoch}};
  }
  std::vector<at::Tensor> all() {
    std::vector<at::Tensor> values = {
        table.sync<&rows_of>(),       table.sync<&weight_of>(), tensors[0].to_here().clone(),
        tensors[1].to_here().clone(), other.to_here().clone(),  net.layer->weight.detach().clone()};
    return values;
  }

  RRef<Table> table;
  std::vector<RRef<at::Tensor>> tensors;
  RRef<at::Tensor> other;
  Net net;
  int epoch = 0;
};

bool are_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return true;
}

class JobCheckpoint : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(, JobCheckpoint,
                         ::testing::Values(Setting{As::Threads, "tcp", 3},
                                           Setting{As::Processes, "shm", 3}),
                         [](const auto& info) { return harness::name(info.param); });

// Each job runs in processes of its own, so values travel by the folder alone.
TEST_P(JobCheckpoint, IsLoadedByAJobOfOtherOwners) {
  const harness::Folder folder;
  const std::string path = folder.path() + "/run", expected = folder.path() + "/expected.pt";
  run_workers(GetParam(), [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    Values values(agent, 1, 2, 10);
    EXPECT_FALSE(checkpoint::exists(path, agent));
    values.net.step();
    values.epoch = 7;
    const auto saved = values.all();
    checkpoint::Saving saving = checkpoint::save_async(path, agent, values.parts());
    // The values are copied: what changes from now on is not in the checkpoint.
    values.table.sync<&change>(1.0);
    values.other.sync<&change_tensor>(1.0);
    values.net.step();
    values.epoch = 8;
    saving.wait();
    torch::save(saved, expected);
    EXPECT_TRUE(checkpoint::exists(path, agent));
    EXPECT_EQ(files_in(path + "/1"),
              (std::set<std::string>{"manifest", "rank00000.safetensors", "rank00001.safetensors",
                                     "rank00002.safetensors"}));
  });
  run_workers(GetParam(), [&](rpc::Agent& agent) {
    if (agent.self().rank != 1) return;
    Values values(agent, 0, 1, 20);
    checkpoint::load(path, agent, values.parts());
    std::vector<at::Tensor> saved;
    torch::load(saved, expected);
    EXPECT_TRUE(are_equal(values.all(), saved));
    EXPECT_EQ(values.epoch, 7);
    // The optimizer has its state.
    EXPECT_EQ(values.net.optimizer.state().size(), 2U);
    // A second checkpoint replaces the first.
    values.table.sync<&change>(1.0);
    values.epoch = 9;
    const auto now = values.all();
    checkpoint::save_async(path, agent, values.parts()).wait();
    EXPECT_EQ(files_in(path), std::set<std::string>{"2"});
    // A third waits for the second.
    values.epoch = 10;
    const auto third = checkpoint::save_async(path, agent, values.parts(), {.keep = 2});
    checkpoint::save_async(path, agent, values.parts(), {.keep = 2}).wait();
    EXPECT_EQ(files_in(path), (std::set<std::string>{"3", "4"}));
    values.table.sync<&change>(3.0);
    checkpoint::load(path, agent, {{"table", values.table}, {"epoch", values.epoch}});
    EXPECT_TRUE(are_equal(values.all(), now));
  });
}

TEST_P(JobCheckpoint, IsReadByAGroupAndReadsThatOfAGroup) {
  const harness::Folder folder;
  run_workers(GetParam(), [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    Values values(agent, 1, 2, 10);
    checkpoint::save_async(folder.path() + "/job", agent, values.parts()).wait();
  });
  harness::run_ranks(GetParam().as, 2, [&](ProcessGroup group) {
    TableImpl here(0);
    torch::Tensor first = torch::zeros({3, 2}), other = torch::zeros({70'000, 1});
    checkpoint::load(folder.path() + "/job", group,
                     {{"table", here}, {"tensors.0", first}, {"other", other}});
    EXPECT_EQ(here.rows.max().item<float>(), 10);
    EXPECT_TRUE(torch::equal(first, torch::full({3, 2}, 11.0)));
    EXPECT_TRUE(torch::equal(other, torch::full({70'000, 1}, 13.0)));
    other.fill_(5);
    checkpoint::save_async(folder.path() + "/group", group, {{"other", other}}).wait();
  });
  run_workers(GetParam(), [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    Values values(agent, 1, 2, 10);
    checkpoint::load(folder.path() + "/group", agent, {{"other", values.other}});
    EXPECT_EQ(values.other.to_here().max().item<float>(), 5);
  });
}

// Values made in place, plain ones, and one that is referred to before it exists.
TEST_P(JobCheckpoint, HasValuesOfAllKindsThatAPartTakes) {
  const harness::Folder folder;
  run_workers(GetParam(), [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto module = agent.remote<TableImpl>(1, 3);
    const auto number = agent.remote<&number_of>(2, 4);
    const auto net = agent.remote<Net>(2);
    const auto optimizer = net.remote<&optimizer_of>();
    net.sync<&Net::step>();
    const std::vector<JobPart> parts = {
        {"module", module}, {"number", number}, {"optimizer", optimizer}};
    checkpoint::save_async(folder.path() + "/run", agent, parts).wait();
    module.sync<&fill_rows>(9.0);
    number.sync<&set_number>(8);
    net.sync<&Net::step>();
    EXPECT_EQ(net.sync<&steps_of>(), 2);
    checkpoint::load(folder.path() + "/run", agent, parts);
    EXPECT_EQ(module.sync<&first_of>(), 3);
    EXPECT_EQ(number.to_here(), 4);
    EXPECT_EQ(net.sync<&steps_of>(), 1);
  });
}

TEST_P(JobCheckpoint, LoadWaitsForTheRunningSave) {
  const harness::Folder folder;
  const std::string path = folder.path() + "/run/";
  run_workers(GetParam(), [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    Values values(agent, 1, 2, 10);
    const std::vector<JobPart> parts = {{"table", values.table}, {"other", values.other}};
    const auto saved = values.all();
    const checkpoint::Saving saving = checkpoint::save_async(path, agent, parts);
    values.table.sync<&change>(1.0);
    checkpoint::load(path, agent, parts);
    EXPECT_TRUE(are_equal(values.all(), saved));
    EXPECT_TRUE(checkpoint::exists(path, agent));
  });
}

TEST_P(JobCheckpoint, ThatDoesNotFitChangesNothing) {
  const harness::Folder folder;
  const std::string path = folder.path() + "/run";
  run_workers(GetParam(), [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    Values values(agent, 1, 2, 10);
    checkpoint::save_async(path, agent, values.parts()).wait();
    values.table.sync<&change>(1.0);
    const auto before = values.all();
    const auto refused = [&](const std::vector<JobPart>& parts) {
      const Error error = error_of([&] { checkpoint::load(path, agent, parts); });
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
      return error.text();
    };
    const auto shorter = agent.remote<&filled>(2, std::vector<std::int64_t>{4}, 0.0);
    EXPECT_THAT(refused({{"table", values.table}, {"other", shorter}}),
                AllOf(HasSubstr("worker 'worker2'"), HasSubstr("part 'other'"),
                      HasSubstr("nothing was loaded")));
    EXPECT_THAT(refused({{"table", values.table}, {"missing", values.other}}),
                HasSubstr("the checkpoint has no part of that name; it has 'epoch'"));
    EXPECT_THAT(refused({{"table", values.other}}), HasSubstr("in the checkpoint and"));
    EXPECT_THAT(refused({{"table", values.table}, {"table", values.other}}),
                HasSubstr("two parts named 'table'"));
    EXPECT_THAT(error_of([&] {
                  checkpoint::load(path + "/none", agent, {{"table", values.table}});
                }).text(),
                HasSubstr("none"));
    EXPECT_TRUE(are_equal(values.all(), before));
  });
}

TEST_P(JobCheckpoint, ThatCannotBeMadeIsRefused) {
  const harness::Folder folder;
  run_workers(GetParam(), [&](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    Values values(agent, 1, 2, 10);
    const std::string path = folder.path() + "/run";
    const auto refused = [&](std::vector<JobPart> parts, checkpoint::SaveOptions options = {}) {
      const Error error =
          error_of([&] { checkpoint::save_async(path, agent, std::move(parts), options).wait(); });
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
      return error.text();
    };
    EXPECT_THAT(refused({}), HasSubstr("has no parts"));
    EXPECT_THAT(refused({{"epoch", values.epoch}}, {.keep = 0}), HasSubstr("keep at least 1"));
    EXPECT_THAT(refused({{"a", values.table}, {"a.rows", values.other}}),
                HasSubstr("rename one of them"));
    EXPECT_THAT(refused({{"epoch", checkpoint::per_rank(values.epoch)}}),
                HasSubstr("per_rank() is for a group"));
    const auto sparse = RRef<at::Tensor>(agent, torch::ones({2, 2}).to_sparse());
    EXPECT_THAT(refused({{"table", values.table}, {"sparse", sparse}}),
                AllOf(HasSubstr("worker 'worker0'"), HasSubstr("part 'sparse'")));
    EXPECT_EQ(error_of([] { const JobPart part("empty", RRef<at::Tensor>()); }).blame(),
              Blame::Caller);
    EXPECT_EQ(files_in(path), std::set<std::string>{});
    checkpoint::save_async(path, agent, values.parts()).wait();
  });
}

TEST(JobCheckpointFailures, OwnerThatDoesNotSeeTheFolderIsNamed) {
  const harness::Folder folder, elsewhere;
  run_workers({As::Processes, "shm", 3}, [&](rpc::Agent& agent) {
    std::filesystem::current_path(agent.self().rank == 1 ? elsewhere.path() : folder.path());
    agent.sync<&meet>(agent.self());
    if (agent.self().rank != 0) return;
    const auto value = agent.remote<&filled>(1, std::vector<std::int64_t>{4}, 1.0);
    EXPECT_TRUE(harness::comes_true([&] { return agent.sync<&has_met>(1); }));
    const Error error = error_of([&] {
      checkpoint::save_async("run", agent, {{"value", value}}).wait();
    });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_THAT(error.text(),
                AllOf(HasSubstr("worker 'worker1'"), HasSubstr("there is no folder 'run/1' here")));
    EXPECT_EQ(files_in("run"), std::set<std::string>{});
  });
}

// Worker 1 is killed when it has begun to write, long before it ends.
TEST(JobCheckpointFailures, OwnerThatDiesWhileItWritesIsNamed) {
  const harness::Folder folder;
  const std::string path = folder.path() + "/run";
  const auto body = [&](rpc::Agent& agent) {
    const auto small = agent.remote<&filled>(2, std::vector<std::int64_t>{4}, 1.0);
    auto large = agent.remote<&filled>(1, std::vector<std::int64_t>{4}, 1.0);
    checkpoint::save_async(path, agent, {{"small", small}, {"large", large}}).wait();
    large = agent.remote<&filled>(1, std::vector<std::int64_t>{64 << 20}, 2.0);
    small.sync<&change_tensor>(5.0);
    checkpoint::Saving saving =
        checkpoint::save_async(path, agent, {{"small", small}, {"large", large}});
    const auto killed = agent.async<&die>("worker1");
    const Error error = error_of([&] { saving.wait(); });
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("worker1"));
    EXPECT_EQ(files_in(path), std::set<std::string>{"1"});
    EXPECT_EQ(error_of([&] {
                checkpoint::save_async(path, agent, {{"large", large}}).wait();
              }).blame(),
              Blame::PeerLost);
    EXPECT_EQ(files_in(path), std::set<std::string>{"1"});
    checkpoint::load(path, agent, {{"small", small}});
    EXPECT_EQ(small.to_here().max().item<float>(), 1);
    harness::Processes::say("done");
  };
  harness::Processes processes(3, [&](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank), {.transports = {"shm"}});
    if (rank == 0) body(agent);
    try {
      agent.shutdown();
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    }
  });
  processes.expect_success({1});
}

}  // namespace
}  // namespace weft::testing
