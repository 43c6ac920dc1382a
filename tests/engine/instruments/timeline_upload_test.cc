// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/engine/instruments/timeline_upload.h>
#include <weft/engine/store/store.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/memory_bootstrap.h>

namespace weft::instruments {
namespace {

using testing::HasSubstr;

const std::string kJob = "0123456789abcdef";

// Two machines, each with its own folder, and a common store.
class Parts : public testing::Test {
 protected:
  Parts() {
    for (const char* machine : {"here", "there"})
      std::filesystem::create_directories(trace::timeline::folder_of_parts(file(machine)));
  }

  std::string file(const std::string& machine) const {
    return folder_ + "/" + machine + "/run.json";
  }
  std::string part(const std::string& machine, int rank, const std::string& ending = "1") const {
    return trace::timeline::folder_of_parts(file(machine)) + "/" + kJob + "." +
           std::to_string(rank) + "." + ending;
  }
  static void write(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }
  static std::string read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }
  std::string warnings() {
    std::lock_guard lock(mutex_);
    return warnings_;
  }

  const harness::Folder kept_;
  const std::string folder_ = kept_.path();
  harness::MemoryBootstrap store_;
  std::mutex mutex_;
  std::string warnings_;
  log::Capture capture_{[this](LogLevel level, std::string_view text) {
    std::lock_guard lock(mutex_);
    if (level == LogLevel::Warn || level == LogLevel::Error) warnings_ += std::string(text) + "\n";
  }};
};

TEST_F(Parts, AreAwayIfRankZerosPartIsUnseen) {
  write(part("here", 0), "");
  show_part(store_, part("here", 0));
  EXPECT_FALSE(is_away(store_, 1, file("here"), Deadline::in(std::chrono::seconds(10))));
  EXPECT_TRUE(is_away(store_, 2, file("there"), Deadline::in(std::chrono::seconds(10))));
}

TEST_F(Parts, TravelWholeToRankZero) {
  write(part("here", 0), "");
  show_part(store_, part("here", 0));
  std::string large;
  for (int i = 0; large.size() < (kPiecesAhead + 3) * kPiece; ++i)
    large += std::to_string(i) + "\n";
  const std::vector<std::string> texts{"", "short\n", large};
  for (int rank = 1; rank <= 3; ++rank) {
    write(part("there", rank), texts[static_cast<std::size_t>(rank - 1)]);
    EXPECT_TRUE(is_away(store_, rank, file("there"), Deadline::in(std::chrono::seconds(10))));
  }
  std::vector<std::thread> ranks;
  for (int rank = 1; rank <= 3; ++rank)
    ranks.emplace_back([this, rank] { send_part(store_, rank, part("there", rank)); });
  EXPECT_EQ(take_parts(store_, 4, file("here"), kJob), 3);
  for (std::thread& rank : ranks) rank.join();
  for (int rank = 1; rank <= 3; ++rank)
    EXPECT_TRUE(read(part("here", rank, "away")) == texts[static_cast<std::size_t>(rank - 1)])
        << rank;
  EXPECT_EQ(warnings(), "");
}

// The receiver does not trust a peer's data.
TEST_F(Parts, InvalidPartWarningNamesTheRank) {
  const auto put = [this](const std::string& key, const std::string& text) {
    store_.set("weft/timeline/parts/" + key, group::to_bytes(text));
  };
  store_.add("weft/timeline/parts/away", 3);
  put("away/1", "1");
  put("1/bytes", std::to_string(trace::timeline::kMostPart + 1));
  put("away/2", "2");
  put("2/bytes", "10");
  put("2/0", "eleven bytes");
  put("away/3", "3");
  put("3/bytes", "-1");
  EXPECT_EQ(take_parts(store_, 4, file("here"), kJob), 0);
  for (int rank = 1; rank <= 3; ++rank) {
    EXPECT_THAT(warnings(), HasSubstr("the timeline lacks rank " + std::to_string(rank)));
    EXPECT_FALSE(std::filesystem::exists(part("here", rank, "away")));
  }
  EXPECT_THAT(warnings(), HasSubstr("a piece of it has another size than was announced"));
}

TEST_F(Parts, PartsOfUnknownRanksAreRefused) {
  store_.add("weft/timeline/parts/away", 1);
  store_.set("weft/timeline/parts/away/1", group::to_bytes("4"));
  EXPECT_THROW(take_parts(store_, 4, file("here"), kJob), Error);
}

}  // namespace
}  // namespace weft::instruments
