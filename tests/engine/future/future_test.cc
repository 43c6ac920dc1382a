// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/error.h>
#include <weft/future.h>
#include <weft/tests/engine/future/failures.h>

namespace weft {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;

TEST(Future, GivesItsValueToEveryCopy) {
  Promise<std::string> promise;
  const auto a = promise.future();
  const auto b = a;  // NOLINT(performance-unnecessary-copy-initialization): the copy is the point
  EXPECT_FALSE(a.done());
  promise.set("value");
  EXPECT_TRUE(b.done());
  EXPECT_FALSE(b.failed());
  EXPECT_EQ(a.get(), "value");
  EXPECT_EQ(b.get(), "value");
  EXPECT_EQ(a.get(), "value");
}

TEST(Future, ThrowsItsErrorEveryTime) {
  Promise<int> promise;
  promise.set_error(Error(Blame::Timeout, "late"));
  const auto future = promise.future();
  EXPECT_TRUE(future.failed());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(text_of([&] { future.get(); }), "late");
    EXPECT_EQ(text_of([&] { future.wait(); }), "late");
  }
}

TEST(Future, TimedOutWaitMayBeRepeated) {
  Promise<int> promise;
  const auto future = promise.future();
  try {
    future.wait(milliseconds(1));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Timeout);
    EXPECT_THAT(error.text(),
                testing::HasSubstr("the Future<int> was not done within 1 ms; its work goes on"));
  }
  promise.set(3);
  future.wait(milliseconds(1));
  EXPECT_EQ(future.get(), 3);
}

TEST(Future, GetBlocksUntilAnotherThreadSets) {
  Promise<int> promise;
  std::thread setter([promise] { promise.set(5); });
  EXPECT_EQ(promise.future().get(), 5);
  setter.join();
}

TEST(Future, EmptyFutureIsACallerError) {
  const Future<int> future;
  EXPECT_THROW(future.done(), Error);
  EXPECT_THROW(future.get(), Error);
}

TEST(Promise, SecondSetIsACallerError) {
  Promise<int> promise;
  promise.set(1);
  EXPECT_THROW(promise.set(2), Error);
  EXPECT_THROW(promise.set_error(Error(Blame::Busy, "")), Error);
  EXPECT_EQ(promise.future().get(), 1);
}

TEST(Promise, MovedFromPromiseIsACallerError) {
  Promise<int> source;
  const Promise<int> promise = std::move(source);
  // NOLINTBEGIN(bugprone-use-after-move)
  EXPECT_THAT(text_of([&] { source.set(1); }), testing::HasSubstr("moved from"));
  EXPECT_THAT(text_of([&] { source.set_error(Error(Blame::Busy, "")); }),
              testing::HasSubstr("moved from"));
  EXPECT_THAT(text_of([&] { static_cast<void>(source.future()); }),
              testing::HasSubstr("moved from"));
  // NOLINTEND(bugprone-use-after-move)
  promise.set(2);
  EXPECT_EQ(promise.future().get(), 2);
}

TEST(Promise, NullErrorIsACallerError) {
  Promise<std::string> promise;
  const auto future = promise.future();
  EXPECT_THAT(text_of([&] { promise.set_error(std::exception_ptr()); }),
              testing::HasSubstr("null std::exception_ptr"));
  EXPECT_FALSE(future.done());
  EXPECT_THAT(text_of([] { Future<std::string>::failed(nullptr); }),
              testing::HasSubstr("null std::exception_ptr"));
  promise.set("value");
  EXPECT_EQ(future.get(), "value");
}

TEST(Promise, DroppedPromiseCancelsItsFuture) {
  Future<int> future;
  {
    const Promise<int> promise;
    future = promise.future();
  }
  try {
    future.get();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Cancelled);
  }
}

