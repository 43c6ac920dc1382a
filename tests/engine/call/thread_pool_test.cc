// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <condition_variable>
#include <future>
#include <latch>
#include <mutex>
#include <semaphore>
#include <thread>

#include <gtest/gtest.h>

#include <weft/base/log.h>
#include <weft/engine/call/thread_pool.h>
#include <weft/engine/future/future.h>
#include <weft/tests/harness/no_more_threads.h>

namespace weft::call {
namespace {

std::shared_ptr<EventLoop> loop() {
  return std::make_shared<EventLoop>("pool", EventLoop::Thread::Given);
}

TEST(ThreadPool, RunsEveryTask) {
  const auto thread_pool = ThreadPool::make("pool", 2, loop());
  std::atomic<int> ran{0};
  Promise<void> all(thread_pool);
  for (int i = 0; i < 1000; ++i) {
    thread_pool->run(Task([&, all] {
      if (++ran == 1000) all.set();
    }));
  }
  all.future().wait(std::chrono::seconds(20));
  thread_pool->stop();
}

TEST(ThreadPool, DrivesTheLoopIfNobodyElseDoes) {
  const auto turned = loop();
  const auto thread_pool = ThreadPool::make("pool", 2, turned);
  Promise<void> posted;  // without an executor: waiting for it drives no loop
  turned->post(Task([&] { posted.set(); }));
  posted.future().wait(std::chrono::seconds(20));
  thread_pool->stop();
}

TEST(ThreadPool, RunsTasksBesideTheLimitWhenFull) {
  const auto turned = loop();
  const auto thread_pool = ThreadPool::make("pool", 2, turned);
  std::latch may_end(1);
  std::atomic<int> run{0};
  Promise<void> all;
  const auto waits = [&] {
    if (++run == 7) all.set();
    may_end.wait();
  };
  for (int i = 0; i < 2; ++i) thread_pool->run(Task(waits));
  for (int i = 0; i < 5; ++i) thread_pool->run_beside(Task(waits));
  EXPECT_NO_THROW(all.future().wait(std::chrono::seconds(20))) << run;
  EXPECT_EQ(thread_pool->active(), 7U);
  Promise<void> posted;
  turned->post(Task([&] { posted.set(); }));
  posted.future().wait(std::chrono::seconds(20));
  may_end.count_down();
  thread_pool->stop();
}

// A free thread may be slow to wake; that does not count as waiting in the queue.
TEST(ThreadPool, HasWaitedOnlyIfNoThreadWasFree) {
  const auto thread_pool = ThreadPool::make("pool", 2, loop());
  const auto refuse = [](const Error&) {};
  std::latch begun(2), may_end(1);
  std::atomic<int> waited{0};
  for (int i = 0; i < 2; ++i) {
    thread_pool->run_call(Task([&] {
                            waited += ThreadPool::has_waited() ? 100 : 0;
                            begun.count_down();
                            may_end.wait();
                          }),
                          refuse);
  }
  begun.wait();
  std::promise<void> last;
  for (int i = 0; i < 2; ++i)
    thread_pool->run_call(Task([&] { waited += ThreadPool::has_waited() ? 1 : 0; }), refuse);
  thread_pool->run(Task([&] { last.set_value(); }));
  may_end.count_down();
  ASSERT_EQ(last.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  thread_pool->stop();
  EXPECT_EQ(waited, 2);
}

// Messages to a worker that has yet to be looked up are such tasks, and there may be many.
TEST(ThreadPool, BoundsTasksBesideTheLimit) {
  const auto thread_pool = ThreadPool::make("pool", 1, loop());
  std::atomic<int> begun{0}, ended{0};
  std::promise<void> gate, marked;
  const auto opened = gate.get_future().share();
  for (int i = 0; i < 3 * kMostBeside; ++i) {
    thread_pool->run_beside(Task([&, opened] {
      ++begun;
      opened.wait();
      ++ended;
    }));
  }
  thread_pool->run(Task([&] { marked.set_value(); }));  // runs once the others may not
  ASSERT_EQ(marked.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  while (begun < kMostBeside) std::this_thread::yield();
  EXPECT_EQ(begun, kMostBeside);
  gate.set_value();
  while (ended < 3 * kMostBeside) std::this_thread::yield();  // ctest's time limit ends it
  thread_pool->stop();
}

TEST(ThreadPool, DrivesTheLoopWhileAllThreadsRun) {
  const auto turned = loop();
  const auto thread_pool = ThreadPool::make("pool", 2, turned);
  std::latch may_end(1);
  for (int i = 0; i < 2; ++i) thread_pool->run(Task([&] { may_end.wait(); }));
  Promise<void> posted;
  turned->post(Task([&] { posted.set(); }));
  posted.future().wait(std::chrono::seconds(20));
  may_end.count_down();
  thread_pool->stop();
}

TEST(ThreadPool, DrivesTheLoopDespiteWaitingTasks) {
  const auto turned = loop();
  const auto thread_pool = ThreadPool::make("pool", 1, turned);
  std::mutex mutex;
  std::condition_variable changed;
  int turns = 0;
  Promise<void> all(thread_pool);
  for (int i = 1; i <= 20; ++i) {
    thread_pool->run(Task([&, all, i] {
      turned->post(Task([&] {
        std::lock_guard lock(mutex);
        ++turns;
        changed.notify_all();
      }));
      std::unique_lock lock(mutex);
      changed.wait_for(lock, std::chrono::seconds(20), [&] { return turns >= i; });
      EXPECT_GE(turns, i) << "the loop is not driven until the waiting tasks have run";
      lock.unlock();
      if (i == 20) all.set();
    }));
  }
  all.future().wait(std::chrono::seconds(60));
  thread_pool->stop();
}

TEST(ThreadPool, RunsNoMoreTasksThanItsLimit) {
  constexpr int kLimit = 2, kTasks = 20;
  const auto turned = loop();
  const auto thread_pool = ThreadPool::make("pool", kLimit, turned);
  std::counting_semaphore<> begun(0), may_end(0);
  std::atomic<int> running{0}, most{0};
  for (int i = 0; i < kTasks; ++i) {
    thread_pool->run(Task([&] {
      const int now = ++running;
      for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
      }
      begun.release();
      may_end.acquire();
      --running;
    }));
  }
  for (int i = 0; i < kTasks; ++i) {
    begun.acquire();
    if (i < kLimit - 1) continue;
    // There are threads besides those that run tasks: for this one, and for the loop's turns.
    Promise<void> beside, posted;
    thread_pool->run_beside(Task([&] { beside.set(); }));
    turned->post(Task([&] { posted.set(); }));
    beside.future().wait(std::chrono::seconds(60));
    posted.future().wait(std::chrono::seconds(60));
    may_end.release();
  }
  for (int i = 0; i < kLimit - 1; ++i) may_end.release();
  thread_pool->stop();
  EXPECT_EQ(most, kLimit);
}

// Each task waits for one queued behind it, far deeper than there are threads.
TEST(ThreadPool, TasksThatWaitForTasksDoNotStarve) {
  const auto thread_pool = ThreadPool::make("pool", 2, loop());
  std::function<Future<int>(int)> descend = [&](int depth) {
    Promise<int> promise(thread_pool);
    thread_pool->run(
        Task([&, promise, depth] { promise.set(depth == 0 ? 0 : 1 + descend(depth - 1).get()); }));
    return promise.future();
  };
  EXPECT_EQ(descend(100).get(), 100);
  thread_pool->stop();
}

// Once as many threads block as may, the innermost call is refused, and all that wait for it end
// with its error. This holds for waits in continuations as well.
TEST(ThreadPool, TooDeeplyNestedWaitsFailWithBusy) {
  constexpr int kMost = 8;
  for (const bool by_continuations : {false, true}) {
    const auto thread_pool = ThreadPool::make("pool", 2, loop());
    thread_pool->limit_blocked(kMost);
    std::atomic<int> deepest{0};
    std::function<Future<int>(int)> descend = [&](int depth) {
      Promise<int> promise(thread_pool);
      thread_pool->run_call(
          Task([&, promise, depth] {
            deepest = std::max(deepest.load(), depth);
            try {
              const auto below = descend(depth + 1);
              const auto one_more = [](int value) { return value + 1; };
              promise.set(by_continuations ? below.then(one_more).get() : one_more(below.get()));
            } catch (const Error&) {
              promise.set_error(std::current_exception());
            }
          }),
          [promise](const Error& why) { promise.set_error(why); });
      return promise.future();
    };
    try {
      const auto outermost = descend(1);
      outermost.wait(std::chrono::seconds(60));
      ADD_FAILURE() << "an endless chain of calls ends without an error";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Busy) << error.what();
      EXPECT_NE(error.text().find("no more than 8 may"), std::string::npos) << error.what();
      EXPECT_NE(error.text().find("have the functions return a Future, or be coroutines"),
                std::string::npos)
          << error.what();
    }
    EXPECT_GE(deepest, kMost);
    EXPECT_LE(deepest, kMost + 2) << "the last two have not begun to block";
    Promise<int> again(thread_pool);
    thread_pool->run_call(Task([again] { again.set(7); }),
                          [again](const Error& why) { again.set_error(why); });
    EXPECT_EQ(again.future().get(), 7) << "the pool does not run calls again";
    thread_pool->stop();
  }
}

// No thread is left that would take the calls in the queue.
TEST(ThreadPool, QueuedCallsFailOnceAllThreadsBlock) {
  const auto thread_pool = ThreadPool::make("pool", 1, loop());
  thread_pool->limit_blocked(1);
  const Promise<void> gate(thread_pool);
  std::latch may_block(1);
  Promise<void> begun;
  thread_pool->run_call(Task([&, begun] {
                          begun.set();
                          may_block.wait();
                          gate.future().get();
                        }),
                        [](const Error& why) { ADD_FAILURE() << why.what(); });
  begun.future().wait(std::chrono::seconds(20));
  const Promise<void> refused(thread_pool);
  for (int i = 0; i < 2; ++i) {
    thread_pool->run_call(Task([] { ADD_FAILURE() << "a call runs though no thread is free"; }),
                          [&, refused, i](const Error& why) {
                            EXPECT_EQ(why.blame(), Blame::Busy);
                            if (i == 1) refused.set();
                          });
  }
  may_block.count_down();
  EXPECT_NO_THROW(refused.future().wait(std::chrono::seconds(20)));
  gate.set();
  thread_pool->stop();
}

TEST(ThreadPool, CreationFailsWithoutAThread) {
  const harness::NoMoreThreads no_more;
  if (harness::can_make_threads())
    GTEST_SKIP() << "this system, or this sanitizer, makes threads with stacks of any size";
  try {
    ThreadPool::make("pool", 2, loop());
    ADD_FAILURE() << "a pool without threads would never drive its loop";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Busy) << error.what();
    EXPECT_NE(error.text().find("ulimit -u"), std::string::npos) << error.text();
  }
}

TEST(ThreadPool, CallFailsWithBusyIfNoThreadStarts) {
  std::mutex mutex;
  std::condition_variable changed;
  int begun = 0;
  std::string refused;
  std::atomic<int> said{0};
  const auto thread_pool = ThreadPool::make("pool", 1, loop());
  const Promise<void> gate(thread_pool);
  {
    const log::Capture capture([&](LogLevel, std::string_view) { ++said; });
    const harness::NoMoreThreads no_more;
    if (harness::can_make_threads())
      GTEST_SKIP() << "this system, or this sanitizer, makes threads with stacks of any size";
    // The pool has a few threads at most, and each call blocks one.
    for (int calls = 1; calls <= 16 && refused.empty(); ++calls) {
      thread_pool->run_call(Task([&] {
                              {
                                std::lock_guard lock(mutex);
                                ++begun;
                                changed.notify_all();
                              }
                              gate.future().get();
                            }),
                            [&](const Error& why) {
                              EXPECT_EQ(why.blame(), Blame::Busy);
                              std::lock_guard lock(mutex);
                              refused = why.text();
                              changed.notify_all();
                            });
      std::unique_lock lock(mutex);
      ASSERT_TRUE(changed.wait_for(lock, std::chrono::seconds(20),
                                   [&] { return begun == calls || !refused.empty(); }))
          << "call " << calls << " neither begins nor is refused";
    }
    for (int more = 0; more < 10; ++more) {
      std::atomic<bool> is_refused{false};
      thread_pool->run_call(Task([] {}), [&](const Error&) { is_refused = true; });
      while (!is_refused) std::this_thread::yield();  // ctest's time limit ends it
    }
  }
  EXPECT_EQ(said, 1) << "times that the pool has logged that it has no thread";
  EXPECT_NE(refused.find("no other can be started"), std::string::npos) << refused;
  gate.set();
  thread_pool->stop();
}

TEST(ThreadPool, TasksFromTheLoopRunOutsideIt) {
  const auto turned = loop();
  const auto thread_pool = ThreadPool::make("pool", 2, turned);
  for (int i = 0; i < 200; ++i) {
    Promise<bool> promise(thread_pool);
    turned->post(Task(
        [&, promise] { thread_pool->run(Task([&, promise] { promise.set(turned->inside()); })); }));
    EXPECT_FALSE(promise.future().get()) << "the task runs on the loop, where it must not block";
  }
  thread_pool->stop();
}

TEST(ThreadPool, BlockingInTheLoopIsCallersError) {
  const auto turned = loop();
  const auto thread_pool = ThreadPool::make("pool", 2, turned);
  Promise<Blame> seen(thread_pool);
  turned->post(Task([&, seen] {
    Promise<int> never(thread_pool);
    try {
      never.future().get();
    } catch (const Error& error) {
      seen.set(error.blame());
    }
  }));
  EXPECT_EQ(seen.future().get(), Blame::Caller);
  thread_pool->stop();
}

TEST(ThreadPool, StopWaitsForRunningTasksOnly) {
  const auto thread_pool = ThreadPool::make("pool", 1, loop());
  std::atomic<bool> ended{false};
  Promise<void> started;
  thread_pool->run(Task([&, started] {
    started.set();
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    ended = true;
  }));
  started.future().wait(std::chrono::seconds(20));
  thread_pool->stop();
  EXPECT_TRUE(ended);
  thread_pool->run(Task([] { FAIL() << "a task runs after stop()"; }));
}

// A thread-local whose destructor is so slow that stop() would return before it if it did not wait.
struct SlowToLeave {
  ~SlowToLeave() {
    if (left == nullptr) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ++*left;
  }
  std::atomic<int>* left = nullptr;
};
thread_local SlowToLeave slow_to_leave;

TEST(ThreadPool, StopWaitsForThreadLocalDestructors) {
  const auto thread_pool = ThreadPool::make("pool", 2, loop());
  std::atomic<int> left{0};
  Promise<void> together(thread_pool);
  std::atomic<int> come{0};
  for (int i = 0; i < 2; ++i) {
    thread_pool->run(Task([&, together] {
      slow_to_leave.left = &left;
      if (++come == 2) together.set();
      while (come < 2) std::this_thread::yield();  // so that each runs on its own thread
    }));
  }
  together.future().wait(std::chrono::seconds(20));
  thread_pool->stop();
  EXPECT_EQ(left, 2);
}

TEST(ThreadPool, OwnThreadMayStopAndDestroyIt) {
  auto thread_pool = ThreadPool::make("pool", 2, loop());
  const std::weak_ptr<ThreadPool> there = thread_pool;
  Promise<void> stopped;
  thread_pool->run(Task([held = std::move(thread_pool), stopped] {
    held->stop();
    stopped.set();
  }));
  stopped.future().wait(std::chrono::seconds(20));
  while (!there.expired()) std::this_thread::yield();
}

}  // namespace
}  // namespace weft::call
