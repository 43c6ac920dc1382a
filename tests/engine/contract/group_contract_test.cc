// SPDX-License-Identifier: Apache-2.0
// A program that uses each spelling of the public API of process groups and data-parallel training
// once, and checks the result. Where this does not compile, users' programs do not either.
#include <chrono>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include <weft/weft.h>

// Users may have this warning on; options of which only some are named must not cause it.
#pragma GCC diagnostic error "-Wmissing-field-initializers"

namespace group_contract {

using namespace weft;
using namespace std::chrono_literals;

struct NetImpl : torch::nn::Module {
  NetImpl()
      : a(register_module("a", torch::nn::Linear(4, 8))),
        b(register_module("b", torch::nn::Linear(8, 2))) {}
  at::Tensor forward(at::Tensor x) { return b->forward(torch::relu(a->forward(x))); }
  torch::nn::Linear a, b;
};
TORCH_MODULE(Net);

struct Trainer {  // a DistributedDataParallel as a member
  Trainer(std::shared_ptr<NetImpl> net, ProcessGroup group)
      : ddp(std::move(net), std::move(group)) {}
  DistributedDataParallel<NetImpl> ddp;
};

class GroupContract : public testing::TestWithParam<std::string> {
 protected:
  // Two ranks, threads of one process.
  static void run(const std::function<void(ProcessGroup)>& body) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          body(init_process_group({.backend = GetParam(),
                                   .rank = rank,
                                   .world_size = 2,
                                   .store = store,
                                   .timeout = 60s}));
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    }
    for (auto& rank : ranks) rank.join();
  }
};

TEST_P(GroupContract, CollectivesWorkAsSpecified) {
  run([](ProcessGroup group) {
    const int rank = group.rank();
    const int size = group.size();
    EXPECT_TRUE(static_cast<bool>(group));
    EXPECT_FALSE(static_cast<bool>(ProcessGroup()));
    EXPECT_TRUE(group.device().is_cpu());
    EXPECT_EQ(group.backend(at::Device("cpu")), GetParam());
    const auto own = [&] { return torch::full({2}, rank + 1.0); };
    const auto two = [](double a, double b) { return torch::tensor({a, b}, torch::kFloat); };
    at::Tensor t = own();
    group.broadcast(t, 0).wait();
    EXPECT_TRUE(t.equal(two(1, 1)));
    t = own();
    group.reduce(t, 0).wait();
    EXPECT_TRUE(t.equal(rank == 0 ? two(3, 3) : two(2, 2)));
    t = own();
    group.all_reduce(t).wait();
    EXPECT_TRUE(t.equal(two(3, 3)));
    for (const ReduceOp op : {ReduceOp::Product, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg}) {
      t = own();
      group.all_reduce(t, op).synchronize(10s);
      const double want = op == ReduceOp::Product ? 2
                          : op == ReduceOp::Min   ? 1
                          : op == ReduceOp::Max   ? 2
                                                  : 1.5;
      EXPECT_TRUE(t.equal(two(want, want)));
    }
    for (const ReduceOp op : {ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor}) {
      at::Tensor bits = torch::full({2}, rank + 1, torch::kInt);
      group.all_reduce(bits, op).wait();
      EXPECT_EQ(bits[0].item<int>(), op == ReduceOp::BitAnd ? 0 : 3);
    }
    std::vector<at::Tensor> outputs{torch::zeros(2), torch::zeros(2)};
    group.all_gather(outputs, own()).wait();
    EXPECT_TRUE(outputs[0].equal(two(1, 1)) && outputs[1].equal(two(2, 2)));
    at::Tensor whole = torch::zeros(4);
    group.all_gather_into(whole, own()).wait();
    EXPECT_TRUE(whole.equal(torch::tensor({1.F, 1.F, 2.F, 2.F})));
    std::vector<at::Tensor> gathered;
    if (rank == 1) gathered = {torch::zeros(2), torch::zeros(2)};
    group.gather(gathered, own(), 1).wait();
    EXPECT_TRUE(rank == 0 || (gathered[0].equal(two(1, 1)) && gathered[1].equal(two(2, 2))));
    at::Tensor got = torch::zeros(2);
    group
        .scatter(
            got,
            rank == 0 ? std::vector<at::Tensor>{two(5, 5), two(6, 6)} : std::vector<at::Tensor>{},
            0)
        .wait();
    EXPECT_TRUE(got.equal(two(5 + rank, 5 + rank)));
    group.reduce_scatter(got, {two(1, 1), two(2, 2)}).wait();
    EXPECT_TRUE(got.equal(two(2 + 2 * rank, 2 + 2 * rank)));
    group.reduce_scatter_into(got, torch::tensor({1.F, 1.F, 2.F, 2.F}), ReduceOp::Sum).wait();
    EXPECT_TRUE(got.equal(two(2 + 2 * rank, 2 + 2 * rank)));
    std::vector<at::Tensor> crossed{torch::zeros(1), torch::zeros(1)};
    group.all_to_all(crossed, {torch::full({1}, 10.0 * rank), torch::full({1}, 10.0 * rank + 1)})
        .wait();
    EXPECT_EQ(crossed[0].item<float>(), rank);
    EXPECT_EQ(crossed[1].item<float>(), 10 + rank);
    Work sent = group.send(own(), (rank + 1) % size, 7);
    at::Tensor received = torch::zeros(2);
    Work work = group.recv(received, (rank + 1) % size, 7);
    work.wait();
    sent.wait();
    EXPECT_EQ(work.source_rank(), (rank + 1) % size);
    EXPECT_TRUE(work.query());
    EXPECT_FALSE(work.error().has_value());
    work.future().get();
    Work done;
    done.wait();
    if (rank == 0) {
      group.send(own(), 1).wait();
    } else {
      Work any = group.recv(received);
      any.wait();
      EXPECT_EQ(any.source_rank(), 0);
    }
    group.barrier().wait();
    group.monitored_barrier(10s);
    EXPECT_TRUE(group.store());
    ProcessGroup only = group.new_group({1});
    EXPECT_EQ(static_cast<bool>(only), rank == 1);
    ProcessGroup turned = group.split(0, -rank);
    EXPECT_EQ(turned.rank(), 1 - rank);
    EXPECT_EQ(turned.global_rank(0), 1);
    EXPECT_THROW(static_cast<void>(group.broadcast(own(), 5)), Error);
    EXPECT_THROW(static_cast<void>(group.all_reduce(torch::zeros({4, 4}).t())), Error);
  });
}