TEST(Then, RunsEachContinuationOnce) {
  Promise<int> promise;
  const auto future = promise.future();
  std::vector<Future<int>> results;
  int runs = 0;
  for (int i = 0; i < 10; ++i) {
    results.push_back(future.then([&runs, i](int value) {
      ++runs;
      return value * i;
    }));
  }
  EXPECT_EQ(runs, 0);
  promise.set(2);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(results[static_cast<std::size_t>(i)].get(), 2 * i);
  EXPECT_EQ(runs, 10);
  EXPECT_EQ(future.then([](int value) { return value + 1; }).get(), 3);  // attached after the value
}

TEST(Then, ChainOfTwentyAddsTwenty) {
  Promise<int> promise;
  auto future = promise.future();
  for (int i = 0; i < 20; ++i) future = future.then([](int value) { return value + 1; });
  promise.set(1);
  EXPECT_EQ(future.get(), 21);
}

constexpr int kLongChain = 100'000;  // links; as nested calls, they would overflow any stack

Future<int> long_chain(Future<int> future) {
  for (int i = 0; i < kLongChain; ++i) future = future.then([](int value) { return value + 1; });
  return future;
}

TEST(Then, LongChainNeedsABoundedStack) {
  const Promise<int> promise;
  const auto end = long_chain(promise.future());
  promise.set(1);
  ASSERT_TRUE(end.done());
  EXPECT_EQ(end.get(), kLongChain + 1);
}

TEST(Then, AnotherThreadMayCompleteAChain) {
  const Promise<int> promise;
  const auto end = long_chain(promise.future());
  std::thread setter([&promise] { promise.set(1); });
  EXPECT_EQ(end.get(), kLongChain + 1);
  setter.join();
}

TEST(Then, ErrorPassesThroughALongChain) {
  const Promise<int> promise;
  const auto failed = long_chain(promise.future());
  promise.set_error(failure("the first"));
  EXPECT_EQ(text_of([&] { failed.get(); }), "the first");
  const auto dropped = long_chain(Promise<int>().future());
  EXPECT_EQ(text_of([&] { dropped.get(); }), "the promise was dropped without a value");
}

// A chain of futures that continuations return, as in a loop that is written with then().
TEST(Then, ReturnedFuturesNeedABoundedStack) {
  const Promise<int> promise;
  Future<int> future = promise.future();
  std::vector<Promise<int>> inner(kLongChain);
  for (const auto& one : inner) {
    future.forward_to(one);
    future = Future<int>::ready(0).then([&one](int) { return one.future(); });
  }
  promise.set(7);
  ASSERT_TRUE(future.done());
  EXPECT_EQ(future.get(), 7);
}

TEST(Then, ChainKeepsTheOrderOfBranches) {
  constexpr int kLinks = 1000;
  const Promise<void> promise;
  auto link = promise.future();
  std::vector<std::vector<int>> orders(kLinks);
  for (auto& order : orders) {
    link.on_done([&order] { order.push_back(1); });
    auto next = link.then([&order] { order.push_back(2); });
    link.on_done([&order] { order.push_back(3); });
    link = next;
  }
  promise.set();
  ASSERT_TRUE(link.done());
  for (const auto& order : orders) ASSERT_THAT(order, ElementsAre(1, 2, 3));
}

// At any depth of a chain: otherwise it would wait forever for a continuation that runs after it.
TEST(Then, MayWaitForItsOwnCompletions) {
  constexpr int kLinks = 100;
  const Promise<int> promise;
  auto future = promise.future();
  for (int i = 0; i < kLinks; ++i) {
    future = future.then([](int value) {
      const Promise<int> own;
      const auto more = own.future().then([](int before) { return before + 1; });
      own.set(value);
      more.wait(std::chrono::seconds(20));
      return more.get();
    });
  }
  promise.set(0);
  EXPECT_EQ(future.get(), kLinks);
}

