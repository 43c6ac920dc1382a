#include <cstdlib>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/engine/launch/status.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/progress.h>
#include <weft/tests/harness/folder.h>

namespace weft::launch {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

TEST(StatusLine, ShowsWhatEachRankHasCounted) {
  StatusLine status(std::chrono::hours(1));
  const std::string page = status.add(0);
  status.add(1);
  const pid_t child = ::fork();
  if (child == 0) {
    trace::step(0);  // before there is a page
    trace::publish_progress(page.c_str());
    trace::publish_progress(page.c_str());
    trace::step(0);
    const trace::Member member = trace::Member::join({"group", "default", 0, {0, 1}});
    trace::Operation::begin(member, trace::Kind::Collective, {.name = "all_reduce", .bytes = 8}).end();
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
  EXPECT_THAT(status.line(), HasSubstr("rank 0: step 2, 0.0 steps/s, 0.0 operations/s, 0.00 MB/s"));
  const std::string summary = status.summary();
  EXPECT_THAT(summary, StartsWith("in all "));
  EXPECT_THAT(summary, HasSubstr("rank 0: step 2, "));
  EXPECT_THAT(summary, Not(HasSubstr(" 0.0 steps/s"))) << "a mean over the whole time";
}

TEST(StatusLine, APageThatIsNoneIsAnErrorThatNamesTheVariable) {
  for (const char* wrong : {"/nowhere/page", "/dev/null"}) {
    try {
      trace::publish_progress(wrong);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.text(), HasSubstr("WEFT_STATUS_FILE is '" + std::string(wrong) + "'"));
    }
  }
}

TEST(StatusLine, AFileOfTheUsersIsAnErrorAndStaysAsItIs) {
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
