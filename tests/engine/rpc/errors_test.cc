// SPDX-License-Identifier: Apache-2.0
// Calls that fail.
#include <atomic>
#include <csignal>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/engine/future/when_all.h>
#include <weft/tests/engine/rpc/workers.h>

namespace wrong {

using namespace weft;

// An exception type that only this program has.
struct Overdrawn : std::runtime_error {
  using runtime_error::runtime_error;
};
int throws_own() { throw Overdrawn("by ten"); }
struct Bare {};
int throws_bare() { throw Bare(); }
struct NoText : std::exception {
  const char* what() const noexcept override { return nullptr; }
};
int throws_no_text() { throw NoText(); }
int throws_string() { throw std::string("a string"); }
int throws_literal() { throw "a literal"; }
int throws_nested() {
  try {
    throw std::runtime_error("the disk is full");
  } catch (...) {
    std::throw_with_nested(std::runtime_error("nothing was saved"));
  }
}
int throws_much() { throw std::runtime_error(std::string(8 << 20, 'x')); }
int throws_weft() { throw Error(Blame::Busy, "no room"); }
int throws_libtorch() { return at::ones({2, 3}).matmul(at::ones({2, 3})).size(0); }
void look_at(const int&) {}
at::Tensor matmul(at::Tensor a, at::Tensor b) { return a.matmul(b); }

int plus(int a, int b) { return a + b; }
std::string greet() { return "hello"; }
int throws(std::string text) { throw std::runtime_error(text); }
int throws_odd() { throw 7; }
int waits(int for_whom) { return rpc::this_agent().sync<&plus>(for_whom, 1, 2); }
Future<int> throws_early() { throw std::runtime_error("early"); }
Future<int> fails_late() {
  Promise<int> promise;
  promise.set_error(std::make_exception_ptr(std::runtime_error("late")));
  return promise.future();
}

// Runs until it is cancelled, or for `milliseconds`.
int slow(int milliseconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  while (std::chrono::steady_clock::now() < end && !rpc::this_call().cancelled)
    std::this_thread::yield();
  return rpc::this_call().cancelled ? 1 : 0;
}
std::atomic<int> come{0};
void i_have_come() { ++come; }
// Holds no thread, and never answers.
Future<void> never() {
  static Promise<void> promise;
  return promise.future();
}
// Returns milliseconds by the callee's clock.
std::int64_t clock_there() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
std::atomic<std::int64_t> held_until{0};
void hold() {
  while (held_until == 0 || clock_there() < held_until) std::this_thread::yield();
}
void hold_until(std::int64_t when) { held_until = when; }
std::atomic<int> done_late{0};
int do_late() { return ++done_late; }
int late_ones() { return done_late; }
at::Tensor quantized() { return at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8); }
int takes_tensor(at::Tensor) { return 0; }

}  // namespace wrong

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::run_workers;
using harness::Setting;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

class Errors : public testing::TestWithParam<Setting> {};
// Tests that depend on the number of workers.
class ErrorsAmongMany : public Errors {};

int next_of(const rpc::Agent& agent) { return harness::after(agent, 1).rank; }

TEST_P(ErrorsAmongMany, UnknownDestinationIsCallersError) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const int rank : {-1, 99}) {
      EXPECT_EQ(error_of([&] { agent.sync<&wrong::plus>(rank, 1, 2); }).blame(), Blame::Caller);
      EXPECT_EQ(error_of([&] { agent.async<&wrong::plus>(rank, 1, 2).get(); }).blame(),
                Blame::Caller);
    }
    for (const int rank : {-1, 99}) {
      EXPECT_EQ(error_of([&] { agent.remote<&wrong::plus>(rank, 1, 2); }).blame(), Blame::Caller);
    }
    static_assert(!std::is_constructible_v<rpc::Destination, double>, "a rank is a whole number");
    const auto error = error_of([&] { agent.sync<&wrong::plus>("nobody", 1, 2); });
    EXPECT_NE(error.text().find("'nobody' cannot be found"), std::string::npos) << error.what();
  });
}

