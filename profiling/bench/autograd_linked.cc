// SPDX-License-Identifier: Apache-2.0
// Measures the messages, bytes and round trips of an iteration, and how much of a slow link's time
// it hides: two workers of one process over inproc, whose links can be made slow.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/base/mutex.h>
#include <weft/engine/future/when_all.h>
#include <weft/profiling/bench/autograd_listing.h>
#include <weft/profiling/bench/workers.h>
#include <weft/profiling/trace/operation.h>
#include <weft/transport/inproc/faults.h>

namespace weft::bench {

namespace {

using namespace std::chrono_literals;
using transport::inproc::Faults;

// All links of this process.
class Links {
 public:
  Links() {
    transport::inproc::on_link([this](const Faults& there, const Faults& back) {
      MutexLock lock(mutex_);
      for (const Faults& way : {there, back}) {
        way.slow_down(delay_, bytes_per_second_);
        ways_.push_back(way);
      }
    });
  }
  ~Links() { transport::inproc::on_link({}); }
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  void slow_down(std::chrono::nanoseconds delay, double bytes_per_second) {
    MutexLock lock(mutex_);
    delay_ = delay;
    bytes_per_second_ = bytes_per_second;
    for (const Faults& way : ways_) way.slow_down(delay, bytes_per_second);
  }
  std::uint64_t bytes() {
    MutexLock lock(mutex_);
    std::uint64_t sum = 0;
    for (const Faults& way : ways_) sum += way.written();
    return sum;
  }

 private:
  Mutex mutex_;
  std::vector<Faults> ways_ WEFT_GUARDED_BY(mutex_);
  std::chrono::nanoseconds delay_ WEFT_GUARDED_BY(mutex_){0};
  double bytes_per_second_ WEFT_GUARDED_BY(mutex_) = 0;
};

// Counts the requests that either worker has received; each has one reply.
class Requests final : public trace::Observer {
 public:
  std::uint64_t count() const { return count_; }

