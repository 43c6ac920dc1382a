// SPDX-License-Identifier: Apache-2.0
// One network in two shards on two workers. A batch is cut into micro-batches, so that both workers
// have work: each stage alternates one forward and one backward ("1F1B", Narayanan et al., 2019),
// and holds the activations of only as many micro-batches as there are stages from it to the last.
// Rank 0 drives: activations go from stage to stage, and a backward pass for each micro-batch
// brings the gradients back the same way, while later micro-batches move forward. All passes belong
// to one autograd context, in which the micro-batches' gradients add up; then one optimizer steps
// both stages. In the end rank 0 trains the same network by itself and compares.
//
//   weft-run --nproc-per-node 3 pipeline
#include <condition_variable>
#include <cstdio>
#include <mutex>

#include "../common/parameters.h"
#include "../common/progress_bar.h"
#include "../common/workers.h"
#include "../digits/dataset.h"

namespace {

using torch::Tensor;
using weft::AutogradContext;
using weft::Future;
using weft::RRef;

constexpr int kStages = 2;
constexpr double kRounding = 1e-10;  // rounding of double precision over the whole training
const auto kSgd = torch::optim::SGDOptions(0.1).momentum(0.9);

// A residual block. Group normalisation does not depend on how a batch is cut.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t channels)
      : norm(register_module("norm", torch::nn::GroupNorm(4, channels))),
        convolution(register_module(
            "convolution",
            torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, channels, 3).padding(1)))) {}
  Tensor forward(Tensor x) { return x + convolution(torch::relu(norm(x))); }
  torch::nn::GroupNorm norm;
  torch::nn::Conv2d convolution;
};
TORCH_MODULE(Block);

// Makes a shard in double precision, so that a difference would be seen. Its values are the same on
// every worker.
torch::nn::Sequential make_shard(int stage) {
  torch::manual_seed(static_cast<std::uint64_t>(stage));
  torch::nn::Sequential shard;
  if (stage == 0) {
    shard->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3).padding(1)));
    shard->push_back(Block(8));
    shard->push_back(torch::nn::MaxPool2d(2));
  } else {
    shard->push_back(Block(8));
    shard->push_back(torch::nn::ReLU());
    shard->push_back(torch::nn::Flatten());
    shard->push_back(torch::nn::Linear(8 * 4 * 4, 10));
  }
  shard->to(torch::kDouble);
  return shard;
}

// The order of a stage's work in a step: as many forwards as there are stages behind it, then one
// forward and one backward in turns, then the remaining backwards. "F0 F1 B0 …".
std::vector<std::string> schedule_of(int stage, int micros) {
  const int ahead = std::min(kStages - 1 - stage, micros);
  std::vector<std::string> schedule;
  for (int i = 0; i < micros + ahead; ++i) {
    if (i < micros) schedule.push_back("F" + std::to_string(i));
    if (i >= ahead) schedule.push_back("B" + std::to_string(i - ahead));
  }
  return schedule;
}

// Enforces a schedule, step after step, whichever threads do the work.
class Turns {
 public:
  explicit Turns(std::vector<std::string> schedule) : schedule_(std::move(schedule)) {}

  // Blocks until all work before `name` in the schedule has run, then runs `work`.
  template <class Work>
  void take(const std::string& name, Work work) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::minutes(1),
                           [&] { return schedule_[next_] == name; })) {
      throw std::runtime_error(name + " waits for " + schedule_[next_] + ", which does not begin");
    }
    if (next_ == 0) done_.clear();
    done_ += name + " ";
    work();
    next_ = (next_ + 1) % schedule_.size();
    changed_.notify_all();
  }
  // The work that has begun in the last step, in order.
  std::string done() {
    std::lock_guard lock(mutex_);
    return done_;
  }

 private:
  const std::vector<std::string> schedule_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t next_ = 0;
  std::string done_;
};

// A shard of the network, on the worker that computes it.
class Stage {
 public:
  Stage(int number, int micros) : shard_(make_shard(number)), turns_(schedule_of(number, micros)) {}

  Tensor forward(int micro, RRef<Tensor> input) {
    const Tensor x = input.to_here();
    Tensor y;
    turns_.take("F" + std::to_string(micro), [&] { y = shard_->forward(x); });
    // Its backward begins when its gradient arrives; the next forward may run at the same time.
    y.register_hook(
        [this, micro](const Tensor&) { turns_.take("B" + std::to_string(micro), [] {}); });
    return y;
  }
  // Runs on the last stage.
  Tensor loss(int micro, RRef<Tensor> input, Tensor labels) {
    return torch::cross_entropy_loss(forward(micro, input), labels);
  }

  std::vector<Tensor> parameters() const { return shard_->parameters(); }
  std::string done() { return turns_.done(); }

 private:
  torch::nn::Sequential shard_;
  Turns turns_;
};

