// SPDX-License-Identifier: Apache-2.0
// Calls that succeed.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/engine/future/when_all.h>
#include <weft/tests/engine/codec/tree.h>
#include <weft/tests/engine/rpc/workers.h>

namespace calls {

using namespace weft;
using std::chrono::seconds;

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
std::vector<std::int64_t> strides_of(at::Tensor given) { return given.strides().vec(); }
at::Tensor view_of(at::Tensor given) { return given.slice(0, 1, 4, 2); }
at::Tensor twice(const at::Tensor& a) { return a * 2; }
int plus(int a, int b) { return a + b; }
std::string joined(std::string a, std::vector<std::string> more) {
  for (const auto& text : more) a += text;
  return a;
}
void nothing() {}
// Cannot be copied.
struct Owning {
  std::unique_ptr<int> number;
  WEFT_FIELDS(number)
};
Owning owning(int number) { return {std::make_unique<int>(number)}; }
int number_in(Owning given) { return *given.number; }
struct Giver {
  Owning give(int number) { return owning(number); }
};
std::vector<at::Tensor> scalars(int count) {
  std::vector<at::Tensor> all;
  for (int i = 0; i < count; ++i) all.push_back(at::full({1}, i, at::kInt));
  return all;
}
int number_of(std::vector<at::Tensor> tensors) { return static_cast<int>(tensors.size()); }
at::Tensor nonzero(at::Tensor a) { return a.nonzero(); }
rpc::WorkerInfo same(rpc::WorkerInfo worker) { return worker; }
std::map<std::string, std::vector<at::Tensor>> nested(
    std::map<std::string, std::vector<at::Tensor>> tensors) {
  for (auto& [name, list] : tensors) list.push_back(list.front() + 1);
  return tensors;
}
at::Tensor heavy(at::Tensor a) {
  for (int i = 0; i < 200; ++i) a.add_(0.001);
  return a;
}
at::Tensor heavy_sparse(at::Tensor a) {
  at::Tensor sum = a;
  for (int i = 0; i < 20; ++i) sum = (sum + a).coalesce();
  return sum;
}
// One tensor, in several places of a container of containers.
struct Batch {
  at::Tensor whole;
  std::vector<std::vector<at::Tensor>> rows;
  std::map<std::string, std::pair<at::Tensor, int>> named;
  WEFT_FIELDS(whole, rows, named)
};
bool is_one(const Batch& batch) {
  bool one = batch.named.at("a").first.is_alias_of(batch.whole);
  for (const auto& row : batch.rows) {
    for (const auto& tensor : row) one = one && tensor.is_alias_of(batch.whole);
  }
  return one;
}
std::pair<bool, Batch> seen_as_one(Batch batch) { return {is_one(batch), batch}; }

using harness::grown;
using harness::levels_of;

// meet() returns once `count` calls have begun; `most` is how many ran at once.
std::mutex meeting;
std::condition_variable met;
int come = 0, running = 0, most = 0;
void meet(int count) {
  std::unique_lock lock(meeting);
  ++come;
  most = std::max(most, ++running);
  met.notify_all();
  met.wait_for(lock, std::chrono::seconds(20), [&] { return come >= count; });
  --running;
}
bool has_a_limit() { return !rpc::this_call().deadline.is_never(); }
bool has_half_a_minute_to_a_minute() {
  const auto left = rpc::this_call().deadline.remaining();
  return left > seconds(30) && left <= seconds(60);
}
std::atomic<bool> is_open{false};
int wait_until_open() {
  while (!is_open) std::this_thread::yield();
  return 1;
}
std::int64_t holders(at::Tensor a) { return static_cast<std::int64_t>(a.storage().use_count()); }
int whoami() { return rpc::this_agent().self().rank; }
std::string caller() { return rpc::this_call().caller.name; }

// Calls the next worker in the ring, `hops` times.
int relay(int hops) {
  auto& agent = rpc::this_agent();
  if (hops == 0) return agent.self().rank;
  const int workers = static_cast<int>(agent.workers().size());
  return agent.sync<&relay>((agent.self().rank + 1) % workers, hops - 1);
}

// Calls its caller back, `depth` times.
int ping_pong(int depth) {
  if (depth == 0) return 0;
  return 1 + rpc::this_agent().sync<&ping_pong>(rpc::this_call().caller, depth - 1);
}

Future<at::Tensor> add_later(at::Tensor a, at::Tensor b, rpc::WorkerInfo by) {
  return rpc::this_agent().async<&add>(by, a, b).then([](at::Tensor sum) { return sum + 1; });
}
Future<at::Tensor> add_by_coroutine(at::Tensor a, at::Tensor b, rpc::WorkerInfo by) {
  const at::Tensor sum = co_await rpc::this_agent().async<&add>(by, a, b);
  const at::Tensor more = co_await rpc::this_agent().async<&add>(by, sum, a);
  co_return more;
}
Future<int> chained(int start) {
  Promise<int> promise;
  auto future = promise.future();
  for (int i = 0; i < 20; ++i) future = future.then([](int value) { return value + 1; });
  promise.set(start);
  return future;
}

struct Counter {
  explicit Counter(int start) : value(start) {}
  int add(int more) { return value += more; }
  static int twice_static(int a) { return 2 * a; }
  static int peek(const Counter& counter) { return counter.value; }
  int value;
};
at::Tensor mixed(at::Tensor a, std::string text, int times) {
  return a * times + static_cast<int>(text.size());
}
int nothing_given() { return 7; }
std::vector<at::Tensor> all_twice(std::vector<at::Tensor> tensors) {
  for (auto& tensor : tensors) tensor = tensor + tensor;
  return tensors;
}
// Passes its argument on to another worker.
at::Tensor twice_elsewhere(rpc::WorkerInfo where, at::Tensor a) {
  return rpc::this_agent().sync<&twice>(where, a);
}
void make_zero(at::Tensor a) { a.zero_(); }

// While it is packed into a message, encodes another value.
struct Parcel {
  at::Tensor content;
  template <class Packer>
  void msgpack_pack(Packer& packer) const {
    const auto bytes = encode(std::vector<at::Tensor>{content, content + 1});
    packer.pack(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  void msgpack_unpack(const msgpack::object& object) {
    const auto bytes = object.as<std::string>();
    const auto all = decode<std::vector<at::Tensor>>(std::as_bytes(std::span(bytes)));
    content = all.at(0) + all.at(1);
  }
};
at::Tensor opened(Parcel parcel, at::Tensor more) { return parcel.content + more; }

}  // namespace calls

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::run_workers;
using harness::Setting;
using std::chrono::seconds;

class Calls : public testing::TestWithParam<Setting> {};
// Tests that depend on the number of workers.
class CallsAmongMany : public Calls {};

rpc::WorkerInfo next_of(rpc::Agent& agent) { return harness::after(agent, 1); }

TEST_P(CallsAmongMany, WorkersKnowEachOtherByNameAndRank) {
  run_workers(GetParam(), [expected = GetParam().workers](rpc::Agent& agent) {
    const auto workers = agent.workers();
    ASSERT_EQ(workers.size(), static_cast<std::size_t>(expected));
    for (int rank = 0; rank < static_cast<int>(workers.size()); ++rank) {
      EXPECT_EQ(workers[static_cast<std::size_t>(rank)],
                (rpc::WorkerInfo{"worker" + std::to_string(rank), rank}));
      EXPECT_EQ(agent.worker("worker" + std::to_string(rank)), agent.worker(rank));
    }
    EXPECT_EQ(agent.worker(agent.self().rank), agent.self());
    const auto unknown = error_of([&] { agent.worker("nobody"); });
    EXPECT_EQ(unknown.blame(), Blame::Caller);
    EXPECT_NE(unknown.text().find("'nobody' cannot be found"), std::string::npos) << unknown.text();
    for (const int rank : {-1, expected}) {
      EXPECT_EQ(error_of([&] { agent.worker(rank); }).blame(), Blame::Caller) << rank;
    }
  });
}

TEST_P(Calls, CallToOneselfGivesTheLocalResult) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    EXPECT_TRUE(at::equal(agent.sync<&calls::add>(agent.self(), at::ones({2, 2}), at::ones({2, 2})),
                          at::full({2, 2}, 2.0)));
    EXPECT_TRUE(at::equal(
        agent.async<&calls::add>(agent.self().name, at::ones({2, 2}), at::ones({2, 2})).get(),
        at::full({2, 2}, 2.0)));
    const auto mine = at::zeros({3});
    EXPECT_EQ(agent.sync<&calls::heavy>(agent.self(), mine).data_ptr(), mine.data_ptr())
        << "a call to oneself must copy nothing";
  });
}

