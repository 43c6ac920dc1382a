// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cerrno>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/event_loop.h>
#include <weft/base/inheritance.h>
#include <weft/tests/harness/no_more_threads.h>

namespace weft {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

Deadline patience() { return Deadline::in(seconds(60)); }

// Waits for a task on the loop without driving it.
void flush(EventLoop& loop) {
  std::promise<void> reached;
  loop.post([&] { reached.set_value(); });
  reached.get_future().wait();
}

TEST(EventLoop, OneThreadsTasksRunInOrder) {
  EventLoop loop("test");
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) loop.post([&order, i] { order.push_back(i); });
  flush(loop);
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

// A loop that looks for more work at once saves the other side a wake-up, most of all after a long
// turn.
TEST(EventLoop, SpinsAfterALongTurn) {
  if (std::thread::hardware_concurrency() < 2)
    GTEST_SKIP() << "with one processor the loop does not spin";
  EventLoop loop("test", EventLoop::Thread::Given);
  int looks = 0;  // since the long turn
  bool worked = false, parked = false;
  const auto poller = loop.poll(
      [&] {
        if (std::exchange(worked, true)) {
          ++looks;
          return false;
        }
        const auto begin = Deadline::Clock::now();
        while (Deadline::Clock::now() - begin < milliseconds(5)) {
        }
        return true;
      },
      [&] {
        parked = true;
        return false;
      });
  ASSERT_TRUE(loop.drive([&] { return parked; }, patience()));
  // The loop reads the clock every 16 turns. If it counted the long turn as idle time, it would
  // park at the next reading.
  EXPECT_GT(looks, 16);
}

TEST(EventLoop, HandlersAreInside) {
  EventLoop loop("test");
  EXPECT_FALSE(loop.inside());
  std::promise<bool> inside;
  loop.post([&] { inside.set_value(loop.inside()); });
  EXPECT_TRUE(inside.get_future().get());
}

TEST(EventLoop, TimersRunInDeadlineOrder) {
  EventLoop loop("test");
  std::vector<int> order;
  std::promise<void> last;
  const auto start = Deadline::Clock::now();
  auto b = loop.at(Deadline::at(start + milliseconds(20)), [&] { order.push_back(2); });
  auto c = loop.at(Deadline::at(start + milliseconds(30)), [&] { last.set_value(); });
  auto a = loop.at(Deadline::at(start + milliseconds(10)), [&] { order.push_back(1); });
  last.get_future().wait();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(EventLoop, DestroyedTimerDropsItsTaskUnrun) {
  EventLoop loop("test");
  auto owned = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = owned;
  bool ran = false;
  auto timer =
      loop.at(Deadline::in(seconds(3600)), [&ran, owned = std::move(owned)] { ran = true; });
  timer.reset();
  flush(loop);
  flush(loop);
  EXPECT_TRUE(watch.expired());
  EXPECT_FALSE(ran);
}

// A handler's captures may own the loop, and then nothing else would wake it.
TEST(EventLoop, SleepingLoopFreesEndedHandlers) {
  for (const bool inside : {false, true}) {
    EventLoop loop("test");
    auto owned = std::make_shared<int>(0);
    const std::weak_ptr<int> watch = owned;
    auto timer = loop.at(Deadline::in(seconds(3600)), [owned = std::move(owned)] {});
    flush(loop);
    std::this_thread::sleep_for(milliseconds(5));  // so that the loop sleeps; else it proves less
    if (inside) {
      loop.post([&] { timer.reset(); });
    } else {
      timer.reset();
    }
    const auto deadline = patience();
    while (!watch.expired() && !deadline.passed()) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_TRUE(watch.expired()) << (inside ? "inside" : "outside");
    flush(loop);
  }
}

TEST(EventLoop, ReportsReadableDescriptors) {
  EventLoop loop("test");
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  std::promise<char> got;
  auto watch = loop.watch(ends[0], EPOLLIN, [&](std::uint32_t events) {
    EXPECT_TRUE(events & EPOLLIN);
    char byte = 0;
    ASSERT_EQ(read(ends[0], &byte, 1), 1);
    got.set_value(byte);
  });
  ASSERT_EQ(write(ends[1], "x", 1), 1);
  EXPECT_EQ(got.get_future().get(), 'x');
  watch.reset();
  close(ends[0]);
  close(ends[1]);
}

TEST(EventLoop, EndedWatchRunsNoHandler) {
  EventLoop loop("test");
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  std::atomic<int> calls{0};
  std::promise<void> first;
  EventLoop::Registration watch;
  loop.post([&] {
    watch = loop.watch(ends[0], EPOLLIN, [&](std::uint32_t) {
      if (++calls == 1) first.set_value();
      watch.reset();  // level-triggered and never read, so it would fire for ever
    });
  });
  ASSERT_EQ(write(ends[1], "x", 1), 1);
  first.get_future().wait();
  flush(loop);
  flush(loop);
  EXPECT_EQ(calls, 1);
  close(ends[0]);
  close(ends[1]);
}

TEST(EventLoop, BadDescriptorIsACallerError) {
  EventLoop loop("test");
  try {
    auto watch = loop.watch(-1, EPOLLIN, [](std::uint32_t) {});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
  }
}

TEST(EventLoop, RunsATaskAfterAFlagPasses) {
  EventLoop loop("test");
  auto flag = std::make_shared<HostFlag>();
  std::promise<bool> inside;
  bool early = false;
  loop.when(Fence(flag), [&] { inside.set_value(loop.inside()); });
  loop.post([&] { early = flag->query(); });
  flush(loop);
  EXPECT_FALSE(early);
  flag->raise();
  EXPECT_TRUE(inside.get_future().get());
}

// A fence that cannot call back, like an event of a device.
class Silent : public Fence::Source {
 public:
  bool query() const noexcept override { return passed; }
  bool synchronize(Deadline) const noexcept override { return passed; }
  void wait(const cuda::StreamRef&) const override {}
  bool on_passed(Task&) const override { return false; }
  std::atomic<bool> passed{false};
};

TEST(EventLoop, PollsFencesWithoutCallbacks) {
  EventLoop loop("test");
  auto source = std::make_shared<Silent>();
  std::promise<bool> inside;
  loop.when(Fence(source), [&] { inside.set_value(loop.inside()); });
  flush(loop);
  source->passed = true;
  EXPECT_TRUE(inside.get_future().get());
}

TEST(EventLoop, FenceMayPassAfterTheLoopIsGone) {
  auto flag = std::make_shared<HostFlag>();
  bool ran = false;
  {
    EventLoop loop("test");
    loop.when(Fence(flag), [&] { ran = true; });
  }
  flag->raise();
  EXPECT_FALSE(ran);
}

TEST(EventLoop, BlockedCallerDrivesTheLoop) {
  EventLoop loop("test");
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> done{false};
  // Posts itself again until it runs on the caller's thread.
  std::function<void()> step = [&] {
    if (std::this_thread::get_id() == caller) {
      done = true;
    } else {
      loop.post(step);
    }
  };
  loop.post(step);
  EXPECT_TRUE(loop.drive([&] { return done.load(); }, patience()));
}

TEST(EventLoop, DriveGivesUpAtItsDeadline) {
  EventLoop loop("test");
  EXPECT_FALSE(loop.drive([] { return false; }, Deadline::in(milliseconds(5))));
}

TEST(EventLoop, DrivingFromInsideIsACallerError) {
  EventLoop loop("test");
  std::promise<Blame> blame;
  loop.post([&] {
    try {
      loop.drive([] { return false; }, patience());
    } catch (const Error& error) {
      blame.set_value(error.blame());
    }
  });
  EXPECT_EQ(blame.get_future().get(), Blame::Caller);
}

TEST(EventLoop, ServesManyDriversAndPosters) {
  EventLoop loop("test");
  constexpr int kThreads = 4;
  constexpr int kRounds = 500;
  int total = 0;  // used only on the loop: a sanitizer would report a second driver
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        std::atomic<bool> done{false};
        loop.post([&] {
          ++total;
          done = true;
        });
        if (!loop.drive([&] { return done.load(); }, patience()))
          ADD_FAILURE() << "drive ran out of time";
      }
    });
  }
  for (auto& thread : threads) thread.join();
  flush(loop);
  EXPECT_EQ(total, kThreads * kRounds);
}