TEST_P(ErrorsAmongMany, ThrownTextArrivesWithItsLines) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const std::string lines = "first\nsecond";
    for (const auto& worker : agent.workers()) {
      const auto expect_lines = [&](const auto& call) {
        try {
          call();
          ADD_FAILURE() << "no error";
        } catch (const rpc::RemoteError& error) {
          EXPECT_EQ(error.worker(), worker.name);
          EXPECT_EQ(error.function(), "wrong::throws");
          EXPECT_EQ(error.text(), lines);
          EXPECT_EQ(error.blame(), Blame::Remote);
          EXPECT_NE(std::string(error.what()).find(lines), std::string::npos);
        }
      };
      expect_lines([&] { agent.sync<&wrong::throws>(worker, lines); });
      expect_lines([&] { agent.async<&wrong::throws>(worker, lines).get(); });
      const auto made = agent.remote<&wrong::throws>(worker, lines);
      EXPECT_NE(error_of([&] { made.to_here(); }).text().find(lines), std::string::npos);
    }
    EXPECT_EQ(error_of([&] { agent.sync<&wrong::throws_odd>(next_of(agent)); }).blame(),
              Blame::Remote);
  });
}

// Makes a call that the typed interface would not compile.
Future<int> call_by_hand(rpc::Agent& agent, int to, const call::Function& function,
                         const std::function<void(codec::Packer&)>& pack) {
  const auto& core = agent.shared_core();
  Promise<int> promise(call::detail::CoreCalls::executor(*core));
  auto future = promise.future();
  call::detail::CoreCalls::send_call(*core, function, {to, 20s}, pack,
                                     std::make_unique<call::PendingResult<int>>(promise));
  return future;
}

TEST_P(Errors, WrongArgumentsAreCallersError) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto& plus = call::detail::Called<call::detail::FunctionBody<&wrong::plus>>::entered;
    const int to = next_of(agent);
    const auto with = [&](auto... arguments) {
      return error_of([&] {
        call_by_hand(agent, to, plus, [&](codec::Packer& packer) {
          packer.pack_array(sizeof...(arguments));
          (packer.pack(arguments), ...);
        }).get();
      });
    };
    EXPECT_EQ(with(1, 2, 3).blame(), Blame::Caller);
    EXPECT_EQ(with(1).blame(), Blame::Caller);
    EXPECT_EQ(with(1, std::string("two")).blame(), Blame::Caller);
    EXPECT_NE(with(1).text().find("arguments cannot be decoded"), std::string::npos)
        << with(1).what();
    EXPECT_EQ(agent.sync<&wrong::plus>(to, 1, 2), 3) << "the callee must still serve";
  });
}

TEST_P(Errors, UndecodableResultNamesTheCall) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto& greet = call::detail::Called<call::detail::FunctionBody<&wrong::greet>>::entered;
    const auto error = error_of([&] {
      call_by_hand(agent, next_of(agent), greet, [&](codec::Packer& packer) {
        packer.pack_array(0);
      }).get();
    });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_EQ(error.text(),
              "wrong::greet on " + describe(harness::after(agent, 1)) + ", called by " +
                  describe(agent.self()) +
                  ": its result cannot be decoded: these bytes hold a value of another type");
  });
}

TEST_P(Errors, UnreadCallReturnsItsReferences) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto& plus = call::detail::Called<call::detail::FunctionBody<&wrong::plus>>::entered;
    const int to = next_of(agent);
    const RRef<int> mine(agent, 1);
    const auto error = error_of([&] {
      call_by_hand(agent, to, plus, [&](codec::Packer& packer) {
        packer.pack_array(2);
        packer.pack(mine);
        packer.pack(1);
      }).get();
    });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_EQ(agent.debug_info().forks, 0U);
  });
}

