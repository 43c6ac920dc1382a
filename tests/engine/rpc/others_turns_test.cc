// SPDX-License-Identifier: Apache-2.0
// Calls must depend neither on which thread drives the event loop nor on the fate of other calls:
// messages that arrive while a user's thread drives it, functions that block elsewhere, and values
// that cannot be sent or read.
#include <atomic>
#include <thread>

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <torch/types.h>

#include <weft/autograd.h>
#include <weft/tests/engine/rpc/refs.h>
#include <weft/training.h>

namespace turns {

using namespace weft;

at::Tensor add_one_in_place(at::Tensor tensor) { return tensor.add_(1); }
at::Tensor product(at::Tensor a, at::Tensor b) { return a.matmul(b); }
int after_gate(std::string name) { return refs::number_behind(1, std::move(name)); }
at::Tensor twice(at::Tensor tensor) { return 2 * tensor; }
Future<at::Tensor> twice_elsewhere(at::Tensor tensor, rpc::WorkerInfo where) {
  return rpc::this_agent().async<&twice>(where, tensor);
}
void call_back(rpc::WorkerInfo whom) { rpc::this_agent().async<&refs::number>(whom, 1); }
Future<int> then_block() {
  Promise<int> promise;
  promise.set(2);
  return promise.future().then([caller = rpc::this_call().caller](int value) {
    return rpc::this_agent().sync<&refs::number>(caller, value);
  });
}

std::atomic<bool> began{false}, ended{false};
void until_cancelled() {
  began = true;
  while (!rpc::this_call().cancelled) std::this_thread::yield();
  ended = true;
}

at::Tensor large() {
  static const at::Tensor kept = at::ones({256 << 20}, at::kByte);
  return kept;
}

std::atomic<rpc::Agent*> other{nullptr};  // the other agent of this process
int by_the_other(int value) { return other.load()->sync<&refs::number>("b", value); }

// Can be packed, but not unpacked.
struct Unreadable {
  int value = 0;
  template <class Packer>
  void msgpack_pack(Packer& packer) const {
    packer.pack(value);
  }
  void msgpack_unpack(const msgpack::object&) { throw 42; }
};
std::tuple<Unreadable, RRef<int>> unreadable() { return {Unreadable(), RRef<int>(1)}; }
int take_unreadable(Unreadable) { return 0; }

std::atomic<int> living{0};
struct SlowToEnd {
  explicit SlowToEnd(std::string name) : gate(std::move(name)) { ++living; }
  SlowToEnd(const SlowToEnd&) = delete;
  SlowToEnd& operator=(const SlowToEnd&) = delete;
  ~SlowToEnd() {
    refs::number_behind(0, gate);
    --living;
  }
  std::string gate;
};

struct Uncopied {
  explicit Uncopied(std::string gate = "") {
    if (!gate.empty()) refs::number_behind(0, std::move(gate));
  }
  Uncopied(const Uncopied&) { throw std::runtime_error("it is not copied"); }
  Uncopied& operator=(const Uncopied&) = delete;
  Uncopied(Uncopied&&) = default;
  int three() const { return 3; }
  int value = 0;
  WEFT_FIELDS(value)
};

struct Unmoved {
  Unmoved() = default;
  Unmoved(const Unmoved&) { throw std::runtime_error("it is not moved"); }
  Unmoved& operator=(const Unmoved&) = delete;
  int value = 0;
  WEFT_FIELDS(value)
};
Unmoved give_unmoved() { return {}; }

int take_both(at::Tensor, RRef<int> number) { return number.to_here(); }
std::tuple<at::Tensor, RRef<int>> give_both() { return {large(), RRef<int>(5)}; }
std::tuple<at::Tensor, RRef<int>> give_both_of(RRef<int> third) { return {large(), third}; }

// Ends all TCP connections of this process, as a router that forgets them; both ends live on.
void cut_tcp_connections() {
  for (int file = 3; file < 4096; ++file) {
    sockaddr_storage peer{};
    socklen_t bytes = sizeof peer;
    if (::getpeername(file, reinterpret_cast<sockaddr*>(&peer), &bytes) != 0 ||
        (peer.ss_family != AF_INET && peer.ss_family != AF_INET6)) {
      continue;
    }
    ::shutdown(file, SHUT_RDWR);
  }
}

}  // namespace turns

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::expect_counters;
using harness::run_alone;
using harness::run_one;
using harness::run_workers;
using namespace std::chrono_literals;

