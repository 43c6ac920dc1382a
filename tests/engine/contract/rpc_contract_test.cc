// SPDX-License-Identifier: Apache-2.0
// A program that uses each spelling of the public API of RPC, RRef, Future and the codec once, and
// checks the result. Where this does not compile, users' programs do not either.
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include <weft/weft.h>

// Users may have this warning on; options of which only some are named must not cause it.
#pragma GCC diagnostic error "-Wmissing-field-initializers"

namespace rpc_contract {

using namespace weft;
using namespace std::chrono_literals;

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
int plus(int a, int b) { return a + b; }
void nothing() {}
[[noreturn]] int throws(std::string text) { throw std::runtime_error(text); }
int slow(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
  return ms;
}
template <class T>
T doubled(T value) {
  return value + value;
}
enum class Colour { Red, Green };
struct Point {
  int x = 0;
  std::vector<double> more;
  std::optional<std::string> name;
  friend bool operator==(const Point&, const Point&) = default;
  WEFT_FIELDS(x, more, name)
};
struct Packed {
  int a = 0;
  std::string b;
  MSGPACK_DEFINE(a, b)
};
using Everything = std::tuple<bool, std::int8_t, std::uint64_t, float, double, Colour, std::string,
                              std::vector<int>, std::array<int, 2>, std::map<std::string, int>,
                              std::set<int>, std::pair<int, std::string>, std::optional<int>,
                              std::variant<int, std::string>, std::chrono::milliseconds, Point>;
Everything same(Everything value) { return value; }
std::pair<std::vector<c10::Device>, std::optional<c10::Device>> devices(
    std::vector<c10::Device> some) {
  return {some, some.back()};
}
using Devices =
    std::tuple<std::array<c10::Device, 2>, std::map<std::string, c10::Device>,
               std::deque<c10::Device>, std::vector<std::pair<c10::Device, c10::Device>>,
               std::optional<std::pair<int, c10::Device>>, std::variant<c10::Device, int>,
               rpc::DeviceMaps>;
Devices same_devices(Devices value) { return value; }
int packed(Packed value) { return value.a + static_cast<int>(value.b.size()); }
std::tuple<c10::Scalar, c10::ScalarType, c10::Device> torch_values(c10::Scalar a, c10::ScalarType b,
                                                                   c10::Device c) {
  return {a, b, c};
}
bool is_undefined(at::Tensor tensor) { return !tensor.defined(); }

struct Accumulator {
  Accumulator(int first, std::string label) : sum(first), name(std::move(label)) {}
  Accumulator(const Accumulator&) = delete;
  Accumulator& operator=(const Accumulator&) = delete;
  int add(int value) & { return sum += value; }
  int total() const { return sum; }
  std::string label() const& { return name; }
  Future<int> add_later(int value) {
    return rpc::this_agent().async<&plus>(rpc::this_agent().self(), value, 0).then([this](int v) {
      return sum += v;
    });
  }
  static int answer() { return 42; }
  std::atomic<int> sum;
  std::string name;
};
int total_of(Accumulator& accumulator, int more) { return accumulator.total() + more; }

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int width) : layer(register_module("layer", torch::nn::Linear(width, 2))) {}
  at::Tensor forward(at::Tensor x) { return layer->forward(x); }
  std::vector<std::int64_t> shape() const { return layer->weight.sizes().vec(); }
  torch::nn::Linear layer;
};

at::Tensor use(RRef<at::Tensor> value) { return value.to_here() + 1; }
RRef<int> make_here(int value) { return RRef<int>(value); }
struct Node {
  int value = 0;
  std::vector<RRef<Node>> next;
  WEFT_FIELDS(value, next)
};
int sum_of(Node node) {
  int sum = node.value;
  for (auto& next : node.next) sum += sum_of(next.to_here());
  return sum;
}

Future<at::Tensor> async_add(rpc::WorkerInfo to, at::Tensor x, at::Tensor y, at::Tensor z) {
  return rpc::this_agent().async<&add>(to, x, y).then([z](at::Tensor sum) { return sum + z; });
}
Future<int> by_coroutine(std::string to) {
  const int a = co_await rpc::this_agent().async<&plus>(to, 1, 2);
  const int b = co_await rpc::this_agent().async<&plus>(to, a, 4);
  co_return b;
}
std::string called_by() {
  const rpc::CallInfo call = rpc::this_call();
  return call.caller.name + (call.cancelled ? " cancelled" : "");
}