TEST_P(Errors, OperatorErrorListsItsOverloads) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int to = next_of(agent);
    const auto error = error_of([&] { agent.sync_op("aten::matmul", to, at::ones({2}), "b"); });
    EXPECT_NE(error.text().find("no overload of aten::matmul takes these 2 arguments"),
              std::string::npos)
        << error.what();
    EXPECT_NE(error.text().find("aten::matmul(Tensor self, Tensor other)"), std::string::npos)
        << error.what();
    EXPECT_NE(
        error_of([&] { agent.sync_op("aten::nonsense", to, 1); }).text().find("aten::nonsense"),
        std::string::npos);
    const auto several = error_of([&] { agent.sync_op("aten::split", to, at::ones({2}), 1); });
    EXPECT_NE(several.text().find("call rpc::run_operator_for_list"), std::string::npos)
        << several.what();
    const auto no_such =
        error_of([&] { agent.sync_op("aten::add.Tensor", to, at::ones({2}), "b"); });
    EXPECT_NE(no_such.text().find("no overload of aten::add.Tensor takes these 2 arguments"),
              std::string::npos)
        << no_such.what();
    EXPECT_NE(no_such.text().find("aten::add.Scalar(Tensor self, Scalar other"), std::string::npos)
        << no_such.what();
    const std::vector<std::pair<std::function<void()>, std::string>> not_served{
        {[&] { agent.sync_op("aten::from_file", to, "file", true, 8); }, "it opens files"},
        {[&] { agent.sync_op("aten::_conj", to, at::ones({2})); }, "it is internal to libtorch"},
        {[&] { agent.sync_op("aten::max_pool2d_with_indices_backward", to, at::ones({2})); },
         "it is libtorch's own step"},
        {[&] { agent.sync_op("aten::native_batch_norm", to, at::ones({2})); },
         "it is libtorch's own step"},
        {[&] { agent.sync_op("aten::sparse_coo_tensor", to, at::ones({2})); },
         "it does not check the indices"},
        {[&] { agent.sync_op("aten::unsafe_split", to, at::ones({2}), 1); }, "it skips checks"},
        {[&] {
           const at::Tensor none;
           agent.sync_op("aten::segment_reduce", to, at::ones({2}), "sum", none, none, none, 0,
                         true);
         },
         "it skips checks"},
        {[&] { agent.sync_op("prim::ones", to, at::ones({2})); }, "only operators of aten"}};
    for (const auto& [call, text] : not_served) {
      EXPECT_NE(error_of(call).text().find("cannot be called by name: " + text), std::string::npos)
          << error_of(call).text();
    }
    EXPECT_EQ(error_of([&] {
                agent.sync<&wrong::matmul>(to, at::ones({2, 3}), at::ones({2, 3}));
              }).blame(),
              Blame::Remote);
  });
}

bool records() { return at::GradMode::is_enabled(); }
void records_no_more() { at::GradMode::set_enabled(false); }

TEST_P(Errors, GradModeDoesNotLeakToLaterCalls) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int to = next_of(agent);
    for (int i = 0; i < 20; ++i) {
      agent.sync<&records_no_more>(to);
      const auto error = error_of([&] { agent.sync_op("aten::set_grad_enabled", to, false); });
      EXPECT_NE(error.text().find("returns no tensors"), std::string::npos) << error.what();
    }
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(agent.sync<&records>(to));
  });
}

TEST_P(Errors, OperatorWithBadTypesIsNotRun) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int to = next_of(agent);
    const at::Tensor ones = at::ones({4});
    const auto expect_refused = [](const auto& call, const std::string& why) {
      const std::string text = error_of(call).text();
      EXPECT_NE(text.find(why), std::string::npos) << text;
    };
    for (const auto& [name, by] :
         {std::pair("aten::remainder", 0), std::pair("aten::floordiv", -1)}) {
      expect_refused([&] { agent.sync_op(name, to, std::numeric_limits<int>::min(), by); },
                     "returns no tensors");
    }
    for (const std::int64_t type : {-100, -1, 77, 1000}) {
      const std::string why = "dtype is " + std::to_string(type);
      expect_refused([&] { agent.sync_op("aten::view.dtype", to, ones, type); }, why);
      expect_refused([&] { agent.sync_op("aten::zeros", to, std::vector<std::int64_t>{2}, type); },
                     why);
    }
    EXPECT_EQ(agent.sync_op("aten::view.dtype", to, ones, static_cast<std::int64_t>(at::kInt))
                  .scalar_type(),
              at::kInt);
  });
}

