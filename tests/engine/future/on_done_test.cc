// SPDX-License-Identifier: Apache-2.0
// Continuations of a future run in order, each once, on the future's executor.
#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/log.h>
#include <weft/error.h>
#include <weft/future.h>
#include <weft/tests/engine/future/failures.h>

namespace weft {
namespace {

using testing::ElementsAre;

Future<int> one_more(Future<int> future) {
  const int value = co_await future;
  co_return value + 1;
}

TEST(OnDone, RunsInTheOrderOfRegistration) {
  Promise<int> promise;
  std::vector<std::string> order;
  promise.future().on_done([&] { order.emplace_back("plain"); });
  promise.future().on_done(
      [&](const Future<int>& future) { order.emplace_back(future.failed() ? "failed" : "good"); });
  const auto last = promise.future().then([&](const Future<int>&) { order.emplace_back("then"); });
  promise.set_error(failure("x"));
  last.get();
  EXPECT_THAT(order, ElementsAre("plain", "failed", "then"));
}

// An executor whose loop and threads are this thread: tasks that must not run inside a turn wait
// until a caller blocks or calls next().
class OneThread final : public detail::Executor {
 public:
  const char* name() const override { return "one thread"; }
  bool drive(const std::function<bool()>& done, Deadline /*deadline*/,
             const void* /*awaited*/) override {
    while (!done() && next()) {
    }
    return done();
  }
  void block(const std::function<void()>& wait) override { wait(); }
  void recall(const void* /*awaited*/) noexcept override {}
  bool inside() const override { return inside_; }
  void run(Task task) override { tasks_.push_back(std::move(task)); }

  bool next() {
    if (tasks_.empty()) return false;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    task();
    return true;
  }
  void drop() { tasks_.clear(); }
  void in_a_turn(const std::function<void()>& body) {
    inside_ = true;
    body();
    inside_ = false;
  }

 private:
  bool inside_ = false;
  std::deque<Task> tasks_;
};

TEST(OnDone, LateOneWaitsForThoseBefore) {
  const auto executor = std::make_shared<OneThread>();
  const Promise<int> promise(executor);
  std::vector<std::string> order;
  promise.future().on_done([&] { order.emplace_back("first"); });
  promise.future().on_done([&] { order.emplace_back("second"); });
  executor->in_a_turn([&] { promise.set(1); });
  promise.future().then([&](int) { order.emplace_back("late"); });
  EXPECT_THAT(order, ElementsAre());
  EXPECT_TRUE(executor->next());
  EXPECT_THAT(order, ElementsAre("first", "second", "late"));
  promise.future().on_done([&] { order.emplace_back("at once"); });
  EXPECT_EQ(order.back(), "at once");
  EXPECT_FALSE(executor->next());
}

TEST(OnDone, BlockingOneLetsOthersRun) {
  for (const std::shared_ptr<OneThread>& executor :
       {std::make_shared<OneThread>(), std::shared_ptr<OneThread>()}) {
    const Promise<int> promise(executor);
    const Promise<int> other(executor);
    const auto waits =
        promise.future().then([&](int value) { return value + other.future().get(); });
    int lights = 0;
    promise.future().on_done([&] { other.set(10); });
    promise.future().on_done_light([&](const Future<int>&) { ++lights; });
    const auto set = [&] { promise.set(1); };
    executor ? executor->in_a_turn(set) : set();
    EXPECT_EQ(waits.get(), 11);
    EXPECT_EQ(lights, 1);
    int late = 0;
    promise.future().on_done([&] { ++late; });
    EXPECT_EQ(late, 1);
  }
}

TEST(OnDone, DroppedTasksAreCancelled) {
  const auto executor = std::make_shared<OneThread>();
  const Promise<int> promise(executor);
  const auto dropped = promise.future().then([](int value) { return value; });
  executor->in_a_turn([&] { promise.set(1); });
  const auto late = promise.future().then([](int value) { return value; });
  EXPECT_FALSE(late.done());
  executor->drop();
  for (const auto& future : {dropped, late}) {
    try {
      future.get();
      ADD_FAILURE() << "the executor did not run it";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Cancelled);
    }
  }
  EXPECT_EQ(promise.future().then([](int value) { return value + 1; }).get(), 2);
}

TEST(OnDone, OrderHoldsWithSeveralThreads) {
  for (int round = 0; round < 200; ++round) {
    const Promise<int> promise;
    std::vector<std::atomic<int>> seen(4);
    std::vector<std::thread> threads;
    std::atomic<bool> wrong{false};
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < 20; ++i) {
          promise.future().on_done([&, t, i] {
            if (seen[t].exchange(i + 1) != i) wrong = true;
          });
        }
      });
    }
    promise.set(1);
    for (auto& thread : threads) thread.join();
    for (const auto& count : seen) EXPECT_EQ(count, 20);
    ASSERT_FALSE(wrong) << "round " << round;
  }
}

TEST(OnDone, ExceptionsAreLogged) {
  std::vector<std::string> errors;
  const log::Capture capture([&](LogLevel level, std::string_view text) {
    if (level == LogLevel::Error) errors.emplace_back(text);
  });
  Future<int>::ready(1).on_done([] { throw std::runtime_error("lost"); });
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_THAT(errors[0], testing::HasSubstr("lost"));
}