TEST(Then, ErrorSkipsValueContinuations) {
  Promise<int> promise;
  bool ran = false;
  const auto skipped = promise.future().then([&ran](int value) {
    ran = true;
    return value;
  });
  const auto seen =
      skipped.then([](const Future<int>& future) { return text_of([&] { future.get(); }); });
  promise.set_error(failure("broken"));
  EXPECT_FALSE(ran);
  EXPECT_EQ(text_of([&] { skipped.get(); }), "broken");
  EXPECT_EQ(seen.get(), "broken");
}

TEST(Then, MayTakeTheFutureAsAnRvalue) {
  const auto doubled =
      Future<int>::ready(4).then([](Future<int>&& future) { return 2 * future.get(); });
  EXPECT_EQ(doubled.get(), 8);
  int seen = 0;
  doubled.on_done([&](Future<int>&& future) { seen = future.get(); });
  EXPECT_EQ(seen, 8);
}

TEST(Then, GenericLambdasGetTheFuture) {
  Promise<int> promise;
  const auto result = promise.future().then([](auto future) { return future.get() + 1; });
  promise.set(1);
  EXPECT_EQ(result.get(), 2);
}

TEST(Then, ExceptionBecomesTheError) {
  const auto result =
      Future<int>::ready(1).then([](int) -> int { throw std::out_of_range("far"); });
  EXPECT_THROW(result.get(), std::out_of_range);
}

TEST(Then, ReturnedFutureIsFlattened) {
  Promise<int> outer;
  Promise<std::string> inner;
  const Future<std::string> result = outer.future().then([&](int) { return inner.future(); });
  outer.set(1);
  EXPECT_FALSE(result.done());
  inner.set("inner");
  EXPECT_EQ(result.get(), "inner");
}

TEST(Then, VoidFutureGivesNoArgument) {
  Promise<void> promise;
  const auto result = promise.future().then([] { return 4; });
  const auto nothing = result.then([](int) {});
  static_assert(std::is_same_v<decltype(nothing), const Future<void>>);
  promise.set();
  EXPECT_EQ(result.get(), 4);
  nothing.get();
}

TEST(Then, MayAttachAndWaitInside) {
  Promise<int> promise;
  const auto result = promise.future().then([future = promise.future()](int value) {
    return value + future.then([](int again) { return again; }).get();
  });
  promise.set(3);
  EXPECT_EQ(result.get(), 6);
}

TEST(WhenAll, GivesAllValuesInOrder) {
  Promise<int> a;
  Promise<int> b;
  const auto both = when_all(std::vector<Future<int>>{a.future(), b.future()});
  b.set(2);
  EXPECT_FALSE(both.done());
  a.set(1);
  EXPECT_THAT(both.get(), ElementsAre(1, 2));
  EXPECT_TRUE(when_all(std::vector<Future<int>>()).get().empty());
  EXPECT_THAT(when_all({a.future(), b.future()}).get(), ElementsAre(1, 2));
}

// Counts its waits.
class SomeWork final : public detail::DeviceWork {
 public:
  explicit SomeWork(std::atomic<int>& waits) : waits_(waits) {}
  std::vector<c10::Device> devices() const override { return {}; }
  void wait() const override { ++waits_; }
  detail::DeviceWorkRef run(const std::function<void()>& function) const override {
    function();
    return nullptr;
  }

 private:
  std::atomic<int>& waits_;
};

TEST(WhenAll, WaitsOnceForEachValuesWork) {
  constexpr int kValues = 1000;
  std::atomic<int> waits{0};
  const std::vector<Promise<void>> promises(kValues);
  std::vector<Future<void>> futures;
  for (const auto& promise : promises) futures.push_back(promise.future());
  const auto all = when_all(futures);
  for (const auto& promise : promises) promise.set_with(std::make_shared<SomeWork>(waits), {});
  all.get();
  EXPECT_EQ(waits.exchange(0), kValues);
  EXPECT_EQ(all.then([] { return 7; }).get(), 7);
  EXPECT_EQ(waits, kValues);
}