TEST_P(Calls, NameRankOrHandleIsADestination) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = next_of(agent);
    const auto size = agent.self().rank + 2;
    const auto sum = at::full({size, size}, 2.0);
    const auto one = at::ones({size, size});
    EXPECT_TRUE(at::equal(agent.sync<&calls::add>(to, one, one), sum));
    EXPECT_TRUE(at::equal(agent.sync<&calls::add>(to.name, one, one), sum));
    EXPECT_TRUE(at::equal(agent.sync<&calls::add>(to.rank, one, one), sum));
    EXPECT_TRUE(at::equal(agent.async<&calls::add>(rpc::to(to.name), one, one).get(), sum));
    EXPECT_TRUE(at::equal(agent.async<&calls::add>(to.rank, one, one).get(), sum));
    EXPECT_TRUE(at::equal(agent.remote<&calls::add>(to.rank, one, one).to_here(), sum));
    EXPECT_TRUE(at::equal(agent.sync_op("aten::add", to, one, 2), one + 2))
        << "an argument may be a scalar";
    EXPECT_EQ(agent.sync<&calls::plus>(to, 40, 2), 42);
    EXPECT_EQ(agent.sync<&calls::joined>(to, "a", std::vector<std::string>{"b", "c"}), "abc");
    EXPECT_EQ(agent.sync<&calls::Counter::twice_static>(to, 4), 8);
    agent.sync<&calls::nothing>(to);
  });
}

