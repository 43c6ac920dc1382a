// SPDX-License-Identifier: Apache-2.0
// A server that gathers requests and answers a whole batch at once. Several workers ask it to
// multiply vectors by its large matrix: answered one by one, each request reads the whole matrix;
// in a batch, all requests share one read.
//
//   weft-run --nproc-per-node 3 batch_rpc
#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>

#include "../common/workers.h"

namespace {

using weft::Future;
using weft::Promise;

constexpr int kWidth = 2048;
constexpr int kRequests = 64;  // requests of each worker
constexpr int kAtOnce = 16;    // open requests of each worker

class Server {
 public:
  explicit Server(int batch)
      : batch_(static_cast<std::size_t>(batch)), matrix_(torch::ones({kWidth, kWidth}) / kWidth) {}

  at::Tensor multiply(at::Tensor vector) {
    ++reads_;
    return torch::mv(matrix_, vector);
  }

  // Answers when enough requests have arrived.
  Future<at::Tensor> multiply_batched(at::Tensor vector) {
    std::vector<Request> full;
    Promise<at::Tensor> promise;
    auto future = promise.future();
    {
      std::lock_guard lock(mutex_);
      waiting_.push_back({vector, promise});
      if (waiting_.size() == batch_) full.swap(waiting_);
    }
    if (full.empty()) return future;
    std::vector<at::Tensor> columns;
    for (const auto& request : full) columns.push_back(request.vector);
    ++reads_;
    const auto products = torch::mm(matrix_, torch::stack(columns, 1));
    for (std::size_t i = 0; i < full.size(); ++i)
      full[i].promise.set(products.select(1, static_cast<std::int64_t>(i)));
    return future;
  }

  // How often the matrix has been read since the last call of reads().
  int reads() { return reads_.exchange(0); }

 private:
  struct Request {
    at::Tensor vector;
    Promise<at::Tensor> promise;
  };
  const std::size_t batch_;
  const at::Tensor matrix_;
  std::atomic<int> reads_{0};
  std::mutex mutex_;
  std::vector<Request> waiting_;
};

// Sends all requests, kAtOnce at a time; returns their rate.
template <auto Method>
double ask(const weft::RRef<Server>& server) {
  const auto vector = torch::ones({kWidth});
  const auto start = std::chrono::steady_clock::now();
  for (int sent = 0; sent < kRequests; sent += kAtOnce) {
    std::vector<Future<at::Tensor>> answers;
    for (int i = 0; i < kAtOnce; ++i) answers.push_back(server.async<Method>(vector));
    for (auto& answer : answers) {
      if (!torch::allclose(answer.get(), vector)) throw std::runtime_error("a wrong product");
    }
  }
  return kRequests /
         std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double ask_one_by_one(weft::RRef<Server> server) { return ask<&Server::multiply>(server); }
double ask_in_batches(weft::RRef<Server> server) { return ask<&Server::multiply_batched>(server); }

void drive(weft::rpc::Agent& agent) {
  const int clients = static_cast<int>(agent.workers().size()) - 1;
  const weft::RRef<Server> server = agent.remote<Server>(0, clients * kAtOnce);
  const auto rate_of = [&](const char* how, auto run) {
    std::vector<Future<double>> rates;
    for (int client = 1; client <= clients; ++client) rates.push_back(run(client));
    double sum = 0;
    for (auto& rate : rates) sum += rate.get();
    std::printf("%-12s %d requests, the matrix was read %d times, %.0f requests/s\n", how,
                clients * kRequests, server.sync<&Server::reads>(), sum);
    return sum;
  };
  const double single = rate_of(
      "one by one", [&](int client) { return agent.async<&ask_one_by_one>(client, server); });
  const double batched = rate_of(
      "in batches", [&](int client) { return agent.async<&ask_in_batches>(client, server); });
  std::printf("speed-up     %.1fx with batches of %d\n", batched / single, clients * kAtOnce);
}

}  // namespace

int main(int argc, char** argv) {
  examples::Workers workers("batch_rpc", "A server that gathers calls and answers them in batches",
                            {.least = 2, .usual = 3});
  return workers.run(
      argc, argv, [](int rank) { return "worker" + std::to_string(rank); },
      [](weft::rpc::Agent& agent) {
        if (agent.self().rank == 0) drive(agent);
      });
}