TEST(OthersTurns, ArrivalsIgnoreTheThreadsMode) {
  run_workers({As::Threads, "inproc", 3}, [](rpc::Agent& agent) {
    if (agent.self().rank == 1) {
      // This thread drives the loop in these modes.
      const c10::InferenceMode inference;
      const AutocastGuard autocast(torch::kCPU, torch::kBFloat16);
      EXPECT_EQ(agent.sync<&turns::after_gate>(2, std::string("no mode")), 1);
    }
    if (agent.self().rank == 0) {
      for (int i = 0; i < 100; ++i) {
        EXPECT_EQ(agent.sync<&turns::add_one_in_place>(1, at::ones({2})).sum().item<float>(), 4);
        const auto product =
            agent.sync<rpc::inline_<&turns::product>>(1, at::ones({2, 2}), at::ones({2, 2}));
        EXPECT_EQ(product.scalar_type(), torch::kFloat);
      }
      agent.sync<&refs::open_gate>(2, std::string("no mode"));
    }
  });
}

TEST(OthersTurns, ForwardedCallsAreRecorded) {
  run_workers({As::Threads, "inproc", 3}, [](rpc::Agent& agent) {
    if (agent.self().rank == 1) {
      const torch::NoGradGuard no_grad;
      EXPECT_EQ(agent.sync<&turns::after_gate>(2, std::string("forwarded")), 1);
    }
    if (agent.self().rank == 0) {
      for (int i = 0; i < 20; ++i) {
        AutogradContext context(agent);
        const auto x = at::ones({2}).requires_grad_();
        context.backward({agent.sync<&turns::twice_elsewhere>(1, x, agent.worker(2)).sum()});
        EXPECT_TRUE(at::equal(context.gradient(x), at::full({2}, 2.0)));
      }
      agent.sync<&refs::open_gate>(2, std::string("forwarded"));
    }
  });
}

TEST(OthersTurns, WaitAllCountsOnlyItsOwnCalls) {
  run_workers({As::Threads, "inproc", 3}, [](rpc::Agent& agent) {
    if (agent.self().rank == 1) {
      EXPECT_EQ(rpc::wait_all([&] { agent.sync<&turns::after_gate>(2, std::string("counted")); }),
                0u);
    }
    if (agent.self().rank == 0) {
      for (int i = 0; i < 100; ++i) agent.sync<rpc::inline_<&turns::call_back>>(1, agent.self());
      agent.sync<&refs::open_gate>(2, std::string("counted"));
    }
  });
}

TEST(OthersTurns, DoneFuturesContinuationMayBlock) {
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    EXPECT_EQ(agent.sync<rpc::inline_<&turns::then_block>>(1), 2);
  });
}

// Each agent has one thread. The function blocks it in a call of the other agent, and another
// thread must run the calls that follow.
TEST(TwoAgents, WaitForEachOtherWithAThreadEach) {
  run_alone({As::Threads, "inproc", 2},
            [](rpc::Options options) {
              const int rank = *options.rank;
              auto agent = rpc::init(rank == 0 ? "a" : "b", options);
              if (rank == 0) {
                turns::other = &agent;
                EXPECT_EQ(agent.sync<&turns::by_the_other>(rpc::to("b").timeout(20s), 5), 5);
              }
              agent.shutdown();
            },
            {.worker_threads = 1});
}

TEST(CallsToOneself, AreCancelledWhenTheAgentLeaves) {
  run_alone({As::Threads, "inproc", 1}, [](rpc::Options options) {
    turns::began = turns::ended = false;
    auto agent = rpc::init("alone", options);
    const auto call =
        agent.async<&turns::until_cancelled>(rpc::to(agent.self()).timeout(kNoTimeout));
    while (!turns::began) std::this_thread::yield();
    agent.leave();
    EXPECT_TRUE(turns::ended);
    EXPECT_EQ(error_of([&] { call.get(); }).blame(), Blame::Cancelled);
  });
}

TEST(Refused, RepliesFailTheirCallAtOnce) {
  run_one(
      [](rpc::Agent& agent) {
        const auto to = rpc::to(1).timeout(kNoTimeout);
        EXPECT_EQ(error_of([&] { agent.sync<&refs::own_three>(to); }).blame(), Blame::PeerLost);
        EXPECT_EQ(agent.sync<&refs::own_three>(to).size(), 3u);
        for (const int worker : {0, 1}) expect_counters(agent, worker, {0, 0, 0});
      },
      {.faults = {.fail_first = {{rpc::MessageKind::Reply,
                                  3}}}});  // the first failure is refused as well, and retried
}

TEST(Unreadable, ValuesFailOnlyTheirCall) {
  run_one([](rpc::Agent& agent) {
    EXPECT_EQ(
        error_of([&] { agent.sync<&turns::take_unreadable>(1, turns::Unreadable()); }).blame(),
        Blame::Caller);
    EXPECT_EQ(error_of([&] { agent.sync<&turns::unreadable>(1); }).blame(), Blame::Caller);
    EXPECT_EQ(agent.sync<&refs::number>(1, 4), 4);
    for (const int worker : {0, 1, 2}) expect_counters(agent, worker, {0, 0, 0});
  });
}