TEST_P(Calls, ResultShapeMayDependOnData) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    auto matrix = at::ones({3, 3});
    matrix[1][1] = 0;
    EXPECT_TRUE(at::equal(agent.sync<&calls::nonzero>(next_of(agent), matrix), matrix.nonzero()));
  });
}

TEST_P(Calls, TwentyCallsInSequenceSucceed) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (int i = 0; i < 20; ++i) EXPECT_EQ(agent.sync<&calls::plus>(next_of(agent), i, 1), i + 1);
  });
}

TEST_P(Calls, RemoteResultsMatchLocalOnes) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = next_of(agent);
    EXPECT_TRUE(at::equal(agent.sync_op("aten::add", to, at::ones({2}), at::ones({2}), 3),
                          at::full({2}, 4.0)));
    EXPECT_EQ(agent.sync<&calls::joined>(to, "a", std::vector<std::string>{"b"}), "ab");
    const auto counter = agent.remote<calls::Counter>(to, 10);
    EXPECT_EQ(counter.sync<&calls::Counter::add>(5), 15);
    EXPECT_EQ(counter.sync<&calls::Counter::peek>(), 15);
    EXPECT_EQ(counter.sync<&calls::Counter::twice_static>(4), 8);
    EXPECT_EQ(agent.sync<&calls::Counter::twice_static>(to, 4), 8);
  });
}

TEST_P(Calls, TensorsAreCopiedAndVoidIsAllowed) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto mine = at::ones({3});
    agent.sync<&calls::make_zero>(next_of(agent), mine);
    EXPECT_TRUE(at::equal(mine, at::ones({3}))) << "the callee has a copy";
    EXPECT_TRUE(at::equal(agent.sync<&calls::add>(next_of(agent), mine, mine), at::full({3}, 2.0)));
    agent.async<&calls::nothing>(next_of(agent)).get();
    agent.remote<&calls::nothing>(next_of(agent)).to_here();
  });
}

TEST_P(Calls, PackingAValueMayEncodeOthers) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto one = at::ones({2});
    EXPECT_TRUE(at::equal(agent.sync<&calls::opened>(next_of(agent), calls::Parcel{one}, one),
                          at::full({2}, 4.0)));
  });
}

