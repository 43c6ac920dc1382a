// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <optional>
#include <set>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/descriptor.h>
#include <weft/profiling/trace/depth.h>
#include <weft/profiling/trace/dump.h>
#include <weft/profiling/trace/flight_recorder.h>
#include <weft/profiling/trace/open_ranges.h>
#include <weft/profiling/trace/operation.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/no_more_threads.h>
#include <weft/tests/harness/sanitized.h>

namespace weft::trace {
namespace {

const Member& somebody() {
  static const Member member = Member::join({"group", "default", 0, {0, 1}});
  return member;
}

std::unique_ptr<FlightRecorder> made() { return std::make_unique<FlightRecorder>(); }

TEST(FlightRecorder, TellsRunningCallsFromQueuedOnes) {
  const auto recorder = made();
  const auto ticket = recorder->begin(somebody(), Kind::Served, {"f", 1, 0}, 1000);
  EXPECT_FALSE(recorder->read().at(0).runs);
  recorder->run(ticket);
  EXPECT_TRUE(recorder->read().at(0).runs);
  EXPECT_EQ(recorder->read().at(0).state, State::Open);
  recorder->end(ticket, 3000, nullptr, -1, 0);
  recorder->run(ticket);  // too late
  EXPECT_FALSE(recorder->read().at(0).runs);
  EXPECT_EQ(recorder->read().at(0).state, State::Done);
}

TEST(FlightRecorder, KeepsAllFieldsOfAnOperation) {
  const auto recorder = made();
  const std::array<std::int64_t, 5> shape{2, 3, 4, 5, 6};
  const auto ticket = recorder->begin(somebody(), Kind::Send,
                                      {"send", 7, 1, 42, 128, "float32", shape, "Max"}, 1000);
  auto records = recorder->read();
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].member.party(), somebody().party());
  EXPECT_EQ(records[0].kind, Kind::Send);
  EXPECT_EQ(records[0].state, State::Open);
  EXPECT_STREQ(records[0].name, "send");
  EXPECT_EQ(records[0].sequence, 7u);
  EXPECT_EQ(records[0].peer, 1);
  EXPECT_EQ(records[0].tag, 42);
  EXPECT_EQ(records[0].bytes, 128u);
  EXPECT_STREQ(records[0].dtype, "float32");
  EXPECT_EQ(records[0].dims, 5);
  EXPECT_EQ(records[0].shape, (std::array<std::int64_t, kMostDims>{2, 3, 4, 5}));
  EXPECT_STREQ(records[0].reduction, "Max");
  EXPECT_EQ(records[0].begun, 1000);
  EXPECT_EQ(records[0].ended, 0);
  EXPECT_TRUE(recorder->end(ticket, 3000, nullptr, -1, 0));
  records = recorder->read();
  EXPECT_EQ(records[0].state, State::Done);
  EXPECT_EQ(records[0].ended, 3000);
  EXPECT_EQ(records[0].peer, 1);
}

TEST(FlightRecorder, FirstEndCountsAndKeepsItsError) {
  const auto recorder = made();
  const auto ticket = recorder->begin(somebody(), Kind::Collective, {.name = "all_reduce"}, 1);
  const Error lost(Blame::PeerLost, std::string(500, 'x'));
  EXPECT_TRUE(recorder->end(ticket, 2, &lost, -1, 0));
  EXPECT_FALSE(recorder->end(ticket, 3, nullptr, -1, 0));
  const auto records = recorder->read();
  EXPECT_EQ(records[0].state, State::Failed);
  EXPECT_EQ(records[0].ended, 2);
  EXPECT_EQ(static_cast<Blame>(records[0].blame), Blame::PeerLost);
  EXPECT_EQ(std::string(records[0].error.data()), std::string(kErrorBytes - 1, 'x'));
}

TEST(FlightRecorder, LateKnownSourceIsKept) {
  const auto recorder = made();
  const auto ticket = recorder->begin(somebody(), Kind::Receive, {.name = "recv", .tag = 5}, 1);
  EXPECT_TRUE(recorder->end(ticket, 2, nullptr, 3, 9));
  const auto records = recorder->read();
  EXPECT_EQ(records[0].peer, 3);
  EXPECT_EQ(records[0].sequence, 9u);
  EXPECT_EQ(records[0].tag, 5);
}

