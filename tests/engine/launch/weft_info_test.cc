#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/engine/launch/command.h>

namespace weft::launch {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(WeftInfo, DoesNotCallCollectivesOnlyWhatSendsAndReceives) {
  const auto outcome = run(path_of("weft-info"));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (const char* name : {"gloo", "inproc", "shm", "tcp"}) EXPECT_THAT(outcome.out, HasSubstr(std::string(name) + " "));
  EXPECT_THAT(outcome.out, Not(HasSubstr("collectives only")));
}

TEST(WeftInfo, OutputThatCannotBeWrittenIsAnError) {
  const auto outcome = run(path_of("weft-info") + " --json > /dev/full");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("weft-info: cannot write to stdout: No space left on device"));
}

TEST(WeftInfo, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(run(path_of("weft-info") + " --bogus").code, 2);
  const auto outcome = run("WEFT_LOG=loud " + path_of("weft-info"));
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("WEFT_LOG is 'loud'"));
}

}  // namespace
}  // namespace weft::launch