TEST(WhenAll, WorkOfManyValuesNeedsNoDeepStack) {
  constexpr int kValues = 100'000;
  std::atomic<int> waits{0};
  const std::vector<Promise<void>> promises(kValues);
  std::vector<Future<void>> futures;
  for (const auto& promise : promises) futures.push_back(promise.future());
  auto all = when_all(futures);
  for (const auto& promise : promises) promise.set_with(std::make_shared<SomeWork>(waits), {});
  EXPECT_EQ(all.then([] { return 7; }).get(), 7);
  EXPECT_EQ(waits, kValues);
  all = Future<void>();
}

TEST(WhenAll, FirstErrorWinsAtOnce) {
  Promise<int> never;
  Promise<int> a;
  Promise<int> b;
  const auto all = when_all(std::vector<Future<int>>{never.future(), a.future(), b.future()});
  b.set_error(failure("first"));
  EXPECT_EQ(text_of([&] { all.get(); }), "first");
  a.set_error(failure("second"));
  EXPECT_EQ(text_of([&] { all.get(); }), "first");
}

TEST(WhenAll, DifferentTypesGiveATuple) {
  const auto all =
      when_all(Future<int>::ready(1), Future<std::string>::ready("two"), Future<void>::ready());
  EXPECT_EQ(std::get<0>(all.get()), 1);
  EXPECT_EQ(std::get<1>(all.get()), "two");
  EXPECT_EQ(
      text_of([] { when_all(Future<int>::ready(1), Future<void>::failed(failure("void"))).get(); }),
      "void");
}

TEST(WhenAll, VoidsGiveAVoid) {
  Promise<void> a;
  const Future<void> vector =
      when_all(std::vector<Future<void>>{a.future(), Future<void>::ready()});
  const Future<void> pack = when_all(a.future(), Future<void>::ready());
  EXPECT_FALSE(vector.done());
  a.set();
  vector.get();
  pack.get();
}

Future<int> add_one(Future<int> future) {
  const int value = co_await future;
  co_return value + 1;
}

Future<void> expect_five(Future<int> future) { EXPECT_EQ(co_await future, 5); }

Future<int> throws(Future<int> future) {
  co_await future;
  throw std::out_of_range("inside");
}

TEST(Coroutine, AwaitsAndReturns) {
  Promise<int> promise;
  const auto sum = add_one(add_one(promise.future()));
  const auto checked = expect_five(sum);
  EXPECT_FALSE(sum.done());
  promise.set(3);
  EXPECT_EQ(sum.get(), 5);
  checked.get();
}

TEST(Coroutine, ErrorsReachItsFuture) {
  Promise<int> promise;
  const auto sum = add_one(promise.future());
  promise.set_error(failure("awaited"));
  EXPECT_EQ(text_of([&] { sum.get(); }), "awaited");
  EXPECT_THROW(throws(Future<int>::ready(1)).get(), std::out_of_range);
}

Future<std::pair<int, std::string>> both() { co_return {1, "a"}; }

TEST(Coroutine, ReturnsBracedValues) { EXPECT_EQ(both().get(), std::pair(1, std::string("a"))); }

struct Held {
  explicit Held(bool& is_held) : held(is_held) { held = true; }
  ~Held() { held = false; }
  bool& held;
};
template <class T>
Future<T> hold_until(Future<T> value, bool& is_held) {
  const Held lock(is_held);
  if constexpr (std::is_void_v<T>) {
    co_await value;
  } else {
    co_return co_await value;
  }
}

TEST(Coroutine, LocalsEndBeforeItsValueIsSet) {
  bool is_held = false;
  const auto check = [&](const auto& promise, const auto& set) {
    const auto held = hold_until(promise.future(), is_held);
    EXPECT_TRUE(is_held);
    bool was_held = true;
    held.on_done([&] { was_held = is_held; });
    set();
    EXPECT_TRUE(held.done());
    EXPECT_FALSE(was_held);
  };
  const Promise<int> number, failed;
  const Promise<void> none;
  check(number, [&] { number.set(1); });
  check(failed, [&] { failed.set_error(failure("x")); });
  check(none, [&] { none.set(); });
}

