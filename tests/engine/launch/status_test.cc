// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <fstream>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/engine/launch/status.h>
#include <weft/profiling/trace/host_time.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/progress.h>
#include <weft/tests/harness/folder.h>

namespace weft::launch {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

TEST(StatusLine, ShowsEachRanksCounts) {
  StatusLine status(std::chrono::hours(1));
  const std::string page = status.add(0);
  status.add(1);
  const pid_t child = ::fork();
  if (child == 0) {
    trace::step(0);  // before there is a page
    trace::publish_progress(page.c_str());
    trace::publish_progress(page.c_str());
    trace::publish_host_time();
    trace::step(0);
    const trace::Member member = trace::Member::join({"group", "default", 0, {0, 1}});
    trace::Operation::begin(member, trace::Kind::Collective, {.name = "all_reduce", .bytes = 8})
        .end();
    trace::Operation::begin(member, trace::Kind::Collective, {.name = "all_reduce", .bytes = 8})
        .fail(Error(Blame::PeerLost, "gone"));
    ::_exit(0);
  }
  int state = 0;
  ::waitpid(child, &state, 0);
  ASSERT_EQ(state, 0);
  EXPECT_EQ(status.due(), "") << "an hour has not passed";
  const std::string line = status.line();
  EXPECT_THAT(line, HasSubstr("rank 0: step 2, "));
  EXPECT_THAT(line, HasSubstr(", 1 failed"));
  EXPECT_THAT(line, HasSubstr("rank 1: has not joined"));
  EXPECT_THAT(
      status.line(),
      HasSubstr("rank 0: step 2, 0.0 steps/s, 0.0 operations/s, 0.00 MB/s, waited 0 %, 1 failed"));
  const std::string summary = status.summary();
  EXPECT_THAT(summary, StartsWith("in all "));
  EXPECT_THAT(summary, HasSubstr("rank 0: step 2, "));
  EXPECT_THAT(summary, Not(HasSubstr(" 0.0 steps/s"))) << "a mean over the whole time";
}

// A clock that only the test moves, for the status line and for the ranks whose pages the test
// writes.
struct TestClock {
  Deadline::Clock::time_point now{std::chrono::seconds(1000)};
  std::int64_t nanoseconds() const {
    return std::chrono::nanoseconds(now.time_since_epoch()).count();
  }
  StatusLine::Now reader() {
    return [this] { return now; };
  }
};

// Writes, in this process, the page that a rank would write.
class OtherRank {
 public:
  OtherRank(StatusLine& status, int rank) {
    const std::string file = status.add(rank);
    const int descriptor = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
    page_ = static_cast<trace::Progress*>(::mmap(
        nullptr, sizeof(trace::Progress), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0));
    ::close(descriptor);
    page_->magic = trace::Progress::kMagic;
  }
  ~OtherRank() { ::munmap(page_, sizeof(trace::Progress)); }
  OtherRank(const OtherRank&) = delete;
  OtherRank& operator=(const OtherRank&) = delete;
  void wait(std::size_t place, const std::string& backend, std::chrono::milliseconds time) {
    for (std::size_t i = 0; i < backend.size(); ++i) page_->backends[place].name[i] = backend[i];
    page_->backends[place].waited +=
        static_cast<std::uint64_t>(std::chrono::nanoseconds(time).count());
  }
  trace::Progress& page() { return *page_; }