// The promise was set in another way before, which is not the completing thread's fault.
TEST(OnDone, ForwardingToASetPromiseIsLogged) {
  const auto executor = std::make_shared<OneThread>();
  const std::shared_ptr<OneThread> none;
  for (const auto& [from, to] :
       {std::pair(executor, executor), std::pair(executor, none), std::pair(none, none)}) {
    std::vector<std::string> errors;
    const log::Capture capture([&](LogLevel level, std::string_view text) {
      if (level == LogLevel::Error) errors.emplace_back(text);
    });
    const Promise<int> promise(from);
    const Promise<int> taken(to);
    int behind = 0;
    promise.future().forward_to(taken);
    promise.future().on_done([&] { ++behind; });
    taken.set(1);
    const auto set = [&] { promise.set(2); };
    EXPECT_NO_THROW(from ? from->in_a_turn(set) : set());
    while (from && from->next()) {
    }
    promise.future().on_done([&] { ++behind; });
    EXPECT_EQ(behind, 2);
    EXPECT_EQ(taken.future().get(), 1);
    ASSERT_EQ(errors.size(), 1u);
    EXPECT_THAT(errors[0], testing::HasSubstr("a promise was set twice"));
  }
}

class SomeCall final : public detail::ExecutionContext {
 public:
  const std::shared_ptr<detail::Executor>& executor() const override { return executor_; }

 private:
  const std::shared_ptr<detail::Executor> executor_;
};

// A call's function may complete a future that is waited for outside of the call.
TEST(OnDone, KeepsItsOwnExecutionContext) {
  const Promise<void> promise;
  const auto of_none = promise.future().then([] { return detail::execution_context() == nullptr; });
  const auto call = std::make_shared<SomeCall>();
  Future<bool> of_call;
  {
    const detail::ExecutionContextScope scope(call);
    of_call = promise.future().then([call] { return detail::execution_context() == call; });
  }
  const detail::ExecutionContextScope scope(std::make_shared<SomeCall>());
  promise.set();
  EXPECT_TRUE(of_none.get());
  EXPECT_TRUE(of_call.get());
}

TEST(OnDone, TakesTheValueIfThereIsOne) {
  int seen = 0;
  Future<int>::ready(3).on_done([&](int value) { seen += value; });
  Future<int>::failed(failure("none")).on_done([&](int value) { seen += value; });
  EXPECT_EQ(seen, 3);
}

TEST(OnDone, EmptyFunctionIsRefused) {
  const Promise<int> promise;
  EXPECT_THROW(promise.future().then(std::function<int(int)>()), Error);
  EXPECT_THROW(promise.future().on_done(std::function<void()>()), Error);
  EXPECT_THROW(promise.future().then(static_cast<int (*)(int)>(nullptr)), Error);
}

TEST(Coroutine, DroppedCoroutineIsCancelled) {
  const auto executor = std::make_shared<OneThread>();
  const Promise<int> promise(executor);
  const auto sum = one_more(promise.future());
  executor->in_a_turn([&] { promise.set(1); });
  executor->drop();
  ASSERT_TRUE(sum.done());
  EXPECT_EQ(text_of([&] { sum.get(); }), "the promise was dropped without a value");
}

// The turns that it drives complete its future and run all tasks, at any depth of a chain.
TEST(OnDone, ContinuationMayDriveALoop) {
  constexpr int kLinks = 100;
  const auto executor = std::make_shared<OneThread>();
  const Promise<int> promise;
  auto future = promise.future();
  for (int i = 0; i < kLinks; ++i) {
    future = future.then([executor](int value) {
      const Promise<int> reply(executor);
      const auto both =
          when_all({reply.future(), Future<int>::ready(1)});  // light: runs in the turn itself
      executor->run(
          Task([executor, reply, value] { executor->in_a_turn([&] { reply.set(value); }); }));
      both.wait(std::chrono::seconds(20));
      return both.get().at(0) + both.get().at(1);
    });
  }
  promise.set(0);
  EXPECT_EQ(future.get(), kLinks);
}

// If a loop completes only a part of a future, continuations of the future must not run in the
// loop's turn, which they could block.
TEST(OnDone, MixedFuturesRunOutsideTheTurn) {
  const auto executor = std::make_shared<OneThread>();
  const Promise<int> promise(executor);
  const auto ready = Future<int>::ready(1);
  const auto inside = [executor](const auto&) { return executor->inside(); };
  const std::vector<Future<bool>> behind = {
      ready.then([&](int) { return promise.future(); }).then(inside),
      when_all({ready, promise.future()}).then(inside),
      when_all(ready, promise.future()).then(inside),
  };
  executor->in_a_turn([&] { promise.set(2); });
  while (executor->next()) {
  }
  for (const auto& one : behind) {
    ASSERT_TRUE(one.done());
    EXPECT_FALSE(one.get());
  }
}

// An executor that has ended: it drops what it is to run. This thread counts as one of its turns.
class EndedExecutor final : public detail::Executor {
 public:
  const char* name() const override { return "ended"; }
  bool drive(const std::function<bool()>& done, Deadline, const void*) override { return done(); }
  void block(const std::function<void()>& wait) override { wait(); }
  void recall(const void*) noexcept override {}
  bool inside() const override { return true; }
  void run(Task) override {}
};

TEST(OnDone, DroppedChainNeedsNoDeepStack) {
  constexpr int kLinks = 100'000;
  auto promise = std::make_unique<Promise<int>>(std::make_shared<EndedExecutor>());
  Future<int> last = promise->future();
  for (int link = 0; link < kLinks; ++link) last = last.then([](int value) { return value; });
  promise.reset();
  EXPECT_TRUE(last.failed());
}

}  // namespace
}  // namespace weft
