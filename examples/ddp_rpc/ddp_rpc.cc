// SPDX-License-Identifier: Apache-2.0
// Data parallelism and remote calls in one program: a parameter server holds a large embedding, two
// trainers each hold a dense layer, which DistributedDataParallel keeps equal, and a master tells
// them all what to do. The embedding's gradients are sent back to the server, and the dense layer's
// are averaged between the trainers; one optimizer steps both.
//
//   weft-run --nproc-per-node 4 ddp_rpc
#include <cstdio>

#include "../common/parameters.h"
#include "../common/progress_bar.h"
#include "../common/workers.h"

namespace {

using torch::Tensor;
using weft::Future;
using weft::RRef;

constexpr int kTrainers = 2;  // ranks 0 and 1; the master is rank 2, the server rank 3
constexpr std::int64_t kWords = 100;
constexpr std::int64_t kWidth = 16;
constexpr std::int64_t kClasses = 8;

// The sum of the embeddings of each bag of words.
struct BagImpl : torch::nn::Module {
  BagImpl()
      : bag(register_module(
            "bag", torch::nn::EmbeddingBag(
                       torch::nn::EmbeddingBagOptions(kWords, kWidth).mode(torch::kSum)))) {}
  Tensor forward(Tensor words, Tensor offsets) { return bag(words, offsets); }
  torch::nn::EmbeddingBag bag;
};

struct Batch {
  // The words of all bags, one bag after the other, and where each bag begins.
  Tensor words, offsets;
  Tensor classes;
};

// Each trainer has batches of its own. All words of a bag belong to its class.
std::vector<Batch> batches_of(int trainer) {
  torch::manual_seed(static_cast<std::uint64_t>(trainer));
  std::vector<Batch> batches;
  for (int i = 0; i < 10; ++i) {
    constexpr std::int64_t kBags = 32;
    constexpr std::int64_t kWordsOfBag = 4;
    const Tensor classes = torch::randint(kClasses, {kBags}, torch::kLong);
    const Tensor words =
        classes.unsqueeze(1) +
        kClasses * torch::randint(kWords / kClasses, {kBags, kWordsOfBag}, torch::kLong);
    batches.push_back({words.flatten(), torch::arange(kBags) * kWordsOfBag, classes});
  }
  return batches;
}

struct Report {
  double first = 0, last = 0;      // mean loss of the first and the last epoch
  std::vector<Tensor> parameters;  // of the dense layer
  WEFT_FIELDS(first, last, parameters)
};

// The group of trainers: the only state of a trainer that calls do not pass to it.
weft::ProcessGroup& trainers() {
  static weft::ProcessGroup group;
  return group;
}

Report train(RRef<BagImpl> bag, int epochs) {
  weft::rpc::Agent& agent = weft::rpc::this_agent();
  const int trainer = agent.self().rank;
  const auto batches = batches_of(trainer);
  torch::nn::Linear dense(kWidth, kClasses);
  weft::DistributedDataParallel ddp(dense, trainers());
  auto parameters = bag.sync<&examples::parameters_of<BagImpl>>();
  for (const Tensor& parameter : dense->parameters())
    parameters.push_back(RRef<Tensor>(agent, parameter));
  weft::DistributedOptimizer<torch::optim::SGD> optimizer(parameters,
                                                          torch::optim::SGDOptions(0.1));

  examples::ProgressBar bar("trainer0", static_cast<std::size_t>(epochs), trainer == 0,
                            examples::Elsewhere::Lines);
  Report report;
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    double loss_sum = 0;
    for (const Batch& batch : batches) {
      weft::AutogradContext context(agent);
      const Tensor sums = bag.sync<&BagImpl::forward>(batch.words, batch.offsets);
      const Tensor loss = torch::cross_entropy_loss(ddp(sums), batch.classes);
      context.backward({loss});
      optimizer.step(context);
      loss_sum += loss.item<double>();
    }
    const double mean = loss_sum / static_cast<double>(batches.size());
    (epoch == 1 ? report.first : report.last) = mean;
    bar.step("loss " + std::to_string(mean));
  }
  for (const Tensor& parameter : dense->parameters())
    report.parameters.push_back(parameter.detach());
  return report;
}

void drive(const weft::rpc::Agent& agent, int epochs) {
  const auto bag = agent.remote<BagImpl>("server");
  std::vector<Future<Report>> runs;
  for (int trainer = 0; trainer < kTrainers; ++trainer) {
    runs.push_back(
        agent.async<&train>(weft::rpc::to(trainer).timeout(examples::kNoLimit), bag, epochs));
  }
  std::vector<Report> reports;
  for (const auto& run : runs) reports.push_back(run.get());
  bool equal = true;
  for (std::size_t i = 0; i < reports[0].parameters.size(); ++i) {
    equal = equal && torch::equal(reports[0].parameters[i], reports[1].parameters[i]);
  }
  for (int trainer = 0; trainer < kTrainers; ++trainer) {
    const Report& report = reports[static_cast<std::size_t>(trainer)];
    std::printf("trainer%d: loss %.4f in the first epoch, %.4f in the last\n", trainer,
                report.first, report.last);
  }
  std::printf("the trainers' dense layers are %s\n", equal ? "equal" : "DIFFERENT");
  if (!equal)
    throw std::runtime_error(
        "the trainers' dense layers differ, which DistributedDataParallel must keep equal");
}

std::string name_of(int rank) {
  return rank < kTrainers    ? "trainer" + std::to_string(rank)
         : rank == kTrainers ? "master"
                             : "server";
}

}  // namespace

int main(int argc, char** argv) {
  int epochs = 30;
  std::string backend = "gloo";
  examples::Workers workers(
      "ddp_rpc", "Two trainers with DistributedDataParallel, an embedding on a server, a master",
      {.least = 4, .most = 4});
  workers.options.add("--epochs", epochs, "Passes over the batches, at least 2",
                      examples::count_from(2));
  workers.options.add("--backend", backend, "Backend of the trainers' collectives: gloo, shm, tcp",
                      examples::backend());
  return workers.run(argc, argv, name_of, [&](weft::rpc::Agent& agent) {
    // All ranks make the trainers' group; only the trainers are members.
    auto all = weft::init_process_group({.backend = backend, .group_name = "ddp_rpc"});
    trainers() = all.new_group({0, 1});
    all.barrier().wait();
    if (agent.self().rank == kTrainers) drive(agent, epochs);
    agent.shutdown();
    trainers() = {};
  });
}
