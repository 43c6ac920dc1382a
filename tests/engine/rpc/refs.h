// SPDX-License-Identifier: Apache-2.0
// Functions and types for tests of references: plain values, accounts that count how many of them
// live, and values whose creation waits for a gate.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <weft/tests/engine/rpc/workers.h>

namespace refs {

using namespace weft;

inline at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
inline at::Tensor add_held(RRef<at::Tensor> a, RRef<at::Tensor> b) {
  return a.to_here() + b.to_here();
}
inline at::Tensor fetch(RRef<at::Tensor> a) { return a.to_here(); }
inline int fetch_sum(RRef<int> a, RRef<int> b) { return a.to_here() + b.to_here(); }
inline int plus_held(RRef<int> a, int more) { return a.to_here() + more; }
inline void take(RRef<int>) {}
inline void pass_on(RRef<int> a, rpc::WorkerInfo third) { rpc::this_agent().sync<&take>(third, a); }
inline int fetch_elsewhere(RRef<int> a, rpc::WorkerInfo third) {
  return rpc::this_agent().sync<&fetch_sum>(third, a, a);
}
inline int number(int value) { return value; }
inline int throws(std::string text) { throw std::runtime_error(text); }
inline void nothing() {}
inline std::atomic<bool> finished{false};
inline void finish() { finished = true; }
inline RRef<int> own(int value) { return RRef<int>(value); }
inline std::vector<RRef<int>> own_three() { return {RRef<int>(0), RRef<int>(1), RRef<int>(2)}; }
inline RRef<int> make_on(rpc::WorkerInfo third, int value) {
  return rpc::this_agent().remote<&number>(third, value);
}
inline std::vector<RRef<int>> make_two_on(rpc::WorkerInfo third) {
  return {rpc::this_agent().remote<&number>(third, 1), rpc::this_agent().remote<&number>(third, 2)};
}
inline int fetched_from_third(rpc::WorkerInfo third) {
  return rpc::this_agent().remote<&number>(third, 7).to_here();
}
inline at::Tensor add_on(rpc::WorkerInfo third, at::Tensor a, at::Tensor b) {
  return rpc::this_agent().remote<&add>(third, a, b).to_here();
}
inline std::vector<RRef<at::Tensor>> add_twice_on(rpc::WorkerInfo third, at::Tensor a,
                                                  at::Tensor b) {
  return {rpc::this_agent().remote<&add>(third, a, b), rpc::this_agent().remote<&add>(third, b, b)};
}
inline int sum_of(std::vector<RRef<int>> all) {
  int sum = 0;
  for (const auto& one : all) sum += one.to_here();
  return sum;
}
inline void increase(int& value, int by) { value += by; }
inline int local_sum(RRef<int> a, RRef<int> b) { return a.local_value() + b.local_value(); }
inline int plus_local(RRef<int> a, int more) { return a.local_value() + more; }

// Functions that return only when their gate has been opened.
inline std::mutex gates;
inline std::condition_variable opened;
inline std::set<std::string> open_gates;
inline void open_gate(std::string name) {
  std::lock_guard lock(gates);
  open_gates.insert(std::move(name));
  opened.notify_all();
}
inline int number_behind(int value, std::string gate) {
  std::unique_lock lock(gates);
  opened.wait(lock, [&] { return open_gates.contains(gate); });
  return value;
}
inline int throws_behind(std::string gate) {
  number_behind(0, std::move(gate));
  throw std::runtime_error("no luck behind");
}
inline int fetch_behind(RRef<int> a, std::string gate) {
  return number_behind(0, std::move(gate)) + a.to_here();
}
inline std::vector<std::uint64_t> counters() {
  const auto now = rpc::this_agent().debug_info();
  return {now.owner_rrefs, now.forks, now.pending_users};
}

// Returns the number of calls served, and of calls under way besides this one.
inline std::pair<std::size_t, std::size_t> served_and_busy() {
  const auto now = rpc::this_agent().debug_info();
  return {now.calls_served, now.calls_waiting + now.handlers_busy - 1};
}

inline RRef<int> give_back(RRef<int> given) { return given; }
inline std::optional<RRef<int>> give_back_if(std::optional<RRef<int>> given) { return given; }
inline bool is_created(RRef<int> given) {
  given.created().get();
  return true;
}
inline std::int64_t size_of(const at::Tensor& tensor, std::int64_t dimension) {
  return tensor.size(dimension);
}
inline at::Tensor plus(const at::Tensor& tensor, at::Tensor more) { return tensor + more; }
inline at::Tensor viewed(const at::Tensor& tensor, std::vector<std::int64_t> sizes) {
  return tensor.view(sizes);
}
inline at::Tensor quantized() { return at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8); }
inline int plus_number(int& value, int more) { return value + more; }
inline int wait_behind(int& value, std::string gate) {
  return number_behind(value, std::move(gate));
}