// Threads that each wait for their own condition while another thread drives the loop.
class Waiting {
 public:
  Waiting(EventLoop& loop, int threads) : loop_(loop), ones_(static_cast<std::size_t>(threads)) {
    turner_ = std::thread(
        [this] { EXPECT_TRUE(loop_.drive([this] { return turner_leaves_.load(); }, patience())); });
    flush(loop_);  // returns once the turner drives
    for (One& one : ones_) {
      one.thread = std::thread([this, &one] {
        const auto done = [&one] {
          ++one.asked;
          return one.is_there.load();
        };
        EXPECT_TRUE(loop_.drive(done, patience(), &one));
        one.has_left = true;
      });
    }
    for (One& one : ones_) {
      while (one.asked == 0) std::this_thread::yield();
    }
  }
  ~Waiting() {
    let_turner_leave();
    for (std::size_t i = 0; i < ones_.size(); ++i) bring(i);
    for (One& one : ones_) one.thread.join();
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  void bring(std::size_t i) {
    ones_[i].is_there = true;
    loop_.recall(&ones_[i]);
  }
  void let_turner_leave() {
    if (!turner_.joinable()) return;
    turner_leaves_ = true;
    loop_.recall();
    turner_.join();
  }
  int asked(std::size_t i) const { return ones_[i].asked; }
  bool has_left(std::size_t i) const { return ones_[i].has_left; }

 private:
  struct One {
    std::atomic<bool> is_there{false}, has_left{false};
    std::atomic<int> asked{0};
    std::thread thread;
  };
  EventLoop& loop_;
  std::vector<One> ones_;
  std::atomic<bool> turner_leaves_{false};
  std::thread turner_;
};

TEST(EventLoop, RecallWakesOnlyTheNamedThread) {
  EventLoop loop("test", EventLoop::Thread::Given);
  Waiting waiting(loop, 8);
  for (int turn = 0; turn < 500; ++turn) flush(loop);
  waiting.bring(3);
  while (!waiting.has_left(3)) std::this_thread::yield();
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_LE(waiting.asked(i), 3) << i;  // on arrival and when recalled
    EXPECT_EQ(waiting.has_left(i), i == 3) << i;
  }
}