class RpcContract : public testing::Test {
 protected:
  // Two workers of one process: worker0 runs `body`, worker1 serves.
  static void run(const std::function<void(rpc::Agent&)>& body) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::thread other([&] {
      rpc::Agent agent = rpc::init(
          "worker1", {.rank = 1, .world_size = 2, .store = store, .transports = {"inproc"}});
      agent.shutdown();
    });
    {
      rpc::Agent agent = rpc::init(
          "worker0", {.rank = 0, .world_size = 2, .store = store, .transports = {"inproc"}});
      try {
        body(agent);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
      const auto counted = [&agent] {
        const rpc::DebugInfo info = agent.debug_info();
        return info.owner_rrefs + info.forks + info.pending_users + info.contexts +
               info.backward_passes + info.calls_waiting + info.handlers_busy;
      };
      const auto limit = std::chrono::steady_clock::now() + 20s;
      while (counted() > 0 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
      EXPECT_EQ(counted(), 0U) << "all that the body held ends while the agent lives";
      agent.shutdown(rpc::Graceful{.timeout = 10min});
      EXPECT_EQ(counted(), 0U) << "the shutdown's own calls end as well";
      EXPECT_THROW(agent.sync<&plus>("worker1", 1, 2), Error);
    }
    other.join();
  }
};

TEST_F(RpcContract, CallsTakeNameRankOrHandle) {
  run([](rpc::Agent& agent) {
    const rpc::WorkerInfo other = agent.worker("worker1");
    EXPECT_EQ(other, agent.worker(1));
    EXPECT_EQ(agent.self().name, "worker0");
    EXPECT_EQ(agent.workers().size(), 2U);
    EXPECT_EQ((std::unordered_set<rpc::WorkerInfo>{other, agent.self(), other}.size()), 2U);
    const auto ones = torch::ones({2, 2});
    EXPECT_TRUE(agent.sync<&add>("worker1", ones, ones).equal(ones * 2));
    EXPECT_TRUE(agent.sync<&add>(1, ones, ones).equal(ones * 2));
    EXPECT_TRUE(agent.sync<&add>(other, ones, ones).equal(ones * 2));
    EXPECT_TRUE(agent.sync<&add>("worker0", ones, ones).equal(ones * 2));
    Future<int> f = agent.async<&plus>(other, 1, 2);
    EXPECT_EQ(f.get(), 3);
    RRef<at::Tensor> x = agent.remote<&add>(other, ones, ones);
    EXPECT_TRUE(x.to_here().equal(ones * 2));
    agent.sync<&nothing>(other);
    EXPECT_EQ(agent.sync<&doubled<int>>(other, 4), 8);
    EXPECT_EQ(agent.sync<&doubled<std::string>>(other, "ab"), "abab");
    EXPECT_EQ(agent.sync<&plus>(rpc::to("worker1").timeout(2s), 1, 2), 3);
    EXPECT_EQ(agent.sync<rpc::inline_<&plus>>("worker1", 1, 2), 3);
    EXPECT_TRUE(agent.sync_op("aten::add", "worker1", ones, ones).equal(ones * 2));
    agent.set_timeout(30s);
    EXPECT_EQ(agent.timeout(), 30s);
    EXPECT_EQ(agent.sync<&called_by>(other), "worker0");
  });
}

TEST_F(RpcContract, ProgramsExposeFunctions) {
  rpc::expose<&add>();
  rpc::expose<&doubled<int>>();
  rpc::expose<&make_here>();
  rpc::expose<&by_coroutine>();
  rpc::expose<Accumulator, int, std::string>();
  rpc::expose<&Accumulator::add>();
  rpc::expose<Accumulator, &Accumulator::add_later>();
  rpc::expose<Accumulator, &total_of>();
  rpc::expose<NetImpl, int>();
  rpc::expose<&NetImpl::forward>();
}

TEST_F(RpcContract, ValuesTravelUnchanged) {
  run([](rpc::Agent& agent) {
    const Everything value{
        true,   -3,         ~0ULL,  0.5F,     0.25, Colour::Green, "text", {1, 2},
        {3, 4}, {{"a", 1}}, {5, 6}, {7, "p"}, 8,    "v",           9ms,    Point{1, {0.5}, "n"}};
    EXPECT_EQ(agent.sync<&same>("worker1", value), value);
    EXPECT_EQ(agent.sync<&packed>("worker1", Packed{1, "ab"}), 3);
    const auto [scalar, type, device] =
        agent.sync<&torch_values>("worker1", c10::Scalar(2.5), at::kHalf, at::Device("cpu"));
    EXPECT_EQ(scalar.toDouble(), 2.5);
    EXPECT_EQ(type, at::kHalf);
    EXPECT_TRUE(device.is_cpu());
    const std::vector<c10::Device> some{c10::Device("cpu"), c10::Device("cuda:1")};
    EXPECT_EQ(agent.sync<&devices>("worker1", some),
              std::pair(some, std::optional(c10::Device("cuda:1"))));
    const Devices more{{some[1], some[0]},
                       {{"a", some[1]}},
                       {some[1]},
                       {{some[0], some[1]}},
                       std::pair(1, some[1]),
                       some[1],
                       {{"worker1", {{some[0], some[1]}}}}};
    EXPECT_EQ(agent.sync<&same_devices>("worker1", more), more);
    EXPECT_TRUE(agent.sync<&is_undefined>("worker1", at::Tensor()));
    const std::vector<std::byte> bytes = weft::encode(Point{1, {0.5}, "n"});
    EXPECT_EQ(weft::decode<Point>(std::span<const std::byte>(bytes)), (Point{1, {0.5}, "n"}));
    EXPECT_THROW(weft::decode<Point>(std::span<const std::byte>(bytes).first(2)), Error);
    torch::nn::Linear one(3, 2);
    torch::nn::Linear other(3, 2);
    auto state = weft::state_of(*one);
    EXPECT_FALSE(weft::encode(state).empty());
  });
}

TEST_F(RpcContract, ErrorsCarryTheirDetails) {
  run([](rpc::Agent& agent) {
    try {
      agent.sync<&throws>("worker1", "two\nlines");
      FAIL() << "no error";
    } catch (const rpc::RemoteError& error) {
      EXPECT_EQ(error.blame(), Blame::Remote);
      EXPECT_EQ(std::string(error.text()), "two\nlines");
      EXPECT_NE(std::string(error.function()).find("throws"), std::string::npos);
      EXPECT_EQ(error.worker(), "worker1");
    }
    try {
      agent.sync<&slow>(rpc::to("worker1").timeout(5ms), 100);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Timeout);
    }
    const auto failed = agent.remote<&throws>("worker1", "made nothing");
    EXPECT_THROW(failed.to_here(), rpc::CreationError);
    EXPECT_THROW(agent.worker("nobody"), Error);
    EXPECT_THROW(agent.sync<&plus>(7, 1, 2), Error);
    EXPECT_THROW(agent.sync_op("aten::none_such", "worker1", torch::ones(1)), Error);
  });
}

