// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <map>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <weft/tests/engine/launch/command.h>
#include <weft/version.h>

namespace weft::launch {
namespace {

using testing::HasSubstr;
using testing::Not;

// Returns the rows of `weft-info --json` by the transports' names.
std::map<std::string, nlohmann::json> rows(const std::string& environment = "") {
  const auto outcome = run(environment + path_of("weft-info") + " --json");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  std::map<std::string, nlohmann::json> found;
  const auto all = nlohmann::json::parse(outcome.out);
  for (const auto& row : all.at("transports")) found[row.at("name")] = row;
  return found;
}

TEST(WeftInfo, ListsEveryTransportOrWhyNot) {
  const auto found = rows();
  for (const auto& folder : std::filesystem::directory_iterator(WEFT_TEST_TRANSPORTS)) {
    const std::string name = folder.path().filename();
    if (!std::filesystem::exists(folder.path() / "CMakeLists.txt") || name == "mesh")
      continue;  // several transports are built on it
    ASSERT_TRUE(found.contains(name)) << name;
    const auto& row = found.at(name);
    if (row.at("usable")) {
      EXPECT_TRUE(row.at("host_memory") || row.at("device_memory")) << row;
      EXPECT_FALSE(row.contains("why_not")) << row;
    } else {
      EXPECT_FALSE(row.at("why_not").get<std::string>().empty()) << row;
    }
  }
  for (const char* name : {"inproc", "shm", "tcp"}) {
    EXPECT_TRUE(found.at(name).at("usable")) << name;
    EXPECT_GT(found.at(name).at("inline_bytes"), 0) << name;
  }
}

#ifdef WEFT_TEST_NO_GPUS
TEST(WeftInfo, GpuTransportsAreUnusableWithoutGpu) {
  const auto found = rows("LD_LIBRARY_PATH=" WEFT_TEST_NO_GPUS " ");
  EXPECT_THAT(found.at("cuda_ipc").at("why_not").get<std::string>(), HasSubstr("sees no GPU"));
}
#endif

TEST(WeftInfo, NoTransportIsCollectivesOnly) {
  const auto outcome = run(path_of("weft-info"));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (const char* name : {"gloo", "inproc", "shm", "tcp"})
    EXPECT_THAT(outcome.out, HasSubstr(std::string(name) + " "));
  EXPECT_THAT(outcome.out, Not(HasSubstr("collectives only")));
}

TEST(WeftInfo, VersionNamesTheLibtorch) {
  // weft-info links libtorch for the gloo backend only.
  const std::string libtorch = WEFT_TEST_GLOO ? " (libtorch " WEFT_TEST_LIBTORCH ")" : "";
  const auto outcome = run(path_of("weft-info") + " --version");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "weft-info " WEFT_VERSION + libtorch + "\n");
}

TEST(WeftInfo, UnwritableOutputIsAnError) {
  const auto outcome = run(path_of("weft-info") + " --json > /dev/full");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("weft-info: cannot write to stdout: No space left on device"));
}

TEST(WeftInfo, RefusesUnknownOptionsAndValues) {
  EXPECT_EQ(run(path_of("weft-info") + " --bogus").code, 2);
  const auto outcome = run("WEFT_LOG=loud " + path_of("weft-info"));
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("WEFT_LOG is 'loud'"));
}

}  // namespace
}  // namespace weft::launch