TEST(EventLoop, WaitingThreadTakesOverDriving) {
  EventLoop loop("test", EventLoop::Thread::Given);
  Waiting waiting(loop, 8);
  for (std::size_t i = 0; i < 8; ++i) {
    waiting.let_turner_leave();
    flush(loop);  // would hang if no thread drove the loop
    waiting.bring(i);
    while (!waiting.has_left(i)) std::this_thread::yield();
  }
}

TEST(EventLoop, UnnamedWaiterLeavesOnceDone) {
  EventLoop loop("test", EventLoop::Thread::Given);
  Waiting waiting(loop, 2);
  std::atomic<int> turns{0};
  std::thread plain([&] { EXPECT_TRUE(loop.drive([&] { return turns >= 50; }, patience())); });
  while (turns < 50) {
    flush(loop);
    ++turns;
    flush(loop);
  }
  plain.join();
  EXPECT_FALSE(waiting.has_left(0));
}

// The loop's thread leaves such tasks to callers, and runs them itself where there are none.
TEST(EventLoop, PostSoonRunsWithAndWithoutCaller) {
  EventLoop loop("test");
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(loop.drive([] { return true; }));
    std::atomic<bool> has_run{false};
    loop.post_soon([&] { has_run = true; });
    ASSERT_TRUE(loop.drive([&] { return has_run.load(); }, patience()));
  }
  std::promise<void> reached;
  loop.post_soon([&] { reached.set_value(); });
  EXPECT_EQ(reached.get_future().wait_until(patience().point()), std::future_status::ready);
}