TEST_F(RpcContract, ObjectsMayLiveElsewhere) {
  run([](rpc::Agent& agent) {
    RRef<Accumulator> m = agent.remote<Accumulator>("worker1", 5, "text");
    EXPECT_EQ(m.sync<&Accumulator::add>(2), 7);
    Future<int> f = m.async<&Accumulator::add>(1);
    EXPECT_EQ(f.get(), 8);
    RRef<int> r = m.remote<&Accumulator::total>();
    EXPECT_EQ(r.to_here(), 8);
    EXPECT_EQ(m.timeout(2s).sync<&Accumulator::label>(), "text");
    EXPECT_EQ(m.sync<&Accumulator::answer>(), 42);
    EXPECT_EQ(m.sync<&total_of>(1), 9);
    EXPECT_EQ(m.sync<&Accumulator::add_later>(1), 9);
    EXPECT_EQ(m.owner().name, "worker1");
    EXPECT_FALSE(m.is_owner());
    m.created().get();
    EXPECT_TRUE(m.confirmed());
    RRef<NetImpl> net = agent.remote<NetImpl>("worker1", 3);
    EXPECT_EQ(net.sync<&NetImpl::forward>(torch::ones({4, 3})).sizes(),
              (std::vector<std::int64_t>{4, 2}));
    EXPECT_EQ(net.sync<&NetImpl::shape>(), (std::vector<std::int64_t>{2, 3}));
    RRef<at::Tensor> own(agent, torch::ones(2));
    EXPECT_TRUE(own.is_owner());
    EXPECT_TRUE(own.confirmed());
    EXPECT_TRUE(own.local_value().equal(torch::ones(2)));
    EXPECT_TRUE(agent.sync<&use>("worker1", own).equal(torch::full({2}, 2)));
    EXPECT_TRUE(
        agent.sync<&use>("worker1", agent.remote<&use>("worker1", own)).equal(torch::full({2}, 3)));
    EXPECT_EQ(agent.sync<&make_here>("worker1", 3).to_here(), 3);
    EXPECT_EQ(own.fetch().get().numel(), 2);
    EXPECT_EQ(own.to_here(2s).numel(), 2);
    EXPECT_EQ(own.fetch(2s).get().numel(), 2);
    RRef<void> done = agent.remote<&nothing>("worker1");
    done.to_here();
    Node node{1, {RRef<Node>(agent, Node{2, {}}), RRef<Node>(agent, Node{3, {}})}};
    EXPECT_EQ(agent.sync<&sum_of>("worker1", node), 6);
    EXPECT_THROW(RRef<int>(3), Error);  // outside of a call
  });
}

