// SPDX-License-Identifier: Apache-2.0
// Synchronous SGD by hand: the data set is cut into one part for each rank, every rank computes on
// its part, and after each backward all_reduce sums the gradients, which are divided by the number
// of ranks. DistributedDataParallel does the same for you.
//
//   weft-run --nproc-per-node 2 sync_sgd
#include <algorithm>
#include <cstdio>

#include <torch/torch.h>

#include <weft/weft.h>

#include "../common/options.h"
#include "../digits/dataset.h"

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl()
      : convolution(register_module(
            "convolution", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 10, 3).padding(1)))),
        hidden(register_module("hidden", torch::nn::Linear(160, 50))),
        output(register_module("output", torch::nn::Linear(50, 10))) {}
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(torch::max_pool2d(convolution(x), 2));
    x = torch::relu(hidden(x.flatten(1)));
    return torch::log_softmax(output(x), 1);
  }
  torch::nn::Conv2d convolution;
  torch::nn::Linear hidden, output;
};
TORCH_MODULE(Net);

void average_gradients(Net& net, weft::ProcessGroup& group) {
  for (auto& parameter : net->parameters()) {
    auto gradient = parameter.grad();
    group.all_reduce(gradient, weft::ReduceOp::Sum).wait();
    gradient /= group.size();
  }
}

void run(weft::ProcessGroup group, int epochs, const std::string& data) {
  torch::manual_seed(1234);
  const auto images = digits::load_digits(data).train;
  const std::vector<double> fractions(static_cast<std::size_t>(group.size()), 1.0 / group.size());
  const weft::DataPartitioner partitioner(static_cast<std::size_t>(images.count()), fractions,
                                          /*seed=*/1234);
  const auto mine = torch::tensor(partitioner.use(group.rank()));
  const std::int64_t batch_size = std::max(1, 128 / group.size());

  Net net;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.5));
  for (int epoch = 0; epoch < epochs; ++epoch) {
    double loss_sum = 0;
    const auto batches = mine.split(batch_size);
    for (const auto& batch : batches) {
      weft::begin_step();
      optimizer.zero_grad();
      const auto loss = torch::nll_loss(net(images.pixels.index_select(0, batch)),
                                        images.labels.index_select(0, batch));
      loss_sum += loss.item<double>();
      loss.backward();
      average_gradients(net, group);
      optimizer.step();
    }
    std::printf("rank %d, epoch %d: loss %.4f\n", group.rank(), epoch,
                loss_sum / static_cast<double>(batches.size()));
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  int epochs = 10;
  std::string data = DIGITS_DATA;
  examples::Options options(
      "sync_sgd", "Synchronous SGD on a partitioned data set, gradients averaged by hand", 2);
  options.add("--epochs", epochs, "Passes over the data", examples::count_from(1));
  options.add("--data", data, "The digits, a CSV file, plain or gzipped",
              examples::existing_file());
  options.parse(argc, argv);
  try {
    run(weft::init_process_group(), epochs, data);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sync_sgd: %s\n", error.what());
    return 1;
  }
}