TEST_P(Errors, OperatorOverloadMayBeNamed) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const at::Tensor ones = at::ones({2, 2});
    for (const int to : {agent.self().rank, next_of(agent)}) {
      EXPECT_TRUE(agent.sync_op("aten::add.Scalar", to, ones, 2.0).equal(ones * 3));
      EXPECT_TRUE(agent.sync_op("aten::linear", to, ones, ones, at::Tensor()).equal(ones * 2));
      EXPECT_TRUE(agent.sync_op("aten::eq", to, ones, true).all().item<bool>())
          << "a bool is accepted as a number";
      EXPECT_EQ(agent.sync_op("aten::full", to, std::vector<std::int64_t>{2}, true).scalar_type(),
                at::kBool);
      EXPECT_EQ(
          agent
              .sync<&rpc::run_operator_for_list>(
                  to, "aten::split.Tensor", std::vector<rpc::OperatorValue>{ones, std::int64_t{1}})
              .size(),
          2U);
      error_of([&] { agent.sync_op("aten::add.Nonsense", to, ones, 2.0); });
    }
  });
}

// Also for values that this worker owns, and before and after the creation's reply has arrived.
TEST_P(Errors, FailedCreationAlwaysSaysWhy) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const auto& to : {agent.self(), harness::after(agent, 1)}) {
      const auto expect_text = [&](const RRef<int>& made, const std::string& function,
                                   const std::string& thrown) {
        const auto expect_error = [&](auto use) {
          try {
            use();
            ADD_FAILURE() << "no error";
          } catch (const rpc::CreationError& error) {
            EXPECT_EQ(error.blame(), Blame::Remote) << error.what();
            EXPECT_EQ(error.text().find("RRef " + rref::to_text(made.handle()->id())), 0U)
                << error.text();
            const std::string why =
                " was not created: " + function + " on " + to.name + " threw: " + thrown;
            EXPECT_NE(error.text().find(why), std::string::npos) << error.text();
            EXPECT_EQ(error.text().find("frame #"), std::string::npos) << error.text();
          }
        };
        for (int again = 0; again < 2; ++again) {
          expect_error([&] { made.to_here(); });
          expect_error([&] { made.sync<&wrong::look_at>(); });
          expect_error([&] { made.created().get(); });
        }
      };
      expect_text(agent.remote<&wrong::throws_own>(to), "wrong::throws_own",
                  "wrong::Overdrawn: by ten");
      expect_text(agent.remote<&wrong::throws_odd>(to), "wrong::throws_odd",
                  "an object of type int, which is not a std::exception");
      expect_text(agent.remote<&wrong::throws_weft>(to), "wrong::throws_weft", "no room [Busy");
      expect_text(agent.remote<&wrong::throws_libtorch>(to), "wrong::throws_libtorch", "");
    }
  });
}

TEST_P(Errors, AnyThrownObjectArrivesAsText) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const int to : {agent.self().rank, next_of(agent)}) {
      const auto thrown_by = [&](auto call) {
        const auto error = error_of(call);
        EXPECT_EQ(error.blame(), Blame::Remote);
        return error.text();
      };
      EXPECT_THAT(thrown_by([&] { agent.sync<&wrong::throws_no_text>(to); }),
                  HasSubstr("wrong::NoText with a null what()"));
      EXPECT_THAT(thrown_by([&] { agent.sync<&wrong::throws_string>(to); }), HasSubstr("a string"));
      EXPECT_THAT(thrown_by([&] { agent.sync<&wrong::throws_literal>(to); }),
                  HasSubstr("a literal"));
      EXPECT_THAT(thrown_by([&] { agent.sync<&wrong::throws_nested>(to); }),
                  HasSubstr("nothing was saved, caused by: the disk is full"));
      const std::string much = thrown_by([&] { agent.sync<&wrong::throws_much>(to); });
      EXPECT_THAT(much, HasSubstr("of 8388608 bytes"));
      EXPECT_LT(much.size(), 32U << 10);
      EXPECT_EQ(agent.sync<&wrong::plus>(to, 1, 2), 3) << "the callee must still serve";
    }
  });
}