TEST(EventLoop, PostAndPostSoonKeepTheirOrder) {
  EventLoop loop("test");
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(loop.drive([] { return true; }));
    loop.post_soon([&order, i] { order.push_back(2 * i); });
    loop.post([&order, i] { order.push_back(2 * i + 1); });
  }
  flush(loop);
  ASSERT_EQ(order.size(), 200u);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
}

TEST(EventLoop, RunsOnAfterADriverHasLeft) {
  EventLoop loop("test");
  EXPECT_TRUE(loop.drive([] { return true; }));
  EXPECT_FALSE(loop.drive([] { return false; }, Deadline::in(milliseconds(2))));
  flush(loop);  // would hang if no thread drove the loop
}

// Otherwise the loop's thread would wake 2000 times a second and take the processor from threads
// that compute.
TEST(EventLoop, ThreadSleepsWhileACallerDrives) {
  EventLoop loop("test");
  const auto switches = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw;
  };
  for (int i = 0; i < 20; ++i) {  // so that the loop's thread makes way for the caller
    flush(loop);
    EXPECT_TRUE(loop.drive([] { return true; }));
  }
  const auto before = switches();
  EXPECT_FALSE(loop.drive([] { return false; }, Deadline::in(milliseconds(400))));
  EXPECT_LT(switches() - before, 100);
  flush(loop);  // its thread drives again when the caller has left
}

TEST(EventLoop, RecallReachesServeAtAnyMoment) {
  EventLoop loop("test", EventLoop::Thread::Given);
  std::atomic<int> wanted{0}, seen{0};
  std::atomic<bool> over{false};
  std::thread caller([&] { EXPECT_TRUE(loop.drive([&] { return over.load(); }, patience())); });
  std::thread server([&] {
    while (!over) {
      loop.serve([&] { return seen < wanted || over; });
      seen = wanted.load();
    }
  });
  const Deadline end = patience();
  for (int i = 1; i <= 60000 && !end.passed(); ++i) {
    wanted = i;
    loop.recall();
    while (seen < i && !end.passed()) std::this_thread::yield();
    for (int spins = 0; spins < i % 300; ++spins)
      static_cast<void>(seen.load());  // varies the moment of the next recall
  }
  EXPECT_EQ(seen, 60000);
  over = true;
  loop.recall();
  server.join();
  caller.join();
}

// A producer on another thread and a loop that polls for its products, like two processes with
// shared memory.
struct Mailroom {
  EventLoop& loop;
  std::atomic<int> made{0};
  std::atomic<bool> parked{false};
  const int wakeup = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  std::atomic<int> taken{0};
  std::function<void()> on_taken;  // runs on the loop
  std::atomic<int> looks{0};
  std::atomic<int> parks{0};
  EventLoop::Registration poller;
  EventLoop::Registration watch;

  explicit Mailroom(EventLoop& turned) : loop(turned) {
    poller = loop.poll([this] { return look(); }, [this] { return park(); });
    watch = loop.watch(wakeup, EPOLLIN, [this](std::uint32_t) {
      std::uint64_t ignored = 0;
      EXPECT_EQ(::read(wakeup, &ignored, sizeof ignored), static_cast<ssize_t>(sizeof ignored));
    });
  }
  ~Mailroom() {
    watch.reset();
    poller.reset();
    flush(loop);  // a running handler may still read `wakeup`
    ::close(wakeup);
  }

