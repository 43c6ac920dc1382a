// One network in two shards on two workers. A batch is cut into micro-batches, so that both workers have something to do:
// each stage alternates one forward and one backward ("1F1B", Narayanan et al., 2019), and holds the activations of as many
// micro-batches as there are stages ahead, not of all. Rank 0 drives: it says what is to be done in which order; the
// tensors go from stage to stage. It then trains the same network by itself and compares.
//
//   weft-run --nproc-per-node 3 pipeline
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>

#include "../common/progress_bar.h"
#include "../common/workers.h"
#include "../digits/dataset.h"

namespace {

using torch::Tensor;
using weft::Future;
using weft::RRef;

constexpr int kStages = 2;
constexpr double kLearningRate = 0.1;

// A residual block. Group normalisation does not care how a batch is cut.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t channels)
      : norm(register_module("norm", torch::nn::GroupNorm(4, channels))),
        convolution(register_module("convolution",
                                    torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, channels, 3).padding(1)))) {}
  Tensor forward(Tensor x) { return x + convolution(torch::relu(norm(x))); }
  torch::nn::GroupNorm norm;
  torch::nn::Conv2d convolution;
};
TORCH_MODULE(Block);

// In double precision, so that a difference would be seen. The same values wherever it is made.
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

torch::optim::SGD optimizer_of(const torch::nn::Sequential& shard) {
  return torch::optim::SGD(shard->parameters(), torch::optim::SGDOptions(kLearningRate).momentum(0.9));
}

// A shard of the network, on the worker that computes it.
class Stage {
 public:
  explicit Stage(int number) : shard_(make_shard(number)), optimizer_(optimizer_of(shard_)) {}

  Tensor forward(int micro, RRef<Tensor> input) {
    const Tensor output = compute(micro, input.to_here());
    std::lock_guard lock(mutex_);
    held_[micro].output = output;
    return output.detach();
  }
  // The last stage's: its output is the micro-batch's part of the batch's mean loss.
  Tensor loss(int micro, RRef<Tensor> input, Tensor labels, int micros) {
    const Tensor loss = torch::cross_entropy_loss(compute(micro, input.to_here()), labels) / micros;
    std::lock_guard lock(mutex_);
    held_[micro].output = loss;
    return loss.detach();
  }
  // Adds to the parameters' gradients; gives the input's. The last stage starts from its loss, without a gradient.
  Tensor backward(int micro, RRef<Tensor> gradient) {
    Held held;
    {
      std::lock_guard lock(mutex_);
      held = std::move(held_.extract(micro).mapped());
      order_ += "B" + std::to_string(micro) + " ";
    }
    held.output.backward(gradient ? gradient.to_here() : Tensor());
    return held.input.grad();
  }
  void step() {
    optimizer_.step();
    optimizer_.zero_grad();
  }

  std::vector<Tensor> parameters() { return shard_->parameters(); }
  // What it did since it was asked last: "F0 F1 B0 …".
  std::string order() {
    std::lock_guard lock(mutex_);
    return std::exchange(order_, {});
  }

 private:
  struct Held {
    Tensor input, output;
  };

  Tensor compute(int micro, Tensor input) {
    input = input.detach().requires_grad_();
    {
      std::lock_guard lock(mutex_);
      held_[micro].input = input;
      order_ += "F" + std::to_string(micro) + " ";
    }
    return shard_->forward(input);
  }

  std::mutex mutex_;  // calls run on any thread
  torch::nn::Sequential shard_;
  torch::optim::SGD optimizer_;
  std::map<int, Held> held_;  // by micro-batch, from its forward to its backward
  std::string order_;
};

struct Work {
  bool is_forward;
  int micro;
};

// What a stage does: as many forwards as there are stages behind it, then one forward and one backward in turns, then the
// backwards that are left.
std::vector<Work> schedule_of(int stage, int micros) {
  const int ahead = std::min(kStages - 1 - stage, micros);
  std::vector<Work> schedule;
  for (int micro = 0; micro < ahead; ++micro) schedule.push_back({true, micro});
  for (int micro = ahead; micro < micros; ++micro) {
    schedule.push_back({true, micro});
    schedule.push_back({false, micro - ahead});
  }
  for (int micro = micros - ahead; micro < micros; ++micro) schedule.push_back({false, micro});
  return schedule;
}