TEST_P(Calls, SparseTensorsTravelInAllModes) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto indices = at::tensor({0, 1, 1, 0, 0, 1}, at::kLong).reshape({2, 3});
    const auto sparse = at::sparse_coo_tensor(indices, at::tensor({1.0, 2.0, 3.0}), {2, 2});
    const auto sum = (sparse + sparse).to_dense();
    for (const auto& given : {sparse, sparse.coalesce()}) {
      for (const auto& to : {next_of(agent), agent.self()}) {
        EXPECT_TRUE(at::equal(agent.sync<&calls::add>(to, given, given).to_dense(), sum));
        EXPECT_TRUE(at::equal(agent.async<&calls::add>(to, given, given).get().to_dense(), sum));
        EXPECT_TRUE(
            at::equal(agent.remote<&calls::add>(to, given, given).to_here().to_dense(), sum));
      }
      EXPECT_TRUE(at::equal(
          agent.sync<&calls::twice_elsewhere>(next_of(agent), agent.self(), given).to_dense(),
          sum));
      const auto all = agent.sync<&calls::all_twice>(
          next_of(agent), std::vector<at::Tensor>{given, at::ones({2}), given});
      EXPECT_EQ(all[2].is_coalesced(), given.is_coalesced());
      EXPECT_TRUE(at::equal(all[2].to_dense(), sum));
    }
    std::vector<Future<at::Tensor>> calls;
    for (int i = 0; i < 20; ++i)
      calls.push_back(agent.async<&calls::heavy_sparse>(next_of(agent), sparse));
    for (auto& call : calls) EXPECT_TRUE(at::equal(call.get().to_dense(), sparse.to_dense() * 21));
  });
}

TEST_P(Calls, AllModesTakeMixedOrNoArguments) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto& to : {next_of(agent), agent.self()}) {
      const auto expected = at::full({2}, 5.0);
      EXPECT_TRUE(at::equal(agent.sync<&calls::mixed>(to, at::ones({2}), "abc", 2), expected));
      EXPECT_TRUE(
          at::equal(agent.async<&calls::mixed>(to, at::ones({2}), "abc", 2).get(), expected));
      EXPECT_TRUE(
          at::equal(agent.remote<&calls::mixed>(to, at::ones({2}), "abc", 2).to_here(), expected));
      EXPECT_EQ(agent.sync<&calls::nothing_given>(to), 7);
      EXPECT_EQ(agent.remote<&calls::nothing_given>(to).to_here(), 7);
    }
  });
}

TEST_P(CallsAmongMany, CallsReachOnlyTheirDestination) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto& worker : agent.workers()) {
      EXPECT_EQ(agent.sync<&calls::whoami>(worker), worker.rank);
      EXPECT_EQ(agent.sync<&calls::caller>(worker), agent.self().name);
    }
  });
}

TEST_P(Calls, CallsInFlightDoNotMix) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = next_of(agent);
    std::vector<Future<int>> sums;
    std::vector<Future<at::Tensor>> tensors;
    for (int i = 0; i < 100; ++i) {
      sums.push_back(agent.async<&calls::plus>(to, i, i));
      tensors.push_back(agent.async<&calls::twice>(to, at::full({i % 7 + 1}, i, at::kFloat)));
    }
    for (int i = 0; i < 100; ++i) {
      EXPECT_EQ(sums[static_cast<std::size_t>(i)].get(), 2 * i);
      EXPECT_TRUE(at::equal(tensors[static_cast<std::size_t>(i)].get(),
                            at::full({i % 7 + 1}, 2 * i, at::kFloat)));
    }
  });
}

TEST_P(Calls, MoveOnlyValuesTravel) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto& worker : agent.workers()) {
      const calls::Owning got = agent.sync<&calls::owning>(worker, 4);
      ASSERT_TRUE(got.number);
      EXPECT_EQ(*got.number, 4);
      EXPECT_EQ(agent.sync<&calls::number_in>(worker, calls::owning(5)), 5);
      EXPECT_EQ(*agent.remote<calls::Giver>(worker).sync<&calls::Giver::give>(6).number, 6);
    }
  });
}