TEST_F(RpcContract, FuturesAndDeferredRepliesWork) {
  run([](rpc::Agent& agent) {
    const auto ones = torch::ones({2, 2});
    EXPECT_TRUE(agent.sync<&async_add>("worker1", agent.self(), ones, ones, ones).equal(ones * 3));
    EXPECT_EQ(agent.sync<&by_coroutine>("worker1", "worker0"), 7);
    static_assert(
        std::is_same_v<decltype(agent.async<&by_coroutine>("worker1", "worker0")), Future<int>>);
    Future<int> f = agent.async<&plus>("worker1", 1, 2);
    f.wait();
    f.wait(1s);
    EXPECT_TRUE(f.done());
    EXPECT_FALSE(f.failed());
    Future<std::string> text = f.then([](int value) { return std::to_string(value); });
    EXPECT_EQ(text.get(), "3");
    Future<int> flat =
        f.then([&agent](Future<int> same) { return agent.async<&plus>("worker1", same.get(), 1); });
    EXPECT_EQ(flat.get(), 4);
    EXPECT_EQ(f.then([](auto future) { return future.get() + 1; }).get(), 4);
    std::atomic<int> seen{0};
    f.on_done([&](Future<int> future) { seen = future.get(); });
    while (seen == 0) std::this_thread::yield();
    EXPECT_EQ(seen, 3);
    Promise<int> promise;
    const Promise<int> copy = promise;
    Future<int> promised = promise.future();
    EXPECT_THROW(promised.wait(1ms), Error);
    promise.set(1);
    EXPECT_EQ(promised.get(), 1);
    EXPECT_THROW(promise.set(2), Error);
    Promise<int> bad;
    bad.set_error({Blame::Busy, "later"});
    EXPECT_THROW(bad.future().get(), Error);
    EXPECT_THROW(bad.future().get(), Error);
    Promise<int> worse;
    worse.set_error(std::make_exception_ptr(std::logic_error("no")));
    EXPECT_THROW(worse.future().get(), std::logic_error);
    std::vector<Future<int>> many;
    for (int i = 0; i < 3; ++i) many.push_back(agent.async<&plus>("worker1", i, 1));
    EXPECT_EQ(when_all(many).get(), (std::vector<int>{1, 2, 3}));
    EXPECT_EQ(when_all({many[0], many[1]}).get(), (std::vector<int>{1, 2}));
    const auto [a, b] = when_all(many[0], text).get();
    EXPECT_EQ(a, 1);
    EXPECT_EQ(b, "3");
    Future<void> none = agent.async<&nothing>("worker1");
    Future<void> all = when_all(std::vector<Future<void>>{none, agent.async<&nothing>("worker1")});
    all.get();
    Future<int> empty;
    (void)empty;
  });
}

TEST_F(RpcContract, OptionsAreAggregatesInThisOrder) {
  const rpc::Options options{.rank = 0,
                             .world_size = 1,
                             .init_method = "env://",
                             .store = c10::make_intrusive<c10d::HashStore>(),
                             .group_name = "job",
                             .worker_threads = 4,
                             .timeout = 5s,
                             .transports = {"inproc"},
                             .device_maps = {},
                             .secret = "",
                             .faults = {.fail_first = {{rpc::MessageKind::Fork, 1}},
                                        .drop = {rpc::MessageKind::Gradient},
                                        .delay = {{rpc::MessageKind::Backward, 1ms}}},
                             .devices = {},
                             .timeline = "",
                             .calls_in_flight = 100,
                             .bytes_in_flight = 1 << 20};
  rpc::Agent agent = rpc::init("alone", options);
  EXPECT_EQ(agent.timeout(), 5s);
  EXPECT_EQ(agent.sync<&plus>("alone", 1, 2), 3);
  agent.leave();
}

}  // namespace rpc_contract