  void make() {
    ++made;
    const std::uint64_t one = 1;
    if (!parked.exchange(false)) return;
    EXPECT_EQ(::write(wakeup, &one, sizeof one), static_cast<ssize_t>(sizeof one));
  }
  bool look() {
    ++looks;
    parked = false;
    if (taken == made) return false;
    ++taken;
    if (on_taken) on_taken();
    return true;
  }
  bool park() {
    ++parks;
    parked = true;
    return taken == made;
  }
};

TEST(EventLoop, ParkedPollerMissesNoArrival) {
  EventLoop loop("test");
  Mailroom room(loop);
  for (int i = 1; i <= 200; ++i) {
    if (i % 50 == 0) {
      while (!room.parked) std::this_thread::yield();
    }
    room.make();
  }
  EXPECT_TRUE(loop.drive([&] { return room.taken == 200; }, patience()));
  EXPECT_GE(room.parks, 4);
}

// Binds this thread, and the threads that it starts meanwhile, to one processor.
class OnOneProcessor {
 public:
  OnOneProcessor() {
    EXPECT_EQ(sched_getaffinity(0, sizeof before_, &before_), 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    EXPECT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  }
  ~OnOneProcessor() { EXPECT_EQ(sched_setaffinity(0, sizeof before_, &before_), 0); }

 private:
  cpu_set_t before_;
};

TEST(EventLoop, DoesNotSpinOnItsCallersProcessor) {
  const OnOneProcessor here;
  EventLoop loop("test");
  Mailroom room(loop);
  for (int round = 0; round < 20; ++round) {
    while (!room.parked) std::this_thread::yield();  // the loop's thread sleeps, or is about to
    std::atomic<int> looks{-1};
    const int parks = room.parks;
    loop.post([&] { looks = room.looks.load(); });
    while (looks < 0 || room.parks == parks) std::this_thread::yield();
    EXPECT_LE(room.looks - looks, 8) << "turns before it slept again";
  }
}

TEST(EventLoop, ServesAllSourcesAfterADriverLeft) {
  EventLoop loop("test");
  Mailroom room(loop);
  while (!room.parked) std::this_thread::yield();  // the loop's thread sleeps, or is about to
  for (int round = 0; round < 50; ++round) {
    std::promise<void> rang, taken;
    EventLoop::Registration timer;
    std::atomic<bool> set{false};
    loop.post([&] {
      timer = loop.at(Deadline::in(milliseconds(round % 3)), [&] { rang.set_value(); });
      room.on_taken = [&] { taken.set_value(); };
      set = true;
    });
    ASSERT_TRUE(
        loop.drive([&] { return set.load(); }, patience()));  // this thread drives, and leaves
    room.make();
    ASSERT_EQ(rang.get_future().wait_for(seconds(60)), std::future_status::ready);
    ASSERT_EQ(taken.get_future().wait_for(seconds(60)), std::future_status::ready);
    flush(loop);
  }
}

// Runs `body` in a forked child and returns the child's exit code, or -1 after a signal.
int exit_code_of_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(EventLoop, ChildClosesOnlyWatchedDescriptors) {
  EventLoop loop("test");
  int watched[2], other[2];
  ASSERT_EQ(pipe2(watched, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(other, O_CLOEXEC), 0);
  auto kept = loop.watch(watched[0], EPOLLIN, [](std::uint32_t) {});
  auto dropped = loop.watch(other[0], EPOLLIN, [](std::uint32_t) {});
  dropped.reset();
  const auto is_open = [](int descriptor) { return fcntl(descriptor, F_GETFD) != -1; };
  EXPECT_EQ(exit_code_of_child([&] {
              loop.close_inherited();
              if (is_open(watched[0])) return 1;
              if (!is_open(watched[1]) || !is_open(other[0]) || !is_open(other[1])) return 2;
              const int again = dup(other[0]);  // reuses the number of a closed descriptor
              loop.close_inherited();
              return is_open(again) ? 0 : 3;
            }),
            0);
  EXPECT_TRUE(is_open(watched[0])) << "the parent's own";
  kept.reset();
  for (const int descriptor : {watched[0], watched[1], other[0], other[1]}) close(descriptor);
}

TEST(MadeIn, IsInheritedOnlyByDescendants) {
  const MadeIn here;
  EXPECT_FALSE(here.is_inherited());
  EXPECT_EQ(exit_code_of_child([&] {
              if (!here.is_inherited()) return 1;
              const MadeIn own;
              if (own.is_inherited()) return 2;
              return exit_code_of_child(
                  [&] { return here.is_inherited() && own.is_inherited() ? 0 : 1; });
            }),
            0);
  EXPECT_FALSE(here.is_inherited());
  const Error error = [&] {
    try {
      here.throw_inherited("agent worker0");
    } catch (const Error& caught) {
      return caught;
    }
  }();
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_NE(error.text().find("agent worker0 belongs to process " + std::to_string(getpid())),
            std::string::npos);
}

TEST(EventLoop, LackOfDescriptorsIsBusyAndLeaksNone) {
  const int lowest = dup(STDERR_FILENO);  // the lowest free number
  ASSERT_EQ(close(lowest), 0);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  rlimit one = limit;
  one.rlim_cur = static_cast<rlim_t>(lowest) + 1;
  setrlimit(RLIMIT_NOFILE, &one);
  std::optional<Error> refused;
  try {
    EventLoop loop("test");
  } catch (const Error& error) {
    refused = error;
  }
  const int next = dup(STDERR_FILENO);
  setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(next, lowest) << "the refused loop leaked a descriptor";
  close(next);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->blame(), Blame::Busy);
  EXPECT_EQ(refused->native_code(), EMFILE);
}

TEST(EventLoop, LackOfThreadsIsBusy) {
  std::optional<Error> refused;
  {
    const harness::NoMoreThreads no_more;
    if (harness::can_make_threads())
      GTEST_SKIP() << "this system, or this sanitizer, makes threads with any stack";
    try {
      EventLoop loop("test");
    } catch (const Error& error) {
      refused = error;
    }
  }
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->blame(), Blame::Busy);
  EXPECT_NE(refused->text().find("'test' cannot start its thread"), std::string::npos)
      << refused->text();
}