// Counts how many live.
inline std::atomic<int> living{0};
struct Account {
  explicit Account(int start) : value(start) { ++living; }
  Account(const Account&) = delete;
  Account& operator=(const Account&) = delete;
  ~Account() { --living; }
  int add(int more) { return value += more; }
  int get() const { return value; }
  void put(int other) { value = other; }
  void fail() { throw std::runtime_error("overdrawn"); }
  Future<int> add_later(int more) {
    return rpc::this_agent().async<&number>(rpc::this_call().caller, more).then([this](int got) {
      return value += got;
    });
  }
  static int twice(int a) { return 2 * a; }
  static int peek(const Account& account) { return account.value; }
  int value;
};
// Its destructor waits for its gate.
struct EndsBehind {
  explicit EndsBehind(std::string name) : gate(std::move(name)) {}
  EndsBehind(const EndsBehind&) = delete;
  EndsBehind& operator=(const EndsBehind&) = delete;
  ~EndsBehind() {
    open_gate(gate + " asked");
    number_behind(0, gate);
  }
  std::string gate;
};
inline int add_to(RRef<Account> account, int more) { return account.local_value().add(more); }
inline int accounts_living() { return living; }
// Holds references on the worker that made it.
struct Kept {
  RRef<Account> account;
  RRef<int> number;
};
inline Kept kept(RRef<Account> account, RRef<int> number) {
  return {std::move(account), std::move(number)};
}
inline int fetch_held(RRef<int>& held) { return held.to_here(); }
inline int account_value(Account& account, int plus) { return account.value + plus; }
struct Broken {
  explicit Broken(std::string why) { throw std::runtime_error(why); }
};

struct Net : torch::nn::Module {
  explicit Net(int width) : layer(register_module("layer", torch::nn::Linear(width, 2))) {}
  at::Tensor forward(at::Tensor x) { return layer(x); }
  torch::nn::Linear layer;
};

inline std::vector<RRef<at::Tensor>> parameters_of(Net& net) {
  std::vector<RRef<at::Tensor>> all;
  for (const auto& parameter : net.parameters()) all.push_back(RRef<at::Tensor>(parameter));
  return all;
}

struct Node {
  int value = 0;
  RRef<Node> next;
  WEFT_FIELDS(value, next)
};
inline Node node(int value, RRef<Node> next) { return {value, next}; }
inline int walk(RRef<Node> at) {
  int sum = 0;
  for (; at;) {
    const Node here = at.to_here();
    sum += here.value;
    at = here.next;
  }
  return sum;
}

}  // namespace refs

namespace weft::harness {

// Worker 0 runs `body`, and the others only serve, so that counts are exact.
inline void run_one(const Setting& setting, const std::function<void(rpc::Agent&)>& body,
                    const rpc::Options& options = {}) {
  run_workers(
      setting,
      [&](rpc::Agent& agent) {
        if (agent.self().rank == 0) body(agent);
      },
      options);
}
inline void run_one(const std::function<void(rpc::Agent&)>& body,
                    const rpc::Options& options = {}) {
  run_one({As::Threads, "inproc", 3}, body, options);
}

// Waits until a worker's DebugInfo has these values of owner_rrefs, forks and pending_users.
inline void expect_counters(rpc::Agent& agent, int worker, std::vector<std::uint64_t> expected) {
  const auto deadline = Deadline::in(std::chrono::seconds(20));
  std::vector<std::uint64_t> now;
  do {
    now = agent.sync<&refs::counters>(worker);
  } while (now != expected && !deadline.passed());
  EXPECT_EQ(now, expected) << "worker" << worker;
}

}  // namespace weft::harness