 private:
  trace::Progress* page_ = nullptr;
};

TEST(StatusLine, ShowsWaitsByRankBackendAndHost) {
  TestClock clock;
  StatusLine status(std::chrono::seconds(5), clock.reader());
  OtherRank first(status, 0), second(status, 1);
  first.wait(0, "gloo", std::chrono::milliseconds(4000));
  first.wait(1, "rpc", std::chrono::milliseconds(200));
  second.wait(0, "shm", std::chrono::milliseconds(100));
  EXPECT_EQ(status.due(), "");
  clock.now += std::chrono::seconds(10);
  const std::string line = status.due();
  EXPECT_THAT(line, StartsWith("10 s on " + trace::host_name() + " | rank 0: "));
  EXPECT_THAT(line, HasSubstr("waited 42 % (gloo 40 %, rpc 2 %) | rank 1: "));
  EXPECT_THAT(line, HasSubstr("waited 1 % (shm)"));
  clock.now += std::chrono::seconds(10);
  EXPECT_THAT(status.due(), HasSubstr("MB/s, waited 0 % | rank 1")) << "since the last line";
  EXPECT_THAT(status.summary(), HasSubstr("waited 21 % (gloo 20 %, rpc 1 %)"));
}

TEST(StatusLine, CountsTheCurrentWait) {
  TestClock clock;
  StatusLine status(std::chrono::seconds(5), clock.reader());
  OtherRank rank(status, 0);
  rank.wait(0, "gloo", std::chrono::milliseconds(0));
  rank.page().waiting_since = clock.nanoseconds() + 1'000'000'000;
  clock.now += std::chrono::seconds(10);
  EXPECT_THAT(status.line(), HasSubstr("waited 90 % (gloo)"));
  clock.now += std::chrono::seconds(10);
  EXPECT_THAT(status.line(), HasSubstr("waited 100 % (gloo)"));
}

TEST(StatusLine, NamesTheRankThatWaitsLeast) {
  TestClock clock;
  StatusLine status(std::chrono::seconds(5), clock.reader());
  OtherRank first(status, 0), second(status, 1), third(status, 2);
  const auto line_of = [&](int percent0, int percent1, int percent2, bool steps = true) {
    for (auto& [rank, percent] :
         {std::pair(&first, percent0), std::pair(&second, percent1), std::pair(&third, percent2)}) {
      rank->page().steps += steps ? 1 : 0;
      rank->wait(0, "gloo", std::chrono::milliseconds(100 * percent));
    }
    clock.now += std::chrono::seconds(10);
    return status.line();
  };
  EXPECT_THAT(line_of(50, 3, 47), HasSubstr(" | rank 1 waits least, the others wait for it"));
  EXPECT_THAT(line_of(2, 40, 47), HasSubstr(" | rank 0 waits least"));
  EXPECT_THAT(line_of(47, 40, 2), HasSubstr(" | rank 2 waits least"));
  EXPECT_THAT(line_of(30, 31, 35), Not(HasSubstr("waits least"))) << "they differ by little";
  EXPECT_THAT(line_of(2, 3, 47), Not(HasSubstr("waits least"))) << "two ranks wait little";
  EXPECT_THAT(line_of(2, 40, 47, false), Not(HasSubstr("waits least")))
      << "without steps it may be a server and its clients";
}

// A rank's memory is not trusted.
TEST(StatusLine, ReadsDamagedPagesSafely) {
  TestClock clock;
  StatusLine status(std::chrono::seconds(5), clock.reader());
  OtherRank rank(status, 0);
  rank.wait(0, std::string("g\033[2Joo\n"), std::chrono::milliseconds(0));
  for (auto& letter : rank.page().backends[1].name) letter = 'x';  // without a terminating zero
  rank.page().backends[0].waited = ~std::uint64_t{0};
  rank.page().backends[1].waited = 5'000'000'000;
  rank.page().waiting_since = clock.nanoseconds();
  rank.page().waiting_for = 1'000'000;
  clock.now += std::chrono::seconds(10);
  EXPECT_THAT(status.line(), HasSubstr("waited 100 % (g?[2Joo? 100 %, xxxxxxxxxxxxxxxx 50 %)"));
}

TEST(StatusLine, BadPageErrorNamesTheVariable) {
  for (const char* wrong : {"/nowhere/page", "/dev/null"}) {
    try {
      trace::publish_progress(wrong);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.text(), HasSubstr("WEFT_STATUS_FILE is '" + std::string(wrong) + "'"));
    }
  }
}

TEST(StatusLine, UsersFileIsRefusedAndUnchanged) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/notes";
  const std::string text(4096, 'x');
  std::ofstream(file) << text;
  EXPECT_THROW(trace::publish_progress(file.c_str()), Error);
  std::ifstream stream(file);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(stream), {}), text);
}

}  // namespace
}  // namespace weft::launch