TEST_P(Calls, DeepContainersAndHandlesTravel) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = next_of(agent);
    EXPECT_EQ(agent.sync<&calls::same>(to, to), to);
    const auto got = agent.sync<&calls::nested>(
        to, std::map<std::string, std::vector<at::Tensor>>{{"a", {at::ones({2})}}});
    ASSERT_EQ(got.at("a").size(), 2U);
    EXPECT_TRUE(at::equal(got.at("a")[1], at::full({2}, 2.0)));
    const auto one = at::arange(6, at::kFloat);
    const auto [was_one, batch] = agent.sync<&calls::seen_as_one>(
        to, calls::Batch{one, {{one, one}, {}, {one}}, {{"a", {one, 3}}}});
    EXPECT_TRUE(was_one) << "a tensor that is sent several times arrives as one";
    EXPECT_TRUE(calls::is_one(batch)) << "and returns as one";
    ASSERT_EQ(batch.rows.size(), 3U);
    EXPECT_EQ(batch.rows[0].size(), 2U);
    EXPECT_TRUE(batch.rows[1].empty());
    EXPECT_TRUE(at::equal(batch.rows[2].at(0), one));
    EXPECT_EQ(batch.named.at("a").second, 3);
  });
}

TEST_P(CallsAmongMany, AThousandOutstandingCallsReturn) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::vector<Future<void>> calls;
    for (int i = 0; i < 1000; ++i) calls.push_back(agent.async<&calls::nothing>(next_of(agent)));
    when_all(calls).get();
  });
}

TEST_P(Calls, TwentyHeavyCallsAtOnceReturn) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::vector<Future<at::Tensor>> calls;
    for (int i = 0; i < 20; ++i)
      calls.push_back(agent.async<&calls::heavy>(next_of(agent), at::zeros({100, 100})));
    for (auto& call : calls) EXPECT_NEAR(call.get()[0][0].item<float>(), 0.2, 1e-3);
  });
}

TEST_P(Calls, StridesAndSparsenessAreKept) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = next_of(agent);
    const auto view = at::arange(12, at::kFloat).reshape({3, 4}).t();
    const auto got = agent.sync<&calls::add>(to, view, view);
    EXPECT_FALSE(got.is_contiguous());
    EXPECT_TRUE(at::equal(got, view * 2));
    EXPECT_EQ(agent.sync<&calls::strides_of>(to, view), view.strides().vec())
        << "the callee sees the same strides";
    const auto viewed = agent.sync<&calls::view_of>(to, view);
    EXPECT_EQ(viewed.strides(), calls::view_of(view).strides()) << "a result may be a view";
    EXPECT_TRUE(at::equal(viewed, calls::view_of(view)));
    const auto sparse = at::sparse_coo_tensor(at::tensor({0, 1, 1, 0}, at::kLong).reshape({2, 2}),
                                              at::ones({2}), {2, 2});
    EXPECT_TRUE(at::equal(agent.sync<&calls::add>(to, sparse, sparse).to_dense(),
                          (sparse + sparse).to_dense()));
  });
}

TEST_P(Calls, LargeTensorsAndTextArriveWhole) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = next_of(agent);
    const auto large = at::arange(1 << 20, at::kFloat);
    EXPECT_TRUE(at::equal(agent.sync<&calls::twice>(to, large), large * 2));
    const std::string text(3 << 20, 'x');
    EXPECT_EQ(agent.sync<&calls::joined>(to, text, std::vector<std::string>{"y"}), text + "y");
  });
}

TEST_P(Calls, MessageHolds4095Tensors) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    constexpr int kMost = 4095;
    const std::vector<at::Tensor> many = agent.sync<&calls::scalars>(1, kMost);
    ASSERT_EQ(many.size(), kMost);
    EXPECT_EQ(many.back().item<int>(), kMost - 1);
    EXPECT_EQ(agent.sync<&calls::number_of>(1, many), kMost);
    EXPECT_EQ(error_of([&] { agent.sync<&calls::scalars>(1, kMost + 1); }).blame(), Blame::Caller);
  });
}