TEST_P(Errors, UnknownExceptionTypeIsNamed) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const int to : {agent.self().rank, next_of(agent)}) {
      const auto own = error_of([&] { agent.sync<&wrong::throws_own>(to); });
      EXPECT_EQ(own.blame(), Blame::Remote);
      EXPECT_NE(own.text().find("wrong::Overdrawn: by ten"), std::string::npos) << own.what();
      EXPECT_NE(own.text().find("worker" + std::to_string(to)), std::string::npos) << own.what();
      EXPECT_NE(error_of([&] { agent.sync<&wrong::throws_bare>(to); }).text().find("wrong::Bare"),
                std::string::npos);
    }
  });
}

TEST_P(Errors, MissingFunctionIsUnsupported) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto& plus = call::detail::Called<call::detail::FunctionBody<&wrong::plus>>::entered;
    const int to = next_of(agent);
    const auto nothing = [](codec::Packer& packer) { packer.pack_array(0); };
    call::Function removed = plus;
    removed.name = "wrong::removed";
    removed.id.name ^= 1;
    const auto unknown = error_of([&] { call_by_hand(agent, to, removed, nothing).get(); });
    EXPECT_EQ(unknown.blame(), Blame::Unsupported);
    EXPECT_NE(unknown.text().find("wrong::removed"), std::string::npos) << unknown.what();
    EXPECT_NE(unknown.text().find("expose"), std::string::npos) << unknown.what();
    call::Function other = plus;
    other.signature = "int (int)";
    other.id.signature ^= 1;
    const auto mismatch = error_of([&] { call_by_hand(agent, to, other, nothing).get(); });
    EXPECT_EQ(mismatch.blame(), Blame::Unsupported);
    for (const char* shown : {"int (int)", "int (int, int)"}) {
      EXPECT_NE(mismatch.text().find(shown), std::string::npos)
          << "both signatures are shown: " << mismatch.what();
    }
    EXPECT_EQ(agent.sync<&wrong::plus>(to, 1, 2), 3) << "the callee must still serve";
  });
}

TEST_P(Errors, ErrorsAreStickyAndAllAreSeen) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::vector<Future<int>> calls;
    for (int i = 0; i < 20; ++i) calls.push_back(agent.async<&wrong::throws>(next_of(agent), "no"));
    EXPECT_EQ(error_of([&] { when_all(calls).get(); }).blame(), Blame::Remote);
    for (int again = 0; again < 2; ++again) {
      for (auto& call : calls) EXPECT_EQ(error_of([&] { call.get(); }).blame(), Blame::Remote);
    }
  });
}

TEST_P(Errors, BlockingInlineCallGetsAdvice) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int here = agent.self().rank, to = next_of(agent);
    for (const int some : {here, to}) EXPECT_EQ(agent.sync<&wrong::waits>(some, here), 3);
    // The function blocks the loop that would receive its answer. (A call to itself might be
    // answered by one of its own threads before the wait begins.)
    const auto error = error_of([&] { agent.sync<rpc::inline_<&wrong::waits>>(to, here); });
    EXPECT_NE(error.text().find("without rpc::inline_"), std::string::npos) << error.text();
  });
}

TEST_P(Errors, DeferredErrorsReachTheCaller) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    for (const int to : {agent.self().rank, next_of(agent)}) {
      const auto kept = agent.remote<&wrong::throws_early>(to);
      EXPECT_NE(error_of([&] { kept.to_here(); }).text().find("early"), std::string::npos);
      EXPECT_NE(error_of([&] { agent.sync<&wrong::throws_early>(to); }).text().find("early"),
                std::string::npos);
      EXPECT_NE(error_of([&] { agent.async<&wrong::throws_early>(to).get(); }).text().find("early"),
                std::string::npos);
      EXPECT_NE(error_of([&] { agent.sync<&wrong::fails_late>(to); }).text().find("late"),
                std::string::npos);
      EXPECT_NE(error_of([&] { agent.async<&wrong::fails_late>(to).get(); }).text().find("late"),
                std::string::npos);
      const auto late = agent.remote<&wrong::fails_late>(to);
      EXPECT_NE(error_of([&] { late.to_here(); }).text().find("late"), std::string::npos);
    }
  });
}