TEST_P(GroupContract, DataParallelWorksAsSpecified) {
  run([](ProcessGroup group) {
    torch::manual_seed(group.rank());
    Net net;
    DistributedDataParallel ddp(net, group, DdpOptions{});
    torch::optim::SGD optimizer(ddp.module()->parameters(), 0.1);
    const auto step = [&](const at::Tensor& x) {
      optimizer.zero_grad();
      auto y = ddp(x);
      y.pow(2).sum().backward();
      optimizer.step();
    };
    step(torch::ones({3, 4}) * (group.rank() + 1));
    {
      auto quiet = ddp.no_sync();
      ddp.forward(torch::ones({1, 4})).sum().backward();
    }
    step(torch::ones({3, 4}));
    weft::join(
        ddp,
        [&] {
          for (int i = 0; i < 1 + group.rank(); ++i) step(torch::ones({1, 4}));
        },
        JoinOptions{.divide_by_initial_world_size = true, .throw_on_early_termination = false});
    for (const at::Tensor& parameter : net->parameters()) {
      std::vector<at::Tensor> all{torch::zeros_like(parameter), torch::zeros_like(parameter)};
      group.all_gather(all, parameter.detach()).wait();
      EXPECT_TRUE(all[0].equal(all[1]));
    }
    Trainer trainer(std::make_shared<NetImpl>(), group);
    trainer.ddp.register_comm_hook([&group](GradBucket& bucket) -> Future<at::Tensor> {
      EXPECT_GE(bucket.index(), 0);
      EXPECT_EQ(bucket.gradients().size(), bucket.parameters().size());
      (void)bucket.is_last();
      at::Tensor buffer = bucket.buffer();
      bucket.set_buffer(buffer);
      return group.all_reduce(buffer).future().then([buffer] { return buffer / 2; });
    });
    trainer.ddp(torch::ones({2, 4})).sum().backward();
    DistributedSampler sampler(10, group, {.shuffle = true, .seed = 0});
    sampler.set_epoch(1);
    DataPartitioner parts(100, {0.7, 0.2, 0.1}, /*seed=*/1234);
    const std::vector<std::int64_t> first = parts.use(0);
    EXPECT_EQ(first.size(), 70U);
  });
}

TEST_P(GroupContract, MeshesWorkAsSpecified) {
  run([](ProcessGroup group) {
    Mesh mesh(group, {{"replicate", 1}, {"shard", -1}});
    const auto sum = torch::full({2}, group.rank() + 1.0);
    mesh["shard"].all_reduce(sum).wait();
    EXPECT_EQ(sum[1].item<double>(), 3);
    EXPECT_EQ(mesh.size("replicate"), 1);
    EXPECT_EQ(mesh.coordinate("shard"), group.rank());
    Mesh rows = mesh.slice({"shard"});
    EXPECT_EQ(rows.group().size(), 2);
    EXPECT_EQ(mesh.flatten({"replicate", "shard"}).size(), 2);
    EXPECT_EQ(mesh.group().size(), 2);
    EXPECT_THROW(mesh["tensor"], Error);
    const std::vector<MeshAxis> axes{{"shard", 3}};
    EXPECT_THROW(Mesh(group, axes), Error);
  });
}

INSTANTIATE_TEST_SUITE_P(Cpu, GroupContract, testing::Values("gloo", "tcp", "shm"),
                         [](const auto& one) { return one.param; });

TEST(GroupContractOptions, AreAggregatesInThisOrder) {
  const ProcessGroupOptions options{.backend = "gloo",
                                    .init_method = "env://",
                                    .rank = 0,
                                    .world_size = 1,
                                    .store = c10::make_intrusive<c10d::HashStore>(),
                                    .group_name = "job",
                                    .timeout = 30min,
                                    .device = c10::Device("cpu")};
  ProcessGroup group = init_process_group(options);
  EXPECT_EQ(group.size(), 1);
  const DdpOptions ddp{.bucket_bytes = 25 << 20,
                       .first_bucket_bytes = 1 << 20,
                       .find_unused_parameters = false,
                       .gradient_as_bucket_view = true,
                       .static_graph = false,
                       .broadcast_buffers = true};
  EXPECT_FALSE(ddp.static_graph);
  for (const BackendInfo& backend : available_backends())
    EXPECT_EQ(backend.usable, backend.why_not.empty());
  group.abort("over");
  EXPECT_THROW(group.barrier().wait(), Error);
}

}  // namespace group_contract