TEST(FlightRecorder, HoldsTheLastOperations) {
  const auto recorder = made();
  for (std::uint64_t i = 1; i <= 2 * kRecords; ++i) {
    EXPECT_TRUE(
        recorder->end(recorder->begin(somebody(), Kind::Call, {.name = "f", .sequence = i}, 1), 2,
                      nullptr, -1, 0));
  }
  const auto records = recorder->read();
  ASSERT_EQ(records.size(), kRecords);
  EXPECT_EQ(records.front().sequence, kRecords + 1);
  EXPECT_EQ(records.back().sequence, 2 * kRecords);
}

TEST(FlightRecorder, HungOperationIsNotEvicted) {
  const auto recorder = made();
  const auto hangs =
      recorder->begin(somebody(), Kind::Collective, {.name = "all_reduce", .sequence = 1}, 1);
  for (std::uint64_t i = 0; i < 10 * kRecords; ++i) {
    recorder->end(recorder->begin(somebody(), Kind::Call, {.name = "f"}, 1), 2, nullptr, -1, 0);
  }
  const auto records = recorder->read();
  EXPECT_EQ(records.front().ticket, hangs);
  EXPECT_EQ(records.front().state, State::Open);
  EXPECT_TRUE(recorder->end(hangs, 5, nullptr, -1, 0));
}

TEST(FlightRecorder, RingOfOpenOperationsTakesNewOnes) {
  const auto recorder = made();
  for (std::uint64_t i = 0; i < kRecords; ++i)
    recorder->begin(somebody(), Kind::Call, {.name = "f", .sequence = 1}, 1);
  EXPECT_NE(recorder->begin(somebody(), Kind::Call, {.name = "f", .sequence = 2}, 1), 0u);
  const auto records = recorder->read();
  EXPECT_EQ(records.back().sequence, 2u);
}

TEST(FlightRecorder, ReadersNeverSeeHalfARecord) {
  const auto recorder = made();
  std::atomic<int> left{4};
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 4; ++writer) {
    writers.emplace_back([&, writer] {
      for (std::uint64_t i = 0; i < 20'000; ++i) {
        const std::uint64_t value = i * 4 + static_cast<std::uint64_t>(writer);
        const auto ticket = recorder->begin(somebody(), Kind::Call,
                                            {.name = "f", .sequence = value, .bytes = value},
                                            static_cast<std::int64_t>(value));
        recorder->end(ticket, static_cast<std::int64_t>(value), nullptr, -1, 0);
      }
      --left;
    });
  }
  std::size_t seen = 0;
  do {
    for (const Record& record : recorder->read()) {
      ++seen;
      ASSERT_EQ(record.bytes, record.sequence);
      ASSERT_EQ(static_cast<std::uint64_t>(record.begun), record.sequence);
      if (record.state == State::Done) {
        ASSERT_EQ(record.ended, record.begun);
      }
    }
  } while (left > 0);
  for (std::thread& writer : writers) writer.join();
  EXPECT_GT(seen, 0u);
  EXPECT_EQ(recorder->read().size(), kRecords);
}

TEST(Operation, NeedsAMemberAndEndsOnce) {
  flight_recorder().forget();
  Operation nobodys = Operation::begin(Member(), Kind::Call, {.name = "f"});
  nobodys.end();
  EXPECT_TRUE(flight_recorder().read().empty());
  Operation one = Operation::begin(somebody(), Kind::Call, {.name = "f"});
  one.fail(Error(Blame::Timeout, "late"));
  one.end();
  const auto records = flight_recorder().read();
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].state, State::Failed);
}

TEST(Operation, RemadeGroupIsANewGeneration) {
  const MemberIdentity party{"group", "again", 0, {0}};
  const Member first = Member::join(party);
  const Member second = Member::join(party);
  EXPECT_EQ(first.party(), second.party());
  EXPECT_NE(first.generation(), second.generation());
}