// One pass of a batch through all stages. A stage's next piece of work is called when its last one is done and the input it
// needs has been made; nothing here waits before the end.
class Pass : public std::enable_shared_from_this<Pass> {
 public:
  Pass(weft::rpc::Agent agent, std::vector<RRef<Stage>> stages, std::vector<Tensor> images, std::vector<Tensor> labels)
      : agent_(std::move(agent)), stages_(std::move(stages)), images_(std::move(images)), labels_(std::move(labels)) {}

  // The mean loss of the batch.
  double run() {
    std::vector<std::vector<Work>> left;
    for (int stage = 0; stage < kStages; ++stage) left.push_back(schedule_of(stage, micros_));
    std::vector<std::size_t> next(kStages);
    std::vector<Future<void>> last(kStages, done());
    for (bool moved = true; moved;) {
      moved = false;
      for (int stage = 0; stage < kStages; ++stage) {
        const auto s = static_cast<std::size_t>(stage);
        if (next[s] == left[s].size()) continue;
        const Work work = left[s][next[s]];
        const auto input = input_of(stage, work);
        if (!input) continue;  // planned in a later round
        last[s] = weft::when_all({last[s], *input}).then([self = shared_from_this(), stage, work] {
          return self->start(stage, work);
        });
        ends_.insert_or_assign(key(stage, work), last[s]);
        ++next[s];
        moved = true;
      }
    }
    weft::when_all(last).get();
    double loss = 0;
    for (int micro = 0; micro < micros_; ++micro) loss += results_.at({kStages - 1, true, micro}).to_here().item<double>();
    return loss;
  }

 private:
  using Key = std::tuple<int, bool, int>;  // stage, forward or backward, micro-batch
  static Key key(int stage, const Work& work) { return {stage, work.is_forward, work.micro}; }
  static Future<void> done() {
    weft::Promise<void> promise;
    promise.set();
    return promise.future();
  }

  // Whose result it takes: the forward of the stage before; the backward of the stage behind, or the last stage's own loss.
  std::optional<Key> source_of(int stage, const Work& work) const {
    if (work.is_forward) return stage == 0 ? std::nullopt : std::optional<Key>({stage - 1, true, work.micro});
    return stage == kStages - 1 ? Key{stage, true, work.micro} : Key{stage + 1, false, work.micro};
  }
  std::optional<Future<void>> input_of(int stage, const Work& work) const {
    const auto source = source_of(stage, work);
    if (!source) return done();
    const auto found = ends_.find(*source);
    return found == ends_.end() ? std::nullopt : std::optional(found->second);
  }

  Future<void> start(int stage, const Work& work) {
    const RRef<Stage>& there = stages_[static_cast<std::size_t>(stage)];
    const auto m = static_cast<std::size_t>(work.micro);
    RRef<Tensor> result;
    if (!work.is_forward) {
      const RRef<Tensor> gradient = stage == kStages - 1 ? RRef<Tensor>() : result_of({stage + 1, false, work.micro});
      result = there.remote<&Stage::backward>(work.micro, gradient);
    } else {
      const RRef<Tensor> input = stage == 0 ? RRef<Tensor>(agent_, images_[m]) : result_of({stage - 1, true, work.micro});
      result = stage == kStages - 1 ? there.remote<&Stage::loss>(work.micro, input, labels_[m], micros_)
                                    : there.remote<&Stage::forward>(work.micro, input);
    }
    std::lock_guard lock(mutex_);
    results_.insert_or_assign(key(stage, work), result);
    return result.created();
  }
  RRef<Tensor> result_of(const Key& key) {
    std::lock_guard lock(mutex_);
    return results_.at(key);
  }

  const weft::rpc::Agent agent_;
  const std::vector<RRef<Stage>> stages_;
  const std::vector<Tensor> images_, labels_;  // by micro-batch
  const int micros_ = static_cast<int>(images_.size());
  std::map<Key, Future<void>> ends_;  // of what has been planned
  std::mutex mutex_;
  std::map<Key, RRef<Tensor>> results_;  // of what has been started; they lie where they were made
};