// Leaves the gradients of the batch's mean loss in the calling thread's context; returns that loss.
double run_batch(const weft::rpc::Agent& agent, const std::vector<RRef<Stage>>& stages,
                 const std::vector<Tensor>& images, const std::vector<Tensor>& labels) {
  const std::size_t micros = images.size();
  std::vector<Future<Tensor>> losses;
  std::vector<Future<void>> passes;
  for (std::size_t i = 0; i < micros; ++i) {
    // Keeps at most as many micro-batches open as there are stages.
    if (i >= kStages) passes[i - kStages].get();
    const int micro = static_cast<int>(i);
    RRef<Tensor> x(agent, images[i]);
    for (std::size_t stage = 0; stage + 1 < kStages; ++stage)
      x = stages[stage].remote<&Stage::forward>(micro, x);
    losses.push_back(stages.back().async<&Stage::loss>(micro, x, labels[i]));
    // Uses Exact, so that the pass waits only for the gradients of this micro-batch, whatever
    // gradients others have sent in the context.
    passes.push_back(losses.back().then([micros](Tensor loss) {
      return AutogradContext::current().backward_async({loss / static_cast<double>(micros)},
                                                       {.mode = weft::BackwardMode::Exact});
    }));
  }
  weft::when_all(passes).get();
  double loss = 0;
  for (const auto& one : losses) loss += one.get().item<double>() / static_cast<double>(micros);
  return loss;
}

// Trains the same network in one process, batch by batch.
std::vector<Tensor> train_alone(const digits::Images& images, int epochs, std::int64_t batch) {
  std::vector<torch::nn::Sequential> shards;
  std::vector<Tensor> parameters;
  for (int stage = 0; stage < kStages; ++stage) {
    shards.push_back(make_shard(stage));
    for (const Tensor& parameter : shards.back()->parameters()) parameters.push_back(parameter);
  }
  torch::optim::SGD optimizer(parameters, kSgd);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (std::int64_t from = 0; from + batch <= images.count(); from += batch) {
      Tensor x = images.pixels.narrow(0, from, batch).to(torch::kDouble);
      for (auto& shard : shards) x = shard->forward(x);
      optimizer.zero_grad();
      torch::cross_entropy_loss(x, images.labels.narrow(0, from, batch)).backward();
      optimizer.step();
    }
  }
  return parameters;
}

struct Options {
  std::string data = DIGITS_DATA;
  int epochs = 3;
  std::int64_t batch = 64;
  int micros = 4;
};

void compare(const std::vector<RRef<Tensor>>& parameters, const std::vector<Tensor>& alone) {
  double difference = 0;
  bool is_equal = true;
  for (std::size_t i = 0; i < alone.size(); ++i) {
    const double one = (parameters.at(i).to_here() - alone[i]).abs().max().item<double>();
    difference = std::max(difference, one);
    is_equal = is_equal && one < kRounding;  // false for NaN
  }
  std::printf("largest difference from one process: %.1e\n", difference);
  if (!is_equal)
    throw std::runtime_error("the parameters differ from those that one process ends with");
}

void drive(const weft::rpc::Agent& agent, const Options& options) {
  const auto images = digits::load_digits(options.data).train;
  if (options.batch > images.count()) {
    throw std::runtime_error("--batch-size is " + std::to_string(options.batch) +
                             ", and there are " + std::to_string(images.count()) +
                             " training images");
  }
  std::vector<RRef<Stage>> stages;
  std::vector<RRef<Tensor>> parameters;
  for (int stage = 0; stage < kStages; ++stage) {
    stages.push_back(agent.remote<Stage>(stage + 1, stage, options.micros));
    for (const auto& parameter : stages.back().sync<&examples::parameters_of<Stage>>())
      parameters.push_back(parameter);
  }
  const weft::DistributedOptimizer<torch::optim::SGD> optimizer(parameters, kSgd);

  const std::int64_t batches = images.count() / options.batch;
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    examples::ProgressBar bar("epoch " + std::to_string(epoch + 1),
                              static_cast<std::size_t>(batches), true);
    double loss = 0;
    for (std::int64_t batch = 0; batch < batches; ++batch) {
      weft::begin_step();
      const auto x =
          images.pixels.narrow(0, batch * options.batch, options.batch).to(torch::kDouble);
      const auto y = images.labels.narrow(0, batch * options.batch, options.batch);
      AutogradContext context(agent);
      const double batch_loss =
          run_batch(agent, stages, x.chunk(options.micros), y.chunk(options.micros));
      optimizer.step(context);
      loss += batch_loss / static_cast<double>(batches);
      bar.step("loss " + std::to_string(batch_loss));
    }
    bar.clear();
    std::printf("epoch %d/%d  loss %.4f\n", epoch + 1, options.epochs, loss);
    std::fflush(stdout);
  }
  for (int stage = 0; stage < kStages; ++stage) {
    const std::string order = stages[static_cast<std::size_t>(stage)].sync<&Stage::done>();
    std::printf("stage %d, in the last step: %s\n", stage, order.c_str());
  }
  compare(parameters, train_alone(images, options.epochs, options.batch));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  examples::Workers workers(
      "pipeline", "Trains a network in two shards on two workers, with micro-batches in 1F1B order",
      {.least = 3, .most = 3});
  workers.options.add("--epochs", options.epochs, "Passes over the images",
                      examples::count_from(1));
  workers.options.add("--batch-size", options.batch, "Images of a step", examples::count_from(1));
  workers.options.add("--micro-batches", options.micros, "Parts of a batch",
                      examples::count_from(1));
  workers.options.add("--data", options.data, "The digits, a CSV file, plain or gzipped",
                      examples::existing_file());
  workers.options.require([&]() -> std::string {
    if (options.batch % options.micros == 0) return "";
    return "--batch-size is " + std::to_string(options.batch) +
           "; it must be a multiple of --micro-batches, " + std::to_string(options.micros);
  });
  return workers.run(
      argc, argv,
      [](int rank) { return rank == 0 ? "driver" : "stage" + std::to_string(rank - 1); },
      [&](weft::rpc::Agent& agent) {
        if (agent.self().rank == 0) drive(agent, options);
      });
}