// Otherwise ranks would disagree on the generation: some may have tried more often than others.
TEST(Operation, FailedGroupReusesItsGeneration) {
  const MemberIdentity party{"group", "tried", 0, {0, 1}};
  const Member failed = Member::join(party);
  failed.withdraw();
  EXPECT_FALSE(members().empty()) << "the failed member's operations stay on record";
  const Member joined = Member::join(party);
  EXPECT_EQ(joined.generation(), failed.generation());
  const Member next = Member::join(party);
  joined.withdraw();  // not the newest member
  EXPECT_EQ(Member::join(party).generation(), next.generation() + 1);
  Member().withdraw();
}

// Each test forks a process for its calls of dump_to() and dump_on_signal(), which start a thread
// that never ends. A process with a second thread cannot fork children for the tests of SIGUSR1:
// ThreadSanitizer intercepts nothing in such a child (die_after_fork=0), so it queues the child's
// signals and never calls their handlers.
class Dump : public testing::Test {
 protected:
  void TearDown() override {
    struct sigaction present {};
    ASSERT_EQ(::sigaction(SIGUSR1, nullptr, &present), 0);
    EXPECT_EQ(present.sa_handler, SIG_DFL)
        << "the test called dump_to() in the process that runs all tests";
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      if (entry.path().extension() == ".json") names.push_back(entry.path().string());
    }
    return names;
  }
  const harness::Folder kept_;
  const std::string folder_ = kept_.path();
};

// Starts a process that calls `prepare` and then stays. SIGUSR1 reaches its main thread inside
// sigsuspend() only: ThreadSanitizer loses a signal that arrives while it allocates its state for
// the thread's signals, in the thread's first blocking call.
pid_t staying(const std::function<void()>& prepare) {
  int ready[2];
  EXPECT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    prepare();
    sigset_t signal;
    sigset_t before;
    ::sigemptyset(&signal);
    ::sigaddset(&signal, SIGUSR1);
    ::pthread_sigmask(SIG_BLOCK, &signal, &before);
    [[maybe_unused]] const auto written = ::write(ready[1], "r", 1);
    for (;;) ::sigsuspend(&before);
  }
  char byte = 0;
  EXPECT_EQ(::read(ready[0], &byte, 1), 1);
  ::close(ready[0]);
  ::close(ready[1]);
  return child;
}

