// A parameter server: it holds the model; trainers pull the parameters, compute gradients on their own data, and push
// them. The server averages what all trainers send for a step and answers them together, with the new parameters.
//
//   weft-run --nproc-per-node 3 parameter_server
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include <torch/torch.h>

#include <weft/weft.h>

namespace {

using weft::Future;
using weft::Promise;
using Tensors = std::vector<at::Tensor>;

constexpr int kSteps = 60;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    hidden = register_module("hidden", torch::nn::Linear(2, 32));
    output = register_module("output", torch::nn::Linear(32, 1));
  }
  at::Tensor forward(at::Tensor x) { return output(torch::tanh(hidden(x))); }
  torch::nn::Linear hidden{nullptr}, output{nullptr};
};
TORCH_MODULE(Net);

Tensors values_of(const Net& net) {
  Tensors values;
  for (const auto& parameter : net->parameters()) values.push_back(parameter.detach().clone());
  return values;
}

class Server {
 public:
  explicit Server(int trainers) : trainers_(trainers), optimizer_(net_->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)) {}

  Tensors pull() {
    std::lock_guard lock(mutex_);
    return values_of(net_);
  }

  // Answers when every trainer has sent its gradients of this step.
  Future<Tensors> push(Tensors gradients) {
    std::vector<Promise<Tensors>> all;
    Promise<Tensors> promise;
    auto future = promise.future();
    Tensors updated;
    {
      std::lock_guard lock(mutex_);
      auto parameters = net_->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        auto& gradient = parameters[i].mutable_grad();
        gradient = gradient.defined() && !waiting_.empty() ? gradient + gradients.at(i) / trainers_ : gradients.at(i) / trainers_;
      }
      waiting_.push_back(promise);
      if (static_cast<int>(waiting_.size()) < trainers_) return future;
      optimizer_.step();
      updated = values_of(net_);
      all.swap(waiting_);
    }
    for (const auto& one : all) one.set(updated);
    return future;
  }

 private:
  const int trainers_;
  std::mutex mutex_;
  Net net_;
  torch::optim::SGD optimizer_;
  std::vector<Promise<Tensors>> waiting_;
};

// Trains on data of this worker's own; returns the first and the last loss.
std::pair<double, double> train(weft::RRef<Server> server) {
  torch::manual_seed(weft::rpc::this_agent().self().rank);
  const auto x = torch::rand({128, 2}) * 2 - 1;
  const auto y = (x.select(1, 0) * x.select(1, 1)).unsqueeze(1);
  Net net;
  const auto take = [&](const Tensors& values) {
    torch::NoGradGuard no_grad;
    auto parameters = net->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(values.at(i));
  };
  take(server.sync<&Server::pull>());
  std::pair<double, double> losses;
  for (int step = 0; step < kSteps; ++step) {
    net->zero_grad();
    const auto loss = torch::mse_loss(net(x), y);
    loss.backward();
    Tensors gradients;
    for (const auto& parameter : net->parameters()) gradients.push_back(parameter.grad());
    take(server.sync<&Server::push>(gradients));
    (step == 0 ? losses.first : losses.second) = loss.item<double>();
  }
  return losses;
}

}  // namespace

int main() {
  try {
    torch::set_num_threads(1);
    torch::manual_seed(7);
    const std::string rank = std::getenv("RANK") ? std::getenv("RANK") : "0";
    auto agent = weft::rpc::init(rank == "0" ? "server" : "trainer" + rank);
    if (agent.self().rank == 0) {
      const int trainers = static_cast<int>(agent.workers().size()) - 1;
      if (trainers < 1) throw std::runtime_error("it takes a server and trainers: weft-run --nproc-per-node 3 parameter_server");
      const auto server = agent.remote<Server>(agent.self(), trainers);
      std::vector<Future<std::pair<double, double>>> runs;
      for (int trainer = 1; trainer <= trainers; ++trainer) runs.push_back(agent.async<&train>(trainer, server));
      for (int trainer = 1; trainer <= trainers; ++trainer) {
        const auto [first, last] = runs[static_cast<std::size_t>(trainer - 1)].get();
        std::printf("trainer%d: loss %.4f at the first step, %.4f at the last\n", trainer, first, last);
      }
    }
    agent.shutdown();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "parameter_server: %s\n", error.what());
    return 1;
  }
}