// The same training in one process, batch by batch.
std::vector<Tensor> train_alone(const digits::Images& images, int epochs, std::int64_t batch) {
  std::vector<torch::nn::Sequential> shards;
  std::vector<torch::optim::SGD> optimizers;
  for (int stage = 0; stage < kStages; ++stage) {
    shards.push_back(make_shard(stage));
    optimizers.push_back(optimizer_of(shards.back()));
  }
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (std::int64_t from = 0; from + batch <= images.count(); from += batch) {
      Tensor x = images.pixels.narrow(0, from, batch).to(torch::kDouble);
      for (auto& shard : shards) x = shard->forward(x);
      torch::cross_entropy_loss(x, images.labels.narrow(0, from, batch)).backward();
      for (auto& optimizer : optimizers) {
        optimizer.step();
        optimizer.zero_grad();
      }
    }
  }
  std::vector<Tensor> parameters;
  for (auto& shard : shards) {
    for (const Tensor& parameter : shard->parameters()) parameters.push_back(parameter);
  }
  return parameters;
}

struct Options {
  std::string data = DIGITS_DATA;
  int epochs = 3;
  std::int64_t batch = 64;
  int micros = 4;
};

void drive(const weft::rpc::Agent& agent, const Options& options) {
  const auto images = digits::load_digits(options.data).train;
  if (options.batch > images.count()) {
    throw std::runtime_error("--batch-size is " + std::to_string(options.batch) + ", and there are " +
                             std::to_string(images.count()) + " training images");
  }
  std::vector<RRef<Stage>> stages;
  for (int stage = 0; stage < kStages; ++stage) stages.push_back(agent.remote<Stage>(stage + 1, stage));

  const std::int64_t batches = images.count() / options.batch;
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    examples::ProgressBar bar("epoch " + std::to_string(epoch + 1), static_cast<std::size_t>(batches), true);
    double loss = 0;
    for (std::int64_t batch = 0; batch < batches; ++batch) {
      weft::begin_step();
      const auto x = images.pixels.narrow(0, batch * options.batch, options.batch).to(torch::kDouble);
      const auto y = images.labels.narrow(0, batch * options.batch, options.batch);
      const double batch_loss =
          std::make_shared<Pass>(agent, stages, x.chunk(options.micros), y.chunk(options.micros))->run();
      loss += batch_loss / static_cast<double>(batches);
      std::vector<Future<void>> steps;
      for (const auto& stage : stages) steps.push_back(stage.async<&Stage::step>());
      weft::when_all(steps).get();
      for (int stage = 0; stage < kStages; ++stage) {
        const auto order = stages[static_cast<std::size_t>(stage)].sync<&Stage::order>();
        if (epoch == 0 && batch == 0) std::printf("stage %d: %s\n", stage, order.c_str());
      }
      bar.step("loss " + std::to_string(batch_loss));
    }
    bar.clear();
    std::printf("epoch %d/%d  loss %.4f\n", epoch + 1, options.epochs, loss);
    std::fflush(stdout);
  }

  const auto alone = train_alone(images, options.epochs, options.batch);
  double difference = 0;
  std::size_t next = 0;
  for (const auto& stage : stages) {
    for (const Tensor& parameter : stage.sync<&Stage::parameters>()) {
      difference = std::max(difference, (parameter - alone.at(next++)).abs().max().item<double>());
    }
  }
  std::printf("largest difference from one process: %.1e\n", difference);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  examples::Workers workers("pipeline", "Trains a network in two shards on two workers, with micro-batches in 1F1B order",
                            {.least = 3, .most = 3});
  workers.options.add_option("--epochs", options.epochs, "Passes over the images")
      ->capture_default_str()
      ->check(examples::count_from(1));
  workers.options.add_option("--batch-size", options.batch, "Images of a step")
      ->capture_default_str()
      ->check(examples::count_from(1));
  workers.options.add_option("--micro-batches", options.micros, "Parts of a batch")
      ->capture_default_str()
      ->check(examples::count_from(1));
  workers.options.add_option("--data", options.data, "The digits, a CSV file, plain or gzipped");
  workers.options.callback([&] {
    if (options.batch % options.micros != 0) {
      throw CLI::ValidationError("--batch-size is " + std::to_string(options.batch) +
                                 "; it must be a multiple of --micro-batches, " + std::to_string(options.micros));
    }
  });
  return workers.run(
      argc, argv, [](int rank) { return rank == 0 ? "driver" : "stage" + std::to_string(rank - 1); },
      [&](weft::rpc::Agent& agent) {
        if (agent.self().rank == 0) drive(agent, options);
      });
}
