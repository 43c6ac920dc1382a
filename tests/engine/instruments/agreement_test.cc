// SPDX-License-Identifier: Apache-2.0
// Tests how ranks agree on the file of their timeline.
#include <optional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/engine/instruments/instruments.h>
#include <weft/tests/harness/memory_bootstrap.h>

namespace weft::instruments {
namespace {

using testing::HasSubstr;

std::optional<Error> error_of(const InstrumentedRank& participant, transport::Bootstrap& store) {
  try {
    agree_on_file(participant, store, Deadline::in(std::chrono::seconds(60)));
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  }
}

// Returns the errors of ranks with these files.
std::vector<std::optional<Error>> errors_of(const std::vector<std::string>& files) {
  harness::MemoryBootstrap store;
  std::vector<std::optional<Error>> errors(files.size());
  std::vector<std::thread> ranks;
  for (std::size_t i = 0; i < files.size(); ++i) {
    ranks.emplace_back([&, i] {
      errors[i] = error_of({static_cast<int>(i), static_cast<int>(files.size()), files[i]}, store);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return errors;
}

TEST(Agreement, OneFileIsNoError) {
  for (const auto& error : errors_of({"run.json", "./run.json", "run.json"}))
    EXPECT_FALSE(error) << error->text();
}

TEST(Agreement, DifferentFilesErrorNamesBoth) {
  for (const auto& error : errors_of({"a.json", "a.json", "b.json"})) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->blame(), Blame::Caller) << error->text();
    EXPECT_THAT(error->text(), HasSubstr("'a.json'"));
    EXPECT_THAT(error->text(), HasSubstr("rank 2 makes a timeline in 'b.json'"));
  }
}

TEST(Agreement, RankWithAFileLearnsOfOneWithout) {
  harness::MemoryBootstrap store;
  EXPECT_FALSE(error_of({0, 2, ""}, store)) << "a rank without a file does not wait";
  const auto error = error_of({1, 2, "run.json"}, store);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->blame(), Blame::Caller);
  EXPECT_THAT(error->text(),
              HasSubstr("rank 1 makes a timeline in 'run.json', and rank 0 makes none"));
}

TEST(Agreement, RankWithoutAFileTellsTheOthers) {
  harness::MemoryBootstrap store;
  std::optional<Error> first;
  std::thread maker([&] { first = error_of({1, 2, "run.json"}, store); });
  store.get("weft/timeline/first", Deadline::never());
  const auto second = error_of({0, 2, ""}, store);
  maker.join();
  for (const auto& error : {first, second}) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->blame(), Blame::Caller);
    EXPECT_THAT(error->text(),
                HasSubstr("rank 1 makes a timeline in 'run.json', and rank 0 makes none"));
  }
}

TEST(Agreement, IsNotNeededByASingleRank) {
  harness::MemoryBootstrap store;
  EXPECT_FALSE(error_of({0, 1, "a.json"}, store));
  EXPECT_FALSE(error_of({3, 0, "a.json"}, store));
}

}  // namespace
}  // namespace weft::instruments