TEST_P(Errors, CallsLimitOverridesTheDefault) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int to = next_of(agent);
    EXPECT_EQ(error_of([&] { agent.sync<&wrong::slow>(rpc::to(to).timeout(50ms), 60000); }).blame(),
              Blame::Timeout);
    auto late = agent.async<&wrong::slow>(rpc::to(to).timeout(50ms), 60000);
    const Error error = error_of([&] { late.get(); });
    EXPECT_EQ(error.blame(), Blame::Timeout);
    EXPECT_NE(error.text().find("no reply within 50 ms; "), std::string::npos) << error.text();
    EXPECT_NE(error.text().find("rpc::to(worker).timeout("), std::string::npos) << error.text();
    EXPECT_EQ(agent.sync<&wrong::slow>(to, 0), 0);
    const Error later =
        error_of([&] { agent.sync<&wrong::slow>(rpc::to(to).timeout(50ms), 60000); });
    const bool is_self = agent.worker(to).rank == agent.self().rank;
    EXPECT_NE(
        later.text().find(is_self ? "its function still runs" : ") works: its function runs there"),
        std::string::npos)
        << later.text();
    agent.set_timeout(1ms);
    for (const auto limit : {5s, 0s}) {
      EXPECT_EQ(agent.sync<&wrong::slow>(rpc::to(to).timeout(limit), 20), 0);
      EXPECT_EQ(agent.async<&wrong::slow>(rpc::to(to).timeout(limit), 20).get(), 0);
    }
    EXPECT_EQ(error_of([&] { agent.sync<&wrong::slow>(to, 60000); }).blame(), Blame::Timeout);
    EXPECT_EQ(agent.sync<&wrong::slow>(rpc::to(to).timeout(kNoTimeout), 20), 0);
    agent.set_timeout(kNoTimeout);
    EXPECT_EQ(agent.timeout(), 0ms);
    agent.set_timeout(0ms);
    EXPECT_EQ(agent.sync<&wrong::slow>(to, 20), 0);
    agent.set_timeout(60s);
  });
}

TEST_P(Errors, WaitForAFutureMayHaveALimit) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    auto call = agent.async<&wrong::slow>(next_of(agent), 200);
    EXPECT_EQ(error_of([&] { call.wait(5ms); }).blame(), Blame::Timeout);
    EXPECT_EQ(call.get(), 0);
  });
}

TEST_P(Errors, ExpiredQueuedCallIsNotRun) {
  wrong::held_until = 0;
  wrong::done_late = 0;
  run_workers(GetParam(),
              [](rpc::Agent& agent) {
                if (agent.self().rank != 0) return;
                const auto held = agent.async<&wrong::hold>(1);  // takes the only thread there
                const auto late = agent.async<&wrong::do_late>(rpc::to(1).timeout(20ms));
                const auto made = agent.remote<&wrong::do_late>(rpc::to(1).timeout(20ms));
                const auto patient = agent.async<&wrong::late_ones>(rpc::to(1).timeout(0ms));
                const std::int64_t arrived = agent.sync<rpc::inline_<&wrong::clock_there>>(1);
                agent.sync<rpc::inline_<&wrong::hold_until>>(1, arrived + 25);
                EXPECT_EQ(error_of([&] { late.get(); }).blame(), Blame::Timeout);
                EXPECT_THROW(made.to_here(), rpc::CreationError);
                held.get();
                EXPECT_EQ(patient.get(), 0);
                EXPECT_EQ(agent.sync<&wrong::late_ones>(1), 0);
              },
              {.worker_threads = 1});
}

TEST_P(Errors, UnsendableValueIsRefusedAtSender) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int to = next_of(agent);
    EXPECT_EQ(
        error_of([&] { agent.async<&wrong::takes_tensor>(to, wrong::quantized()).get(); }).blame(),
        Blame::Caller);
    const auto error = error_of([&] { agent.sync<&wrong::quantized>(to); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("the result of wrong::quantized cannot be sent"), std::string::npos)
        << error.what();
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, Errors, testing::ValuesIn(harness::settings()), harness::name_of);
INSTANTIATE_TEST_SUITE_P(Rpc, ErrorsAmongMany, testing::ValuesIn(harness::settings()),
                         harness::name_of);