// The list of the arguments counts as one of the 64 levels.
TEST_P(Calls, TooDeepNestingIsRefusedAtSender) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    EXPECT_EQ(agent.sync<&calls::levels_of>(1, calls::grown(31)), 31);
    const Error given = error_of([&] { agent.sync<&calls::levels_of>(1, calls::grown(32)); });
    EXPECT_EQ(given.blame(), Blame::Caller);
    EXPECT_NE(given.text().find("more than 64 containers"), std::string::npos) << given.text();
    EXPECT_EQ(calls::levels_of(agent.sync<&calls::grown>(1, 32)), 32);
    const Error result = error_of([&] { agent.sync<&calls::grown>(1, 33); });
    EXPECT_EQ(result.blame(), Blame::Caller);
    EXPECT_NE(result.text().find("more than 64 containers"), std::string::npos) << result.text();
  });
}

TEST_P(Calls, ContinuationsRunOnceWithTheValue) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const bool waits_before : {false, true}) {
      auto call = agent.async<&calls::plus>(next_of(agent), 1, 2);
      if (waits_before) {
        EXPECT_EQ(call.get(), 3);
      }
      std::atomic<int> runs{0};
      std::vector<Future<int>> more;
      for (int i = 0; i < 10; ++i) {
        more.push_back(call.then([i, &runs](int sum) {
          ++runs;
          return sum + i;
        }));
      }
      for (int i = 0; i < 10; ++i) EXPECT_EQ(more[static_cast<std::size_t>(i)].get(), 3 + i);
      EXPECT_EQ(call.get(), 3);
      EXPECT_EQ(runs, 10);
    }
  });
}

TEST_P(Calls, ContinuationsMayCallAndWait) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = next_of(agent);
    auto call = agent.async<&calls::plus>(to, 0, 0);
    for (int i = 0; i < 20; ++i) {
      call = call.then([agent, to](int sum) { return agent.sync<&calls::plus>(to, sum, 1); });
    }
    EXPECT_EQ(call.get(), 20);
  });
}

TEST_P(Calls, CallsNestDeepAndBackToTheCaller) {
  run_workers(GetParam(),
              [](rpc::Agent& agent) {
                const int workers = static_cast<int>(agent.workers().size());
                EXPECT_EQ(agent.sync<&calls::relay>(next_of(agent), 3 * workers - 1),
                          agent.self().rank);
                EXPECT_EQ(agent.sync<&calls::ping_pong>(next_of(agent), 40), 40);
              },
              {.worker_threads = 2});
}

TEST_P(Calls, DeferredReplyComesWithItsFuture) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = next_of(agent);
    const auto third = agent.worker((to.rank + 1) % static_cast<int>(agent.workers().size()));
    const auto one = at::ones({2});
    EXPECT_TRUE(at::equal(agent.sync<&calls::add_later>(to, one, one, third), one * 3));
    EXPECT_TRUE(
        at::equal(agent.async<&calls::add_later>(to, one, one, agent.self()).get(), one * 3));
    EXPECT_TRUE(at::equal(agent.sync<&calls::add_by_coroutine>(to, one, one, third), one * 3));
    EXPECT_TRUE(
        at::equal(agent.sync<&calls::add_by_coroutine>(agent.self(), one, one, third), one * 3));
    EXPECT_EQ(agent.sync<&calls::chained>(to, 1), 21);
  });
}

TEST_P(Calls, InlineCallsAreAnswered) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<rpc::inline_<&calls::plus>>(next_of(agent), 2, 3), 5);
    EXPECT_EQ(agent.async<rpc::inline_<&calls::whoami>>(agent.self()).get(), agent.self().rank);
  });
}

TEST_P(Calls, ArgumentsMemoryIsNotShared) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    // The function runs on the loop, which has just read the message.
    EXPECT_EQ(agent.sync<rpc::inline_<&calls::holders>>(next_of(agent), at::ones({8})), 1);
  });
}

