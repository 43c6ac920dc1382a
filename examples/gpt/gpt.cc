// SPDX-License-Identifier: Apache-2.0
// Trains a small GPT to write text, one character after the other. Each copy of the model is spread
// over --shard ranks, and the ranks make as many copies as they suffice for:
//
//   weft-run --nproc-per-node 4 gpt             # one copy, a quarter of it on each rank
//   weft-run --nproc-per-node 4 gpt --shard 2   # two copies, a half of one on each rank
//
// All ranks together train on the same batches whatever the mesh, so the loss is the same up to the
// order in which floating-point numbers are added. Each rank writes its share of a checkpoint while
// training goes on; --resume continues there in the middle of an epoch, also with other ranks.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <weft/weft.h>

#include "../common/options.h"
#include "../common/progress_bar.h"
#include "model.h"
#include "text.h"

namespace {

using torch::Tensor;
using Clock = std::chrono::steady_clock;

struct Options : gpt::Shape {
  std::string backend, text = GPT_TEXT, checkpoint = "gpt";
  bool resume = false;
  std::uint64_t shard = 0;  // ranks over which one copy of the model is spread; 0: all of them
  // Examples of a step on all ranks together, and the pieces in which each rank computes them.
  std::int64_t batch_size = 32, accumulate = 1;
  int steps = 400, warmup = 20, evaluate_every = 50, save_every = 50;
  int stop_after = 0;  // 0: after all steps; otherwise the learning rate stays that of all steps
  double learning_rate = 3e-3, clip = 1;
  bool bf16 = false;
  std::int64_t sample = 200;
  std::uint64_t seed = 0;
};

class Training {
 public:
  Training(const Options& options, const weft::ProcessGroup& group)
      : options_(options),
        mesh_(group, {{"replicate", -1}, {"shard", ranks_of_a_copy(options, group)}}),
        text_(options.text, options.context),
        gpt_(make_model()),
        sharded_(gpt_, mesh_, sharding()),
        optimizer_(parameter_groups(), torch::optim::AdamWOptions(options.learning_rate)),
        sampler_(static_cast<std::size_t>(text_.train.size(0)), group,
                 {.shuffle = true, .seed = options.seed, .drop_last = true}) {
    // Now all ranks have the same shards as if the whole model had been made on each of them.
    weft::materialize(*gpt_, options.seed, {}, group.device());
    const auto pieces = group.size() * options.accumulate;
    if (options.batch_size % pieces != 0)
      throw std::runtime_error("--batch-size: " + std::to_string(options.batch_size) +
                               " examples do not divide by ranks x --accumulate, " +
                               std::to_string(pieces));
    if (text_.train.size(0) < options.batch_size)
      throw std::runtime_error("--batch-size: the text has only " +
                               std::to_string(text_.train.size(0)) + " examples");
    weft::checkpoint::check_writable(options.checkpoint, group);
    if (options.resume) resume();
  }

  void run() {
    say_what_is_trained();
    const int first = step_;
    const int end =
        options_.stop_after > 0 ? std::min(options_.stop_after, options_.steps) : options_.steps;
    examples::ProgressBar bar("training", static_cast<std::size_t>(std::max(0, end - first)),
                              leads());
    const auto start = Clock::now();
    double loss = 0;
    while (step_ < end) {
      loss = train_step();
      ++step_;
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      char note[64];
      std::snprintf(
          note, sizeof note, "loss %.4f  %.0f characters/s", loss,
          (step_ - first) * static_cast<double>(options_.batch_size * options_.context) / seconds);
      bar.step(note);
      const bool ends = step_ == end;
      if (step_ % options_.evaluate_every == 0 || ends) {
        const std::string line = evaluate(loss);
        if (leads()) bar.print(line);
      }
      if (step_ % options_.save_every == 0 || ends) save();
    }
    bar.clear();
    saving_.wait();
    if (options_.sample > 0) write_text();
  }

 private:
  bool leads() const { return mesh_.group().rank() == 0; }