TEST(AgentLife, ReferenceNeedsAnAgentNotAGroup) {
  harness::run_ranks(
      As::Threads, 2,
      [](ProcessGroup& group) {
        const auto error = error_of([] { RRef<int>(1); });
        EXPECT_EQ(error.blame(), Blame::Caller);
        EXPECT_EQ(error_of([] { rpc::Agent().remote<&wrong::plus>(0, 1, 2); }).blame(),
                  Blame::Caller);
        EXPECT_EQ(error_of([] { RRef<int>(rpc::Agent(), 1); }).blame(), Blame::Caller);
        group.barrier().wait();
      },
      {.backend = "tcp"});
}

TEST(AgentLife, CallsAfterShutdownAreRefused) {
  run_workers({As::Threads, "inproc", 2}, [](rpc::Agent& agent) {
    agent.shutdown({.timeout = 30s});
    for (const auto& error : {error_of([&] { agent.sync<&wrong::plus>(0, 1, 2); }), error_of([&] {
                                agent.async<&wrong::plus>(agent.self(), 1, 2).get();
                              }),
                              error_of([&] { agent.remote<&wrong::plus>(1, 1, 2).to_here(); }),
                              error_of([&] { agent.sync_op("aten::add", 1, at::ones({1}), 1); })}) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_NE(error.text().find("not initialized"), std::string::npos) << error.text();
    }
  });
}

TEST(AgentLife, ThrownErrorIsLoggedWhereItRan) {
  for (const int to : {0, 1}) {
    const std::string logged = harness::warnings_of(2, [to](rpc::Agent& agent) {
      if (agent.self().rank == 0) error_of([&] { agent.sync<&wrong::throws>(to, "no luck"); });
    });
    for (const char* part : {"wrong::throws", "worker0", "no luck"}) {
      EXPECT_NE(logged.find(part), std::string::npos) << logged;
    }
  }
}

TEST(AgentLife, ThisAgentNeedsARunningCall) {
  EXPECT_EQ(error_of([] { rpc::this_agent(); }).blame(), Blame::Caller);
  EXPECT_EQ(error_of([] { rpc::this_call(); }).blame(), Blame::Caller);
}

class AgentFaults : public testing::TestWithParam<Setting> {};

// Both functions and operators, by sync and by async.
TEST_P(AgentFaults, DelayedCallsTimeOutOrArrive) {
  run_workers(GetParam(),
              [](rpc::Agent& agent) {
                const int to = next_of(agent);
                const auto one = at::ones({1});
                const auto expect_timeouts = [&](const rpc::Destination& destination) {
                  EXPECT_EQ(error_of([&] { agent.sync<&wrong::plus>(destination, 1, 2); }).blame(),
                            Blame::Timeout);
                  EXPECT_EQ(
                      error_of([&] { agent.sync_op("aten::add", destination, one, 1); }).blame(),
                      Blame::Timeout);
                  const auto function = agent.async<&wrong::plus>(destination, 1, 2);
                  const auto operation = agent.async_op("aten::add", destination, one, 1);
                  EXPECT_EQ(error_of([&] { function.get(); }).blame(), Blame::Timeout);
                  EXPECT_EQ(error_of([&] { operation.get(); }).blame(), Blame::Timeout);
                };
                const auto expect_results = [&](const rpc::Destination& destination) {
                  const auto function = agent.async<&wrong::plus>(destination, 1, 2);
                  EXPECT_TRUE(at::equal(agent.sync_op("aten::add", destination, one, 1), one + 1));
                  EXPECT_EQ(agent.sync<&wrong::plus>(destination, 1, 2), 3);
                  EXPECT_EQ(function.get(), 3);
                };
                expect_timeouts(rpc::to(to).timeout(20ms));
                expect_results(to);
                agent.set_timeout(1ms);
                expect_timeouts(to);
                expect_results(rpc::to(to).timeout(0ms));
                agent.set_timeout(60s);
              },
              {.faults = {.delay = {{rpc::MessageKind::Call, 150ms}}}});
}

INSTANTIATE_TEST_SUITE_P(Rpc, AgentFaults, testing::ValuesIn(harness::settings_of_faults()),
                         harness::name_of);

TEST(CallFaults, DefaultsInjectNoFaults) {
  const rpc::Options options;
  EXPECT_TRUE(options.faults.fail_first.empty() && options.faults.drop.empty() &&
              options.faults.delay.empty());
  EXPECT_EQ(options.worker_threads, 16);
  EXPECT_EQ(options.timeout, 60s);
}

