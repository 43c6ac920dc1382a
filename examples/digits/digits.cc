// SPDX-License-Identifier: Apache-2.0
// Trains a small convolutional network on handwritten digits, data-parallel over the ranks of a
// job:
//
//   weft-run --nproc-per-node 2 digits
//
// Every rank computes on its own part of each batch; DistributedDataParallel averages the gradients
// while the backward pass runs. At the end all ranks hold the same parameters, bit for bit.
#include <chrono>
#include <cstdio>
#include <numeric>
#include <optional>

#include <torch/torch.h>

#include <weft/weft.h>

#include "../common/options.h"
#include "../common/progress_bar.h"
#include "dataset.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string backend;
  std::string data = DIGITS_DATA;
  std::string mnist;
  int epochs = 12;
  std::int64_t batch_size = 32;
  // If not given: the checkpoint's with --resume, otherwise the constants below.
  std::optional<double> learning_rate, momentum;
  static constexpr double kLearningRate = 0.05;
  static constexpr double kMomentum = 0.9;
  std::uint64_t seed = 0;
  std::string checkpoint = "digits.pt";
  bool resume = false;
};

struct NetImpl : torch::nn::Module {
  NetImpl(std::int64_t height, std::int64_t width)
      : first(register_module("first",
                              torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3).padding(1)))),
        second(register_module("second",
                               torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).padding(1)))),
        hidden(register_module("hidden", torch::nn::Linear(32 * (height / 2) * (width / 2), 64))),
        output(register_module("output", torch::nn::Linear(64, 10))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(first(x));
    x = torch::max_pool2d(torch::relu(second(x)), 2);
    x = torch::relu(hidden(x.flatten(1)));
    return output(x);
  }

  torch::nn::Conv2d first, second;
  torch::nn::Linear hidden, output;
};
TORCH_MODULE(Net);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// FNV-1a over all parameters' bytes.
std::int64_t hash_of(const Net& net) {
  std::uint64_t hash = 14695981039346656037u;
  for (const torch::Tensor& parameter : net->parameters()) {
    const torch::Tensor host = parameter.detach().cpu().contiguous();
    const auto* bytes = static_cast<const std::uint8_t*>(host.data_ptr());
    for (std::size_t i = 0; i < host.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  }
  return static_cast<std::int64_t>(hash);
}

struct Epoch {
  double loss = 0;      // mean over all ranks' examples
  double accuracy = 0;  // on the training examples when they were used
  double step_seconds = 0;
  std::int64_t examples = 0;  // examples of all ranks
};

class Training {
 public:
  Training(const Options& options, weft::ProcessGroup group)
      : options_(options),
        group_(std::move(group)),
        dataset_(options.mnist.empty() ? digits::load_digits(options.data)
                                       : digits::load_mnist(options.mnist)),
        net_(make_net()),
        optimizer_(net_->parameters(),
                   torch::optim::SGDOptions(options.learning_rate.value_or(Options::kLearningRate))
                       .momentum(options.momentum.value_or(Options::kMomentum))),
        ddp_(net_, group_),
        sampler_(static_cast<std::size_t>(dataset_.train.count()), group_,
                 {.shuffle = true, .seed = options.seed}) {
    if (options_.resume) resume();
  }

  int run() {
    // Checks this now, and not after the first epoch.
    weft::checkpoint::check_writable(options_.checkpoint, group_);
    if (leads()) {
      std::printf(
          "%lld training and %lld test images of %lldx%lld, %d rank%s on %s (%s), batches of %lld "
          "a rank\n",
          static_cast<long long>(dataset_.train.count()),
          static_cast<long long>(dataset_.test.count()),
          static_cast<long long>(dataset_.train.pixels.size(2)),
          static_cast<long long>(dataset_.train.pixels.size(3)), group_.size(),
          group_.size() == 1 ? "" : "s", group_.device().str().c_str(),
          group_.backend(group_.device()).c_str(), static_cast<long long>(options_.batch_size));
      if (epochs_done_ > 0)
        std::printf("resuming after epoch %d from %s\n", epochs_done_, options_.checkpoint.c_str());
      std::fflush(stdout);
    }
    double step_seconds = 0;
    std::int64_t examples = 0;
    const int first = epochs_done_;
    while (epochs_done_ < options_.epochs) {
      const Epoch epoch = train_epoch();
      ++epochs_done_;
      step_seconds += epoch.step_seconds;
      examples += epoch.examples;
      if (leads()) {
        std::printf("epoch %2d/%d  loss %.4f  accuracy %.4f  %.0f samples/s\n", epochs_done_,
                    options_.epochs, epoch.loss, epoch.accuracy,
                    static_cast<double>(epoch.examples) / epoch.step_seconds);
        std::fflush(stdout);
      }
      weft::checkpoint::save(options_.checkpoint, group_, parts());
    }
    return finish(epochs_done_ > first, step_seconds, examples);
  }

 private:
  bool leads() const { return group_.rank() == 0; }

  Net make_net() {
    torch::manual_seed(options_.seed);
    Net net(dataset_.train.pixels.size(2), dataset_.train.pixels.size(3));
    net->to(group_.device());
    return net;
  }

  // The parts of a checkpoint: the network, the optimizer's state and the number of epochs done.
  std::vector<weft::checkpoint::Part> parts() {
    return {{"model", net_}, {"optimizer", optimizer_}, {"epochs", epochs_done_}};
  }

  void resume() {
    const std::string file = "--resume: '" + options_.checkpoint + "' ";
    if (!weft::checkpoint::exists(options_.checkpoint, group_)) {
      throw std::runtime_error(file + "does not exist; train once without --resume");
    }
    try {
      weft::checkpoint::load(options_.checkpoint, group_, parts());
    } catch (const weft::Error& error) {
      if (error.blame() != weft::Blame::Caller) throw;
      throw std::runtime_error(file +
                               "is not a checkpoint of this program for images of this size, or is "
                               "damaged; train once " +
                               "without --resume (" + error.text() + ")");
    }
    for (auto& parameters : optimizer_.param_groups()) {
      auto& options = static_cast<torch::optim::SGDOptions&>(parameters.options());
      if (options_.learning_rate) options.lr(*options_.learning_rate);
      if (options_.momentum) options.momentum(*options_.momentum);
    }
  }

  Epoch train_epoch() {
    sampler_.set_epoch(static_cast<std::size_t>(epochs_done_));
    net_->train();
    const std::size_t steps =
        (sampler_.size() + static_cast<std::size_t>(options_.batch_size) - 1) /
        static_cast<std::size_t>(options_.batch_size);
    examples::ProgressBar bar(
        "epoch " + std::to_string(epochs_done_ + 1) + "/" + std::to_string(options_.epochs), steps,
        leads());
    torch::Tensor sums = torch::zeros({3}, torch::kDouble);  // loss, right answers, examples
    const auto start = Clock::now();
    while (const auto batch = sampler_.next(static_cast<std::size_t>(options_.batch_size))) {
      const auto chosen = torch::tensor(std::vector<std::int64_t>(batch->begin(), batch->end()));
      const auto pixels = dataset_.train.pixels.index_select(0, chosen).to(group_.device());
      const auto labels = dataset_.train.labels.index_select(0, chosen).to(group_.device());
      optimizer_.zero_grad();
      const auto scores = ddp_(pixels);
      const auto loss = torch::nn::functional::cross_entropy(scores, labels);
      loss.backward();
      optimizer_.step();
      const auto count = static_cast<double>(batch->size());
      const double value = loss.item<double>();
      sums[0] += value * count;
      sums[1] += scores.argmax(1).eq(labels).sum().item<double>();
      sums[2] += count;
      char note[32];
      std::snprintf(note, sizeof note, "loss %.4f", value);
      bar.step(note);
    }
    const double seconds = seconds_since(start);
    all_reduce(sums);
    const double total = sums[2].item<double>();
    return {sums[0].item<double>() / total, sums[1].item<double>() / total, seconds,
            static_cast<std::int64_t>(total)};
  }

  // Each rank tests its own part of the images.
  double test_accuracy() {
    const torch::NoGradGuard no_grad;
    net_->eval();
    const auto mine = torch::arange(group_.rank(), dataset_.test.count(), group_.size());
    const auto scores =
        net_->forward(dataset_.test.pixels.index_select(0, mine).to(group_.device()));
    const auto labels = dataset_.test.labels.index_select(0, mine).to(group_.device());
    torch::Tensor right =
        torch::zeros({1}, torch::kDouble) + scores.argmax(1).eq(labels).sum().item<double>();
    all_reduce(right);
    return right.item<double>() / static_cast<double>(dataset_.test.count());
  }

  void all_reduce(torch::Tensor& host) {
    torch::Tensor there = host.to(group_.device());
    group_.all_reduce(there).synchronize();
    host = there.cpu();
  }

  int finish(bool trained, double step_seconds, std::int64_t examples) {
    const double accuracy = test_accuracy();
    const auto own = torch::full({1}, hash_of(net_), torch::kLong).to(group_.device());
    auto hashes = torch::zeros({group_.size()}, torch::kLong).to(group_.device());
    group_.all_gather_into(hashes, own).synchronize();
    hashes = hashes.cpu();
    const bool equal = hashes.eq(hashes[0]).all().item<bool>();
    if (leads()) {
      std::printf("test accuracy        %.4f\n", accuracy);
      if (trained) {
        const double wait = std::chrono::duration<double>(ddp_.stats().wait).count();
        std::printf("throughput           %.0f samples/s\n",
                    static_cast<double>(examples) / step_seconds);
        // On a GPU the stream waits, not the host: weft-timeline summary shows how long.
        if (group_.device().is_cpu()) {
          std::printf("waiting for others   %.1f %% of the step (rank 0)\n",
                      100 * wait / step_seconds);
        }
      }
      for (int rank = 0; rank < group_.size(); ++rank) {
        std::printf("parameters, rank %-3d %016llx\n", rank,
                    static_cast<unsigned long long>(hashes[rank].item<std::int64_t>()));
      }
      std::printf("checkpoint           %s (continue with --resume)\n",
                  options_.checkpoint.c_str());
      std::fflush(stdout);
    }
    if (!equal) throw std::runtime_error("the ranks' parameters differ");
    return 0;
  }

  const Options options_;
  weft::ProcessGroup group_;
  digits::Dataset dataset_;
  Net net_;
  torch::optim::SGD optimizer_;
  int epochs_done_ = 0;
  weft::DistributedDataParallel<NetImpl> ddp_;
  weft::DistributedSampler sampler_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  examples::Options command_line(
      "digits",
      "Trains a convolutional network on handwritten digits, data-parallel over the ranks of a job",
      2);
  command_line.add("--backend", options.backend,
                   "Backend: gloo, shm, tcp, nccl, or one per device as in cpu:gloo,cuda:nccl "
                   "(default: cpu:gloo,cuda:nccl, as far as this build has them)",
                   examples::backend());
  command_line.add("--epochs", options.epochs, "Passes over the training images",
                   examples::count_from(1));
  command_line.add("--batch-size", options.batch_size, "Images of a step on each rank",
                   examples::count_from(1));
  command_line.add("--lr", options.learning_rate,
                   "Learning rate (default: 0.05, or the checkpoint's)",
                   examples::positive_number());
  command_line.add("--momentum", options.momentum,
                   "Momentum of SGD (default: 0.9, or the checkpoint's)", examples::share());
  command_line.add("--seed", options.seed,
                   "Seed of the initial parameters and the order of the images",
                   examples::whole_number());
  command_line.add("--mnist", options.mnist,
                   "Folder of MNIST's four IDX files, to train on them instead",
                   examples::existing_folder());
  command_line.add("--data", options.data, "The digits, a CSV file, plain or gzipped",
                   examples::existing_file());
  command_line.add("--checkpoint", options.checkpoint, "Written after each epoch");
  command_line.add("--resume", options.resume, "Continue from the checkpoint");
  command_line.parse(argc, argv);
  try {
    return Training(options, weft::init_process_group({.backend = options.backend})).run();
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "digits: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "digits: %s\n", error.what());
    return 1;
  }
}