TEST_P(Calls, CallsOfSeveralThreadsDoNotMix) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&agent, t] {
        for (int i = 0; i < 50; ++i)
          EXPECT_EQ(agent.sync<&calls::plus>(next_of(agent), 100 * t, i), 100 * t + i);
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, Calls, testing::ValuesIn(harness::settings()), harness::name_of);
INSTANTIATE_TEST_SUITE_P(Rpc, CallsAmongMany, testing::ValuesIn(harness::settings()),
                         harness::name_of);

class CallsOfOne : public Calls {};

TEST_P(CallsOfOne, SingleWorkerCallsItself) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    EXPECT_EQ(agent.workers(), std::vector{agent.self()});
    EXPECT_EQ(agent.sync<&calls::plus>(0, 1, 2), 3);
    EXPECT_EQ(agent.async<&calls::plus>("worker0", 1, 2).get(), 3);
    EXPECT_EQ(agent.remote<&calls::plus>(agent.self(), 1, 2).to_here(), 3);
    EXPECT_EQ(agent.sync<&calls::relay>(0, 3), 0);
    const auto sparse = at::eye(3).to_sparse();
    EXPECT_TRUE(at::equal(agent.sync<&calls::add>(0, sparse, sparse).to_dense(), at::eye(3) * 2));
    EXPECT_TRUE(
        at::equal(agent.async<&calls::add>(0, sparse, sparse).get().to_dense(), at::eye(3) * 2));
    EXPECT_TRUE(at::equal(agent.remote<&calls::add>(0, sparse, sparse).to_here().to_dense(),
                          at::eye(3) * 2));
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, CallsOfOne, testing::ValuesIn(harness::settings({1})),
                         harness::name_of);

TEST(Agent, AllWorkerThreadsRunFunctions) {
  calls::come = calls::running = calls::most = 0;
  run_workers({As::Threads, "inproc", 2},
              [](rpc::Agent& agent) {
                if (agent.self().rank != 0) return;
                std::vector<Future<void>> calls;
                for (int i = 0; i < 40; ++i) calls.push_back(agent.async<&calls::meet>(1, 27));
                when_all(calls).get();
                EXPECT_EQ(calls::most, 27) << "fewer would not have met";
              },
              {.worker_threads = 27});
}

TEST(Agent, FunctionSeesItsCallsTimeLimit) {
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    for (const auto& to : {next_of(agent), agent.self()}) {
      EXPECT_FALSE(agent.sync<&calls::has_a_limit>(rpc::to(to).timeout(kNoTimeout)));
      EXPECT_TRUE(
          agent.sync<&calls::has_half_a_minute_to_a_minute>(rpc::to(to).timeout(seconds(60))));
    }
    agent.set_timeout(seconds(60));
    EXPECT_TRUE(agent.sync<&calls::has_half_a_minute_to_a_minute>(next_of(agent)))
        << "the function sees the default limit as well";
  });
}

TEST(Agent, NewDefaultLimitSparesEarlierCalls) {
  calls::is_open = false;
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    agent.set_timeout(seconds(60));
    const auto before = agent.async<&calls::wait_until_open>(1);
    agent.set_timeout(std::chrono::milliseconds(1));
    EXPECT_EQ(error_of([&] { agent.sync<&calls::wait_until_open>(1); }).blame(), Blame::Timeout);
    const auto by_default = rpc::to(1).timeout(kAgentTimeout);
    EXPECT_EQ(error_of([&] { agent.sync<&calls::wait_until_open>(by_default); }).blame(),
              Blame::Timeout);
    calls::is_open = true;
    EXPECT_EQ(before.get(), 1) << "a call made before keeps its old limit";
  });
}

TEST(Agent, TimeoutOptionIsKept) {
  run_workers({As::Threads, "inproc", 1},
              [](rpc::Agent& agent) {
                EXPECT_EQ(agent.timeout(), std::chrono::milliseconds(500));
                agent.set_timeout(std::chrono::seconds(100));
                EXPECT_EQ(agent.timeout(), std::chrono::seconds(100));
              },
              {.timeout = std::chrono::milliseconds(500)});
}

}  // namespace
}  // namespace weft
