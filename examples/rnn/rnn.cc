// SPDX-License-Identifier: Apache-2.0
// A recurrent network whose first and last layer are on another worker: the embedding and the
// decoder on the server, the LSTM on the trainer. It learns to predict the next character of a
// text. Backward runs through both workers, and one optimizer steps the parameters of both.
//
//   weft-run --nproc-per-node 2 rnn
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>

#include "../common/parameters.h"
#include "../common/progress_bar.h"
#include "../common/workers.h"

namespace {

using torch::Tensor;
using weft::RRef;

// --- on the server

struct TableImpl : torch::nn::Module {
  TableImpl(std::int64_t characters, std::int64_t width)
      : table(register_module("table", torch::nn::Embedding(characters, width))) {}
  // int64 [steps, lines] -> [steps, lines, width]
  Tensor forward(Tensor characters) { return table(characters); }
  torch::nn::Embedding table;
};

struct DecoderImpl : torch::nn::Module {
  DecoderImpl(std::int64_t width, std::int64_t characters)
      : linear(register_module("linear", torch::nn::Linear(width, characters))) {}
  // [steps, lines, width] -> [steps, lines, characters]
  Tensor forward(Tensor states) { return linear(states); }
  torch::nn::Linear linear;
};

// --- on the trainer

struct Options {
  std::string text = RNN_TEXT;
  int epochs = 40;
  std::int64_t width = 64;
  std::int64_t steps = 32;  // characters of a stretch
  std::int64_t lines = 8;   // stretches at once
  double learning_rate = 5e-3;
};

// The text as numbers, cut into lines that are read in parallel.
struct Text {
  std::string characters;  // the different characters of the text
  Tensor columns;          // int64 [steps, lines]

  Text(const std::string& file, std::int64_t lines) {
    std::ifstream stream(file);
    std::ostringstream content;
    content << stream.rdbuf();
    const std::string text = content.str();
    const auto steps = static_cast<std::int64_t>(text.size()) / lines;
    if (!stream || steps < 2) throw std::runtime_error(file + ": cannot be read, or is too short");
    const std::set<char> known(text.begin(), text.end());
    characters.assign(known.begin(), known.end());
    std::vector<std::int64_t> numbers;
    for (std::int64_t i = 0; i < steps * lines; ++i) {
      numbers.push_back(
          static_cast<std::int64_t>(characters.find(text[static_cast<std::size_t>(i)])));
    }
    columns = torch::tensor(numbers).view({lines, steps}).t().contiguous();
  }
};

class Model {
 public:
  Model(const weft::rpc::Agent& agent, std::int64_t characters, std::int64_t width)
      : table_(agent.remote<TableImpl>("server", characters, width)),
        lstm_(torch::nn::LSTMOptions(width, width)),
        decoder_(agent.remote<DecoderImpl>("server", width, characters)) {
    parameters_ = table_.sync<&examples::parameters_of<TableImpl>>();
    for (const auto& parameter : decoder_.sync<&examples::parameters_of<DecoderImpl>>())
      parameters_.push_back(parameter);
    for (const Tensor& parameter : lstm_->parameters())
      parameters_.push_back(RRef<Tensor>(agent, parameter));
    forget();
  }

  Tensor forward(const Tensor& characters) {
    auto [output, state] = lstm_(table_.sync<&TableImpl::forward>(characters), state_);
    // Gradients end at the beginning of the stretch.
    state_ = {std::get<0>(state).detach(), std::get<1>(state).detach()};
    return decoder_.sync<&DecoderImpl::forward>(output);
  }
  // Resets the state, for the beginning of the text.
  void forget() { state_.reset(); }
  const std::vector<RRef<Tensor>>& parameters() const { return parameters_; }

 private:
  RRef<TableImpl> table_;
  torch::nn::LSTM lstm_;
  RRef<DecoderImpl> decoder_;
  std::vector<RRef<Tensor>> parameters_;
  std::optional<std::tuple<Tensor, Tensor>> state_;
};

void train(const weft::rpc::Agent& agent, const Options& options) {
  const Text text(options.text, options.lines);
  Model model(agent, static_cast<std::int64_t>(text.characters.size()), options.width);
  weft::DistributedOptimizer<torch::optim::Adam> optimizer(
      model.parameters(), torch::optim::AdamOptions(options.learning_rate));
  std::printf("%lld characters, %zu different ones; a guess at random has a perplexity of %zu\n",
              static_cast<long long>(text.columns.numel()), text.characters.size(),
              text.characters.size());

  const std::int64_t positions = text.columns.size(0) - 1;
  examples::ProgressBar bar("epoch", static_cast<std::size_t>(options.epochs), true,
                            examples::Elsewhere::Lines);
  double perplexity = 0;
  for (int epoch = 1; epoch <= options.epochs; ++epoch) {
    model.forget();
    double loss_sum = 0;
    for (std::int64_t from = 0; from < positions; from += options.steps) {
      weft::begin_step();
      const std::int64_t steps = std::min(options.steps, positions - from);
      weft::AutogradContext context(agent);
      const Tensor scores = model.forward(text.columns.narrow(0, from, steps));
      const Tensor loss = torch::cross_entropy_loss(
          scores.flatten(0, 1), text.columns.narrow(0, from + 1, steps).flatten());
      context.backward({loss});
      optimizer.step(context);
      loss_sum += loss.item<double>() * static_cast<double>(steps);
    }
    perplexity = std::exp(loss_sum / static_cast<double>(positions));
    bar.step("perplexity " + std::to_string(perplexity));
  }
  bar.clear();
  std::printf("a perplexity of %.2f after %d epochs, on the text that it learnt from\n", perplexity,
              options.epochs);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  examples::Workers workers(
      "rnn",
      "Learns the next character of a text; embedding and decoder on a server, the LSTM here",
      {.least = 2, .most = 2});
  workers.options.add("--text", options.text, "A text file", examples::existing_file());
  workers.options.add("--epochs", options.epochs, "Passes over the text", examples::count_from(1));
  workers.options.add("--width", options.width, "Width of the embedding and the LSTM",
                      examples::count_from(1));
  workers.options.add("--lr", options.learning_rate, "Learning rate of Adam",
                      examples::positive_number());
  return workers.run(
      argc, argv, [](int rank) { return rank == 0 ? "trainer" : "server"; },
      [&](weft::rpc::Agent& agent) {
        if (agent.self().rank == 0) train(agent, options);
      });
}