  static int ranks_of_a_copy(const Options& options, const weft::ProcessGroup& group) {
    const auto ranks = static_cast<std::uint64_t>(group.size());
    const std::uint64_t shard = options.shard == 0 ? ranks : options.shard;
    if (ranks % shard != 0)
      throw std::runtime_error("--shard: " + std::to_string(ranks) + " ranks do not divide by " +
                               std::to_string(shard));
    return static_cast<int>(shard);
  }
  // Takes no memory: materialize() gives the parameters their values when they have been divided.
  gpt::Gpt make_model() const {
    const weft::OnMeta on_meta;
    return gpt::Gpt(static_cast<std::int64_t>(text_.characters.size()), options_);
  }
  weft::FullyShardOptions sharding() const {
    weft::FullyShardOptions sharding{.units = weft::units_of<gpt::Block>()};
    if (options_.bf16) {
      sharding.param_dtype = torch::kBFloat16;
      sharding.reduce_dtype = torch::kFloat;
    }
    return sharding;
  }
  // Weights decay; biases and the parameters of norms do not.
  std::vector<torch::optim::OptimizerParamGroup> parameter_groups() const {
    std::vector<Tensor> weights, others;
    for (const Tensor& one : gpt_->parameters()) (one.dim() > 1 ? weights : others).push_back(one);
    const auto decaying = [&](double decay) {
      return std::make_unique<torch::optim::AdamWOptions>(
          torch::optim::AdamWOptions(options_.learning_rate).weight_decay(decay));
    };
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(weights, decaying(0.1));
    groups.emplace_back(others, decaying(0));
    return groups;
  }
  // Rises during the first steps, then falls along a cosine to a tenth.
  double learning_rate() const {
    if (step_ < options_.warmup) return options_.learning_rate * (step_ + 1) / options_.warmup;
    const double done = static_cast<double>(step_ - options_.warmup) /
                        std::max(1, options_.steps - options_.warmup);
    return options_.learning_rate *
           (0.55 + 0.45 * std::cos(std::numbers::pi * std::min(1.0, done)));
  }

  std::vector<weft::checkpoint::Part> parts() {
    return {{"model", gpt_},
            {"optimizer", optimizer_},
            {"sampler", sampler_},
            {"epoch", epoch_},
            {"step", step_}};
  }
  // Returns when the values are copied; a thread writes them. Waits for the previous one.
  void save() {
    saving_ = weft::checkpoint::save_async(options_.checkpoint, mesh_.group(), parts());
  }
  void resume() {
    if (!weft::checkpoint::exists(options_.checkpoint, mesh_.group()))
      throw std::runtime_error("--resume: '" + options_.checkpoint +
                               "' has no checkpoint; train once without --resume");
    weft::checkpoint::load(options_.checkpoint, mesh_.group(), parts());
  }

  // This rank's next examples, int64 [examples, context + 1].
  Tensor next_examples(std::size_t count) {
    auto taken = sampler_.next(count);
    if (!taken || taken->size() < count) {
      sampler_.set_epoch(static_cast<std::size_t>(++epoch_));
      taken = sampler_.next(count);
    }
    const std::vector<std::int64_t> chosen(taken->begin(), taken->end());
    return text_.train.index_select(0, torch::tensor(chosen)).to(mesh_.group().device());
  }
  // The mean loss of each character behind the first, as a tensor without dimensions.
  Tensor loss_of(const Tensor& examples) {
    const Tensor scores = sharded_(examples.narrow(1, 0, options_.context));
    return torch::cross_entropy_loss(scores.flatten(0, 1),
                                     examples.narrow(1, 1, options_.context).flatten());
  }
  // Returns the mean loss of this rank's examples.
  double train_step() {
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(learning_rate());
    optimizer_.zero_grad();
    const auto count =
        static_cast<std::size_t>(options_.batch_size / options_.accumulate / mesh_.group().size());
    double sum = 0;
    for (std::int64_t piece = 0; piece < options_.accumulate; ++piece) {
      // Only the last piece's backward averages gradients, those of all pieces.
      const auto guard = sharded_.no_sync(piece + 1 < options_.accumulate);
      const Tensor loss = loss_of(next_examples(count)) / options_.accumulate;
      loss.backward();
      sum += loss.item<double>();
    }
    weft::clip_grad_norm_(*gpt_, options_.clip);
    optimizer_.step();
    return sum;
  }

  double mean_of_ranks(double sum, double count) {
    Tensor sums = torch::tensor({sum, count}, torch::kDouble).to(mesh_.group().device());
    mesh_.group().all_reduce(sums).synchronize();
    sums = sums.cpu();
    return sums[0].item<double>() / sums[1].item<double>();
  }
  // Returns a line about the losses. Every rank evaluates its part of at most 64 stretches; all
  // ranks run as many forwards.
  std::string evaluate(double train_loss) {
    const torch::NoGradGuard no_grad;
    const std::int64_t stretches = std::min<std::int64_t>(64, text_.test.size(0));
    const int ranks = mesh_.group().size();
    double sum = 0, count = 0;
    for (std::int64_t i = 0; i < stretches; i += ranks) {
      const std::int64_t mine = std::min(i + mesh_.group().rank(), stretches - 1);
      const Tensor chosen = torch::tensor({mine * text_.test.size(0) / stretches});
      const auto loss =
          loss_of(text_.test.index_select(0, chosen).to(mesh_.group().device())).item<double>();
      if (i + mesh_.group().rank() >= stretches) continue;  // there was none left for this rank
      sum += loss;
      count += 1;
    }
    const double test_loss = mean_of_ranks(sum, count);
    train_loss = mean_of_ranks(train_loss, 1);
    char line[96];
    std::snprintf(line, sizeof line, "step %4d/%d  loss %.5f  on unseen text %.5f", step_,
                  options_.steps, train_loss, test_loss);
    return line;
  }