TEST_F(Dump, Sigusr1DumpsToTheUsersTempFolder) {
  const pid_t child = staying([&] {
    ::setenv("TMPDIR", folder_.c_str(), 1);
    dump_on_signal();
    dump_now("nobody has asked");
  });
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/weft-" + std::to_string(::geteuid())));
  ::kill(child, SIGUSR1);
  std::string found;
  while (found.empty()) {  // ctest's time limit ends it
    std::this_thread::yield();
    std::error_code none_yet;
    for (const auto& entry : std::filesystem::directory_iterator(
             folder_ + "/weft-" + std::to_string(::geteuid()), none_yet)) {
      if (entry.path().extension() == ".json") found = entry.path();
    }
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(nlohmann::json::parse(std::ifstream(found)).at("reason"), "SIGUSR1");
}

TEST_F(Dump, IsJsonWithPartiesAndRecords) {
  flight_recorder().forget();
  Operation one =
      Operation::begin(somebody(), Kind::Collective, {.name = "all \"reduce\"\n", .sequence = 3});
  one.fail(Error(Blame::Timeout, "too \xff late"));
  const auto json = nlohmann::json::parse(dump("asked"));
  EXPECT_EQ(json.at("weft"), "flight recorder 1");
  EXPECT_EQ(json.at("reason"), "asked");
  ASSERT_EQ(json.at("records").size(), 1u);
  const auto& record = json.at("records")[0];
  EXPECT_EQ(record.at("name"), "all \"reduce\"\n");
  EXPECT_EQ(record.at("error"), "too ? late");
  EXPECT_EQ(record.at("blame"), "Timeout");
  const auto& parties = json.at("parties");
  const auto party = std::find_if(parties.begin(), parties.end(), [&](const auto& each) {
    return each.at("party") == record.at("party");
  });
  ASSERT_NE(party, parties.end());
  EXPECT_EQ(party->at("ranks"), (std::vector<int>{0, 1}));
}

TEST_F(Dump, HasTheRangesThatAreOpen) {
  const OpenRange step("step");
  { const OpenRange ended("ended"); }
  const std::int64_t before = now();
  std::optional<OpenRange> inner(std::in_place, "inner");
  const auto names = [] {
    std::vector<std::string> found;
    const auto json = nlohmann::json::parse(dump("asked"));
    for (const auto& range : json.at("ranges")) found.push_back(range.at("name"));
    return found;
  };
  EXPECT_EQ(names(), (std::vector<std::string>{"step", "inner"}));
  EXPECT_GE(nlohmann::json::parse(dump("asked")).at("ranges")[1].at("begun"), before);
  inner.reset();
  EXPECT_EQ(names(), std::vector<std::string>{"step"});
}

TEST_F(Dump, RangesOfOtherThreadsEndInAForkedChild) {
  std::promise<void> is_open;
  std::promise<void> may_end;
  std::thread other([&] {
    const OpenRange range("of another thread");
    is_open.set_value();
    may_end.get_future().wait();
  });
  is_open.get_future().wait();
  const OpenRange own("own");
  const pid_t child = ::fork();
  if (child == 0) {
    const auto json = nlohmann::json::parse(dump("asked"));
    const auto& ranges = json.at("ranges");
    ::_exit(ranges.size() == 1 && ranges[0].at("name") == "own" ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  may_end.set_value();
  other.join();
  EXPECT_EQ(status, 0);
}

TEST_F(Dump, RelativeFolderIsResolvedAtOnce) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::filesystem::current_path(folder_);
    dump_to("dumps");
    std::filesystem::current_path("/");
    dump_to("dumps");  // another group
    dump_after("f", Error(Blame::PeerLost, "gone"));
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  const std::filesystem::directory_iterator dumps(folder_ + "/dumps");
  EXPECT_EQ(std::distance(begin(dumps), end(dumps)), 1);
}

TEST_F(Dump, IsWrittenForFailuresNotCancelling) {
  const pid_t child = ::fork();
  if (child == 0) {
    dump_after("f", Error(Blame::Timeout, "no folder yet"));
    dump_to(folder_);
    dump_after("f", Error(Blame::Cancelled, "not wanted any more"));
    dump_after("f", Error(Blame::PeerLost,
                          "gone"));  // dropped if one of the others was written
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  ASSERT_EQ(files().size(), 1u);
  EXPECT_EQ(nlohmann::json::parse(std::ifstream(files().front())).at("reason"), "f: gone");
}

TEST_F(Dump, TimeoutsLossesAndGpusAreWorthOne) {
  for (const Blame blame : {Blame::Timeout, Blame::PeerLost, Blame::Device})
    EXPECT_TRUE(is_worth_a_dump(Error(blame, "")));
  for (const Blame blame :
       {Blame::Caller, Blame::Remote, Blame::Cancelled, Blame::Busy, Blame::Unsupported})
    EXPECT_FALSE(is_worth_a_dump(Error(blame, "")));
}

TEST_F(Dump, ForkedChildDumpsOnlyItsOwn) {
  const Member parents = somebody();
  joined_job("parent's");
  const std::string path = folder_ + "/child.json";
  const pid_t child = ::fork();
  if (child == 0) {
    joined_job("child's");
    Operation::note(Member::join({"group", "of the child", 1, {0, 1}}), Kind::Collective,
                    {.name = "barrier"});
    parents.withdraw();  // as when a group could not be made
    std::ofstream(path) << dump("asked");
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  const auto json = nlohmann::json::parse(std::ifstream(path));
  EXPECT_EQ(json.at("jobs"), nlohmann::json({"child's"}));
  ASSERT_EQ(json.at("parties").size(), 1u);
  EXPECT_EQ(json.at("parties")[0].at("name"), "of the child");
  EXPECT_EQ(nlohmann::json::parse(dump("asked")).at("jobs"), nlohmann::json({"parent's"}));
}

TEST_F(Dump, SucceedsAfterAForkMidUpdate) {
  somebody();
  joined_job("parent's");
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    while (!is_over) {
      members();
      joined_job("parent's");
    }
  });
  for (int round = 0; round < 100; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);  // ends a dump that blocks for ever
      dump("asked");
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    if (status != 0) break;
  }
  is_over = true;
  other.join();
}

// In a process whose thread "weft dump" writes one file after the other.
TEST_F(Dump, SucceedsAfterAForkMidDump) {
  const pid_t parent = ::fork();
  if (parent == 0) {
    somebody();
    joined_job("parent's");
    dump_to(folder_ + "/parent");
    std::atomic<bool> is_over{false};
    std::thread asking([&] {
      while (!is_over) ::kill(::getpid(), SIGUSR1);
    });
    int failed = 0;
    for (int round = 0; round < 50 && failed == 0; ++round) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(20);  // ends a dump that blocks for ever
        joined_job("child's");
        static_cast<void>(Operation::begin(somebody(), Kind::Collective, {.name = keep("hangs")}));
        dump_after("f", Error(Blame::Timeout, "before the folder is known"));
        // (Under ThreadSanitizer a process that was forked beside other threads cannot start
        // threads.)
        if (!harness::kThreadSanitized) dump_to(folder_ + "/child");
        ::_exit(dump("asked").empty() ? 1 : 0);
      }
      ::waitpid(child, &failed, 0);
    }
    is_over = true;
    asking.join();
    ::_exit(failed == 0 ? 0 : 1);
  }
  int status = 0;
  ::waitpid(parent, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(Dump, OutOfThreadsIsBusyAndRetryable) {
  if (harness::kSanitized)
    GTEST_SKIP() << "a sanitizer makes threads of any size, or none in a process that was forked";
  EXPECT_EXIT(
      {
        Error error(Blame::Remote, "none");
        const auto next = [] { return Descriptor(::open("/dev/null", O_RDONLY)).get(); };
        const int before = next();
        {
          const harness::NoMoreThreads no_more;
          if (harness::can_make_threads()) {
            std::fputs(
                "ulimit -u",
                stderr);  // this system, or this sanitizer, makes threads with stacks of any size
            ::_exit(0);
          }
          try {
            dump_to(folder_);
          } catch (const Error& caught) {
            error = caught;
          }
        }
        std::fputs(error.what(), stderr);
        if (next() != before) ::_exit(2);
        dump_to(folder_);
        ::raise(SIGUSR1);
        while (files().empty()) std::this_thread::yield();  // ctest's time limit ends it
        ::_exit(error.blame() == Blame::Busy ? 0 : 1);
      },
      testing::ExitedWithCode(0), "ulimit -u");
}

TEST_F(Dump, KeepsTheProgramsSignalHandler) {
  const pid_t child = ::fork();
  if (child == 0) {
    // (A process that ends inside a handler may wait for ever for a lock that ThreadSanitizer holds
    // there.)
    static volatile std::sig_atomic_t handled = 0;
    ::signal(SIGUSR1, [](int) { handled = 1; });
    dump_on_signal();
    ::raise(SIGUSR1);  // returns once the handler has run
    ::_exit(handled != 0 ? 7 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 7) << "the program's handler was not called";
}

TEST_F(Dump, KeepsTheHandlerWithAFolderToo) {
  const pid_t child = ::fork();
  if (child == 0) {
    static volatile std::sig_atomic_t handled = 0;
    ::signal(SIGUSR1, [](int) { handled = 1; });
    dump_to(folder_);
    dump_to(folder_);  // another group
    ::raise(SIGUSR1);
    if (handled == 0) ::_exit(1);
    dump_after("f", Error(Blame::PeerLost, "gone"));
    ::_exit(7);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 7) << "the program's handler was not called";
  ASSERT_EQ(files().size(), 1u);
  EXPECT_EQ(nlohmann::json::parse(std::ifstream(files().front())).at("reason"), "f: gone");
}

TEST_F(Dump, IsWrittenOnSigusr1) {
  const pid_t child = staying([&] {
    dump_to(folder_);
    static_cast<void>(Operation::begin(somebody(), Kind::Collective, {.name = "hangs"}));
  });
  ::kill(child, SIGUSR1);
  while (files().empty()) std::this_thread::yield();  // ctest's time limit ends it
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const auto json = nlohmann::json::parse(std::ifstream(files().front()));
  EXPECT_EQ(json.at("reason"), "SIGUSR1");
  EXPECT_EQ(json.at("pid"), child);
  ASSERT_EQ(json.at("records").size(), 1u);
  EXPECT_EQ(json.at("records")[0].at("name"), "hangs");
}

// Returns the signals that the thread "weft dump" blocks, one bit for each from SIGHUP on. Waits
// until the thread has its name.
std::uint64_t blocked_in_dump_thread() {
  for (;;) {
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::ifstream comm(task.path() / "comm");
      std::getline(comm, name);
      if (name != "weft dump") continue;
      std::ifstream status(task.path() / "status");
      for (std::string line; std::getline(status, line);) {
        if (line.starts_with("SigBlk:")) return std::stoull(line.substr(7), nullptr, 16);
      }
    }
    std::this_thread::yield();
  }
}

TEST_F(Dump, OnlyItsThreadBlocksTheSignal) {
  const pid_t child = ::fork();
  if (child == 0) {
    dump_to(folder_);
    sigset_t here;
    ::pthread_sigmask(SIG_BLOCK, nullptr, &here);
    const bool blocks = (blocked_in_dump_thread() >> (SIGUSR1 - 1) & 1) != 0;
    ::_exit(blocks && ::sigismember(&here, SIGUSR1) == 0 ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

// The number of a process's file: the last part of its name.
int number_of(const std::string& file) { return std::stoi(file.substr(file.rfind('-') + 1)); }

class ManyDumps : public Dump {
 protected:
  std::set<int> numbers(pid_t process) const {
    std::set<int> found;
    for (const std::string& file : files()) {
      if (file.find("/dump-" + std::to_string(process) + "-") != std::string::npos)
        found.insert(number_of(file));
    }
    return found;
  }
  // Has a process that has called dump_to() write dumps.
  void write(pid_t process, int count) const {
    for (int number = 1; number <= count; ++number) {
      ::kill(process, SIGUSR1);
      while (!numbers(process).contains(number))
        std::this_thread::yield();  // ctest's time limit ends it
    }
  }
};

TEST_F(ManyDumps, KeepTheFirstAndTheNewest) {
  const pid_t child = staying([&] { dump_to(folder_); });
  write(child, 21);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  std::set<int> left = numbers(child);
  left.erase(13);  // removed once the 21st is written
  EXPECT_EQ(left, (std::set<int>{1, 2, 3, 4, 5, 6, 7, 8, 14, 15, 16, 17, 18, 19, 20, 21}));
}

TEST_F(ManyDumps, ChildKeepsItsParentsDumps) {
  const pid_t child = ::fork();
  if (child == 0) {
    dump_to(folder_);
    write(::getpid(), 16);
    const pid_t grandchild = ::fork();
    if (grandchild == 0) {
      dump_to(folder_);
      write(::getpid(), 2);
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(grandchild, &status, 0);
    ::_exit(status == 0 && numbers(::getpid()).size() == 16 ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(Dump, FailedWriteLeavesNothing) {
  const pid_t child = ::fork();
  if (child == 0) {
    dump_to(folder_);
    const rlimit small{16, 16};
    ::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &small);
    ::_exit(dump_now("the disk is full").empty() ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

// Workers that come and go under new names may make that many.
TEST(Depths, NamesBeyondAThousandShareOne) {
  Depth& first = depth(Queue::Calls, "worker 0");
  for (int i = 0; i < 3000; ++i) depth(Queue::Calls, "worker " + std::to_string(i)).add(1);
  EXPECT_EQ(&depth(Queue::Calls, "worker 0"), &first);
  EXPECT_EQ(first.now, 1);
  Depth& others = depth(Queue::Calls, "worker 2999");
  EXPECT_EQ(others.of, "others");
  EXPECT_GE(others.now, 2000);
  EXPECT_NE(&depth(Queue::Handlers, "one more"), &others);
  EXPECT_LE(depths().size(), kMostDepths + 2);
}

}  // namespace
}  // namespace weft::trace