 private:
  void begun(const trace::Member&, trace::Kind kind, const char*, std::uint64_t) noexcept override {
    if (kind == trace::Kind::Served) ++count_;
  }
  void ended(trace::Kind, const char*, double, const Error*, std::uint64_t) noexcept override {}
  std::atomic<std::uint64_t> count_{0};
};

// Runs the body as worker 0 on a core of its own, while worker 1 serves on another core.
void together(const std::function<void(rpc::Agent&)>& body) {
  pin_to_core(0);
  torch::set_num_threads(1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto options = [&](int rank) {
    return rpc::Options{.rank = rank,
                        .world_size = 2,
                        .store = store,
                        .worker_threads = 1,
                        .timeout = 5min,
                        .transports = {"inproc"}};
  };
  std::thread other([&] {
    pin_to_core(1);
    rpc::Agent agent = rpc::init("worker1", options(1));
    agent.shutdown();
  });
  {
    rpc::Agent agent = rpc::init("worker0", options(0));
    body(agent);
    agent.shutdown();
  }
  other.join();
}

// Prints the messages and bytes of an iteration, including those that clean up after it.
void count(const Iteration& how, Links& links) {
  static Requests requests;
  trace::observe(requests);
  constexpr int kTimes = 200;
  together([&](rpc::Agent& agent) {
    const Kept with(agent);
    // An iteration's clean-up is sent during the next one, so the differences at both ends cancel
    // out.
    for (int i = 0; i < 20; ++i) iterate(agent, with, how);
    const auto requests_before = requests.count(), bytes_before = links.bytes();
    for (int i = 0; i < kTimes; ++i) iterate(agent, with, how);
    std::printf("%.2f %.1f\n",
                2.0 * static_cast<double>(requests.count() - requests_before) / kTimes,
                static_cast<double>(links.bytes() - bytes_before) / kTimes);
  });
}

// Prints the times of an iteration with 5 ms each way, in round trips.
void go_far(const Iteration& how, Links& links) {
  constexpr auto kEachWay = 5ms;
  together([&](rpc::Agent& agent) {
    const Kept with(agent);
    iterate(agent, with, how);
    links.slow_down(kEachWay, 0);
    for (int i = -2; i < 10; ++i) {
      const double start = now();
      iterate(agent, with, how);
      if (i >= 0)
        std::printf("%.6f ", (now() - start) / std::chrono::duration<double>(2 * kEachWay).count());
    }
    links.slow_down(0ns, 0);
  });
  std::printf("\n");
}

constexpr int kMicroBatches = 64;

// A layer that takes time without using a core, one call at a time, as a layer on an accelerator
// does: 1 ms forward, 2 ms backward.
struct Elsewhere : torch::autograd::Function<Elsewhere> {
  static void work(Mutex& device, std::chrono::milliseconds time) {
    MutexLock lock(device);
    std::this_thread::sleep_for(time);
  }
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t device) {
    context->saved_data["device"] = device;
    work(*reinterpret_cast<Mutex*>(device), 1ms);
    return x.clone();
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context,
                                          const std::vector<at::Tensor>& gradients) {
    work(*reinterpret_cast<Mutex*>(context->saved_data["device"].toInt()), 2ms);
    return {gradients[0].contiguous(), at::Tensor()};
  }
};

struct StageImpl : torch::nn::Module {
  explicit StageImpl(bool does_compute)
      : computes(does_compute), net(register_module("net", make_stage())) {}
  at::Tensor forward(at::Tensor x) {
    return computes ? net->forward(x)
                    : Elsewhere::apply(x, reinterpret_cast<std::int64_t>(&device));
  }
  at::Tensor loss(at::Tensor x) { return forward(x).sum(); }
  const bool computes;
  Mutex device;
  torch::nn::Sequential net;
};
TORCH_MODULE(Stage);

double seconds_of(const std::function<void()>& step) {
  std::vector<double> times;
  for (int i = 0; i < 4; ++i) {
    const double start = now();
    step();
    if (i > 0) times.push_back(now() - start);
  }
  std::nth_element(times.begin(), times.begin() + 1, times.end());
  return times[1];
}

// Runs a model in two stages, micro-batch after micro-batch, and prints the seconds of a step for:
// one stage alone (the work of either worker), both stages in one process, both workers without and
// with a limited link, and the limited link alone for these bytes, which is `share` times one
// stage.
void two_stages(bool computes, double share, Links& links) {
  together([&](rpc::Agent& agent) {
    Stage here(computes);
    const auto there = agent.remote<StageImpl>(1, computes);
    const auto input = torch::rand({kBatch, kWidth})
                           .requires_grad_(!computes);  // otherwise only parameters need gradients
    const auto one_stage = [&] {
      at::Tensor x = input.detach().requires_grad_();
      std::vector<at::Tensor> outs;
      for (int i = 0; i < kMicroBatches; ++i) outs.push_back(here->loss(x));
      at::stack(outs).sum().backward();
    };
    Stage second(computes);
    const auto in_one_process = [&] {
      std::vector<at::Tensor> outs;
      for (int i = 0; i < kMicroBatches; ++i) outs.push_back(second->loss(here->forward(input)));
      at::stack(outs).sum().backward();
    };
    const auto by_both = [&] {
      AutogradContext context(agent);
      std::vector<Future<at::Tensor>> outs;
      for (int i = 0; i < kMicroBatches; ++i) {
        outs.push_back(there.async<&StageImpl::loss>(here->forward(input)));
      }
      context.backward({at::stack(when_all(std::move(outs)).get()).sum()});
    };
    const double stage = seconds_of(one_stage), whole = seconds_of(in_one_process),
                 free = seconds_of(by_both);
    // Activations in one direction, gradients in the other.
    const double bytes = 2.0 * kMicroBatches * kBatch * kWidth * sizeof(float);
    const double communication = share * stage;
    links.slow_down(0ns, bytes / communication);
    const double limited = seconds_of(by_both);
    links.slow_down(0ns, 0);
    std::printf("%.6f %.6f %.6f %.6f %.6f\n", stage, whole, free, limited, communication);
  });
}

}  // namespace

int work_linked(const std::string& what) {
  Links links;
  const auto is = [&](const std::string& kind) { return what.starts_with(kind + ":"); };
  const std::string rest = what.substr(std::min(what.size(), what.find(':') + 1));
  if (is("count")) count(iteration_named(rest), links);
  if (is("far")) go_far(iteration_named(rest), links);
  if (is("stages")) two_stages(true, std::atof(rest.c_str()), links);
  if (is("waiting stages")) two_stages(false, std::atof(rest.c_str()), links);
  return 0;
}

}  // namespace weft::bench