TEST(CallFaults, DroppedAndRefusedCallsFail) {
  run_workers(
      {As::Threads, "inproc", 2},
      [](rpc::Agent& agent) {
        const int to = next_of(agent);
        EXPECT_EQ(error_of([&] { agent.sync<&wrong::plus>(to, 1, 2); }).blame(), Blame::PeerLost);
        EXPECT_EQ(
            error_of([&] { agent.sync<&wrong::plus>(rpc::to(to).timeout(20ms), 1, 2); }).blame(),
            Blame::Timeout);
      },
      {.faults = {.fail_first = {{rpc::MessageKind::Call, 1}}, .drop = {rpc::MessageKind::Call}}});
  EXPECT_EQ(error_of([] {
              rpc::init("a", {.rank = 0,
                              .world_size = 1,
                              .store = c10::make_intrusive<c10d::HashStore>(),
                              .faults = {.delay = {{rpc::MessageKind::Call, -1ms}}}});
            }).blame(),
            Blame::Caller);
}

// The function learns that its caller no longer waits.
TEST(AgentLife, TimeoutCancelsTheFunction) {
  run_workers({As::Threads, "shm", 2}, [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    error_of([&] { agent.sync<&wrong::slow>(rpc::to(1).timeout(20ms), 600'000); });
    while (agent.sync<&wrong::plus>(1, 1, 1) != 2) {
    }
  });  // the graceful shutdown ends though the function would run for ten minutes
}

class KilledWorker : public testing::TestWithParam<std::string> {};

TEST_P(KilledWorker, FailsAllItsPendingCallsAtOnce) {
  const std::string transport = GetParam();
  harness::Processes workers(3, [&](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank),
                                 {.rank = rank, .world_size = 3, .transports = {transport}});
    if (rank == 1) {
      harness::Processes::say("up");
      agent.sync<&wrong::slow>(1, 600'000);
    }
    std::vector<Future<void>> calls;
    for (int i = 0; i < 50; ++i)
      calls.push_back(agent.async<&wrong::never>(rpc::to(1).timeout(0ms)));
    EXPECT_EQ(agent.sync<&wrong::plus>(1, 1, 2), 3);
    harness::Processes::say("calling");
    for (const auto& call : calls)
      EXPECT_EQ(error_of([&] { call.wait(20s); }).blame(), Blame::PeerLost);
    EXPECT_EQ(error_of([&] { agent.sync<&wrong::plus>(rpc::to(1).timeout(2s), 1, 2); }).blame(),
              Blame::PeerLost);
    EXPECT_EQ(agent.sync<&wrong::plus>(2 - rank, 1, 2), 3)
        << "the survivors must still reach each other";
    const auto told = agent.async<&wrong::i_have_come>(2 - rank);
    // The other may leave before its reply has arrived.
    while (wrong::come == 0 || !told.done()) std::this_thread::yield();
    agent.leave();
  });
  workers.wait_for(1, "up");
  workers.wait_for(0, "calling");
  workers.wait_for(2, "calling");
  workers.signal(1, SIGKILL);
  workers.expect_success({1});
}

TEST_P(KilledWorker, FailsCallsWithoutAConnection) {
  const std::string transport = GetParam();
  void* const shared =
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& killed = *new (shared) std::atomic<bool>(false);
  harness::Processes workers(2, [&](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank),
                                 {.rank = rank, .world_size = 2, .transports = {transport}});
    harness::Processes::say("up");
    while (rank == 1 || !killed) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(error_of([&] { agent.sync<&wrong::plus>(rpc::to(1).timeout(0ms), 1, 2); }).blame(),
              Blame::PeerLost);
    agent.leave();
  });
  workers.wait_for(0, "up");
  workers.wait_for(1, "up");
  workers.signal(1, SIGKILL);
  killed = true;
  workers.expect_success({1});
  ::munmap(shared, 4096);
}

INSTANTIATE_TEST_SUITE_P(Rpc, KilledWorker, testing::Values("shm", "tcp"),
                         [](const auto& transport) { return transport.param; });

}  // namespace
}  // namespace weft