  // Rank 0 writes text with the whole model, one likely character after the other.
  void write_text() {
    const weft::FullParameters whole(*gpt_);
    if (!leads()) return;
    const torch::NoGradGuard no_grad;
    torch::manual_seed(options_.seed);
    Tensor text = text_.train.narrow(0, 0, 1).narrow(1, 0, 1).to(mesh_.group().device());
    for (std::int64_t i = 0; i < options_.sample; ++i) {
      const std::int64_t seen = std::min(text.size(1), options_.context);
      const Tensor scores = gpt_(text.narrow(1, text.size(1) - seen, seen)).select(1, -1);
      text = torch::cat({text, torch::multinomial(torch::softmax(scores / 0.7, -1), 1)}, 1);
    }
    std::string written;
    const Tensor numbers = text.cpu();
    for (std::int64_t i = 0; i < numbers.size(1); ++i)
      written += text_.characters[static_cast<std::size_t>(numbers[0][i].item<std::int64_t>())];
    std::printf("--- written by the model:\n%s\n", written.c_str());
  }

  void say_what_is_trained() {
    std::int64_t mine = 0;
    for (const Tensor& shard : gpt_->parameters()) mine += shard.numel();
    Tensor all = torch::tensor({mine}).to(mesh_.group().device());
    mesh_["shard"].all_reduce(all).synchronize();
    if (!leads()) return;
    std::printf(
        "%lld parameters, %lld of them on rank 0; copies: %d; ranks of a copy: %d; %zu different "
        "characters\n",
        static_cast<long long>(all.item<std::int64_t>()), static_cast<long long>(mine),
        mesh_.size("replicate"), mesh_.size("shard"), text_.characters.size());
    if (step_ > 0)
      std::printf("resuming after step %d, in epoch %d, from %s\n", step_, epoch_,
                  options_.checkpoint.c_str());
    std::fflush(stdout);
  }

  const Options options_;
  weft::Mesh mesh_;
  gpt::Text text_;
  gpt::Gpt gpt_;
  weft::FullyShardedDataParallel<gpt::GptImpl> sharded_;
  torch::optim::AdamW optimizer_;
  weft::DistributedSampler sampler_;
  int epoch_ = 0, step_ = 0;
  weft::checkpoint::Saving saving_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  examples::Options line("gpt", "Trains a small GPT whose parameters are spread over ranks", 2);
  const auto from_1 = examples::count_from(1);
  line.add("--shard", options.shard, "Ranks over which one copy is spread (0: all)",
           examples::whole_number());
  line.add("--backend", options.backend, "Backend of the groups (see digits --help)",
           examples::backend());
  line.add("--text", options.text, "A text file", examples::existing_file());
  line.add("--layers", options.layers, "Blocks of the model", from_1);
  line.add("--heads", options.heads, "Heads of each block", from_1);
  line.add("--width", options.width, "Width of the model, a multiple of the heads", from_1);
  line.add("--context", options.context, "Characters that the model sees", from_1);
  line.add("--batch-size", options.batch_size, "Examples of a step, on all ranks together", from_1);
  line.add("--accumulate", options.accumulate, "Pieces in which a rank computes them", from_1);
  line.add("--steps", options.steps, "Steps of the optimizer, in all", from_1);
  line.add("--stop-after", options.stop_after, "Steps after which it stops earlier (0: none)",
           examples::whole_number());
  line.add("--warmup", options.warmup, "Steps in which the learning rate rises", from_1);
  line.add("--lr", options.learning_rate, "Highest learning rate of AdamW",
           examples::positive_number());
  line.add("--clip", options.clip, "Largest norm of the gradients", examples::positive_number());
  line.add("--bf16", options.bf16, "Gather and compute in bfloat16");
  line.add("--recompute", options.recompute, "Compute each block again in backward");
  line.add("--evaluate-every", options.evaluate_every, "Steps between evaluations", from_1);
  line.add("--save-every", options.save_every, "Steps between checkpoints", from_1);
  line.add("--checkpoint", options.checkpoint, "Folder of the checkpoints");
  line.add("--resume", options.resume, "Continue from the newest checkpoint");
  line.add("--sample", options.sample, "Characters written at the end", examples::whole_number());
  line.add("--seed", options.seed, "Seed of parameters and order", examples::whole_number());
  line.require([&]() -> std::string {
    if (options.width % options.heads == 0) return "";
    return "--width: " + std::to_string(options.width) + " does not divide by --heads, " +
           std::to_string(options.heads);
  });
  line.parse(argc, argv);
  try {
    Training(options, weft::init_process_group({.backend = options.backend})).run();
  } catch (const std::exception& error) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    std::fprintf(stderr, "gpt: %s\n",
                 torch_error ? torch_error->what_without_backtrace() : error.what());
    return 1;
  }
}