struct ThrowsWhenMoved {
  explicit ThrowsWhenMoved(int times) : left(times) {}
  ThrowsWhenMoved(const ThrowsWhenMoved& other) : left(other.left - 1) {
    if (left == 0) throw std::out_of_range("moved");
  }
  int left;
};

TEST(Coroutine, ThrowingMoveBecomesItsError) {
  const auto give = [](int times) -> Future<ThrowsWhenMoved> { co_return ThrowsWhenMoved(times); };
  int times = 1;
  for (; give(times).failed(); ++times) EXPECT_THROW(give(times).get(), std::out_of_range);
  EXPECT_GT(times, 3) << "it throws in co_return and after it";
}

TEST(Then, CopiesFromAReturnedReference) {
  const std::vector<std::string> names{"a", "b"};
  const auto name = Future<int>::ready(1).then(
      [&](int i) -> const std::string& { return names[static_cast<std::size_t>(i)]; });
  static_assert(std::is_same_v<decltype(name), const Future<std::string>>);
  EXPECT_EQ(name.get(), "b");
  const auto inner = Future<int>::ready(7);
  const auto flat = name.then([&](const std::string&) -> const Future<int>& { return inner; });
  static_assert(std::is_same_v<decltype(flat), const Future<int>>);
  EXPECT_EQ(flat.get(), 7);
}

struct OwnError : Error {
  OwnError() : Error(Blame::Caller, "own") {}
};

TEST(Promise, KeepsTheTypeOfItsError) {
  Promise<int> promise;
  promise.set_error(OwnError());
  EXPECT_THROW(promise.future().get(), OwnError);
}

TEST(Future, ManyThreadsSetAndContinue) {
  constexpr int kCount = 2000;
  std::vector<Promise<int>> promises(kCount);
  std::vector<Future<int>> futures;
  for (const auto& promise : promises)
    futures.push_back(promise.future().then([](int value) { return value + 1; }));
  const auto all = when_all(futures);
  std::vector<std::thread> threads;
  std::atomic<int> next{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int mine = next++; mine < kCount; mine = next++)
        promises[static_cast<std::size_t>(mine)].set(mine);
    });
  }
  const auto values = all.get();
  for (auto& thread : threads) thread.join();
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(values[static_cast<std::size_t>(i)], i + 1);
}

// A thread that has waited may drop promise and future while the other is still inside set().
TEST(Future, MayEndOnceItsValueIsSeen) {
  std::atomic<Promise<int>*> next{nullptr};
  std::atomic<bool> is_over{false};
  std::thread setter([&] {
    while (!is_over) {
      if (Promise<int>* const promise = next.exchange(nullptr)) promise->set(7);
    }
  });
  int sum = 0;
  for (int i = 0; i < 20'000; ++i) {
    Promise<int> promise(nullptr);
    next = &promise;
    while (!promise.future().done()) std::this_thread::yield();
    sum += promise.future().get();
  }
  is_over = true;
  setter.join();
  EXPECT_EQ(sum, 140'000);
}

struct Uncopied {
  Uncopied() = default;
  Uncopied(const Uncopied&) { throw std::runtime_error("it is not copied"); }
  Uncopied& operator=(const Uncopied&) = delete;
  Uncopied(Uncopied&&) = default;
};

TEST(Future, ThrowingCopyFailsItsReceiver) {
  Promise<Uncopied> one, other;
  const auto all = when_all(std::vector{one.future(), other.future()});
  const auto flattened = Future<int>::ready(1).then([&](int) { return one.future(); });
  bool was_called = false;
  one.future().on_done([&](const Future<Uncopied>&) { was_called = true; });
  one.set(Uncopied());
  EXPECT_TRUE(was_called) << "the next continuation still runs";
  EXPECT_THROW(all.get(), std::runtime_error);
  EXPECT_THROW(flattened.wait(), std::runtime_error);
}

}  // namespace
}  // namespace weft