TEST(Ranks, WiderThanAnIntAreRefused) {
  run_one([](rpc::Agent& agent) {
    for (const std::int64_t rank : {(std::int64_t{1} << 32) + 1, -(std::int64_t{1} << 32) + 1}) {
      const auto error = error_of([&] { agent.sync<&refs::number>(rank, 1); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_NE(error.text().find(std::to_string(rank)), std::string::npos) << error.text();
    }
  });
}

TEST(Shutdown, WaitsForRepliesNobodyAwaits) {
  run_workers({As::Threads, "tcp", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 1) return;
    agent.sync<&turns::large>(0);  // makes the tensor, for the next call as well
    EXPECT_EQ(error_of([&] { agent.sync<&turns::large>(rpc::to(0).timeout(20ms)); }).blame(),
              Blame::Timeout);
  });
}

// The workers live on; references in the lost messages must end nevertheless.
TEST(CutConnections, LeaveNoReferencesBehind) {
  harness::run_workers({As::Threads, "tcp", 3}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) {  // the shutdown waits for the end: it would be cut as well
      refs::number_behind(0, "cut");
      return;
    }
    turns::large();
    const auto expect_cut = [&](const auto& call) {
      while (!call.done()) {
        std::this_thread::sleep_for(2ms);  // a part of it has been sent
        turns::cut_tcp_connections();
      }
      EXPECT_EQ(error_of([&] { call.get(); }).blame(), Blame::PeerLost);
      // The last cut may have hit a newer connection whose end has not been noticed: these calls
      // notice it, and it is made again.
      for (const int worker : {1, 2}) {
        const auto answers = [&] {
          try {
            return agent.sync<&refs::number>(worker, 7) == 7;
          } catch (const Error& error) {
            EXPECT_EQ(error.blame(), Blame::PeerLost);
            return false;
          }
        };
        for (int tries = 0; tries < 5 && !answers(); ++tries) {
        }
      }
    };
    {
      const RRef<int> own(agent, 4);
      expect_cut(agent.async<&turns::take_both>(1, turns::large(), own));
      const auto theirs = agent.remote<&refs::number>(2, 4);
      theirs.created().get();
      expect_cut(agent.async<&turns::take_both>(1, turns::large(), theirs));
      EXPECT_EQ(theirs.to_here(), 4);
      expect_cut(agent.async<&turns::give_both>(1));
      expect_cut(agent.async<&turns::give_both_of>(1, theirs));
    }
    for (const int worker : {0, 1, 2}) expect_counters(agent, worker, {0, 0, 0});
    refs::open_gate("cut");
  });
}

TEST(Values, AreDestroyedOutsideTheLoop) {
  run_one([](rpc::Agent& agent) {
    agent.remote<turns::SlowToEnd>(1, std::string("the end")).created().get();
    EXPECT_EQ(agent.sync<&refs::number>(rpc::to(1).timeout(20s), 3), 3)
        << "the destructor blocks the loop";
    EXPECT_EQ(turns::living, 1);
    agent.sync<&refs::open_gate>(1, std::string("the end"));
    expect_counters(agent, 1, {0, 0, 0});
    for (const Deadline limit = Deadline::in(20s); turns::living != 0 && !limit.passed();)
      std::this_thread::yield();
    EXPECT_EQ(turns::living, 0) << "the destructor has not ended";
  });
}

TEST(Values, ThrowingCopyFailsOnlyTheFetch) {
  run_one([](rpc::Agent& agent) {
    const auto value = agent.remote<turns::Uncopied>(agent.self(), std::string("copies"));
    const auto fetched = value.fetch();
    const auto method = value.async<&turns::Uncopied::three>();
    refs::open_gate("copies");
    EXPECT_THROW(fetched.get(), std::runtime_error);
    EXPECT_EQ(method.get(), 3);
  });
}

// The result of a call to oneself is moved, not sent.
TEST(Values, ThrowingMoveFailsOnlyItsCall) {
  run_one([](rpc::Agent& agent) {
    const auto called = agent.async<&turns::give_unmoved>(agent.self());
    try {
      static_cast<void>(called.get());
      ADD_FAILURE() << "the call returns a value";
    } catch (const rpc::RemoteError& error) {
      EXPECT_NE(error.text().find("it is not moved"), std::string::npos) << error.what();
    }
    while (agent.debug_info().handlers_busy != 0) std::this_thread::yield();
    EXPECT_EQ(agent.debug_info().calls_waiting, 0u);
  });
}

}  // namespace
}  // namespace weft