TEST(EventLoop, MayBeDestroyedInsideItsOwnTurn) {
  auto* loop = new EventLoop("test");
  std::promise<void> destroyed;
  bool later = false;
  loop->post([&] {
    loop->post([&later] { later = true; });
    delete loop;
    destroyed.set_value();
  });
  destroyed.get_future().wait();
  EXPECT_FALSE(later);
}

TEST(EventLoop, EndedLoopFreesHandlersAndTasks) {
  struct Owner {
    EventLoop::Registration registration;
  };
  auto owner = std::make_shared<Owner>();
  auto task = std::make_shared<int>(0);
  const std::weak_ptr<Owner> watched_owner = owner;
  const std::weak_ptr<int> watched_task = task;
  {
    EventLoop loop("test");
    owner->registration =
        loop.poll([owner] { return false; });  // the handler owns its registration's owner
    loop.when(Fence(std::make_shared<Silent>()), [task = std::move(task)] {});
    flush(loop);
    owner.reset();
    EXPECT_FALSE(watched_owner.expired());
    EXPECT_FALSE(watched_task.expired());
  }
  EXPECT_TRUE(watched_owner.expired());
  EXPECT_TRUE(watched_task.expired());
}

TEST(EventLoop, RegistrationsMayOutliveTheLoop) {
  EventLoop::Registration timer;
  EventLoop::Registration poller;
  {
    EventLoop loop("test");
    timer = loop.at(Deadline::in(seconds(3600)), [] {});
    poller = loop.poll([] { return false; });
  }
  timer.reset();
  poller.reset();
  SUCCEED();
}

TEST(EventLoop, DropsPendingWorkWhenItEnds) {
  auto owned = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = owned;
  {
    EventLoop loop("test");
    auto timer = loop.at(Deadline::in(seconds(3600)), [owned = std::move(owned)] {});
  }
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace weft
