// WEFT_TIMELINE with real ranks.
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <torch/torch.h>

#include <weft/group.h>
#include <weft/profiling/tools/summary.h>
#include <weft/rpc.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::Processes;

int twice(int value) { return 2 * value; }

class TimelineOfRanks : public testing::Test {
 protected:
  TimelineOfRanks() {
    std::string name = std::filesystem::temp_directory_path() / "weft-timeline-XXXXXX";
    folder_ = ::mkdtemp(name.data());
    file_ = folder_ + "/run.json";
    ::setenv("WEFT_TIMELINE", file_.c_str(), 1);
  }
  ~TimelineOfRanks() override { std::filesystem::remove_all(folder_); }

  std::map<std::string, int> arrows() const {
    std::map<std::string, int> count;
    const auto json = nlohmann::json::parse(std::ifstream(file_));
    for (const auto& event : json.at("traceEvents")) {
      if (event.at("ph") == "s") ++count[event.at("name")];
    }
    return count;
  }

  std::string folder_;
  std::string file_;
};

TEST_F(TimelineOfRanks, HoldsCollectivesMessagesAndCallsOfAllRanksWithArrows) {
  Processes ranks(2, [](int rank) {
    ProcessGroupOptions options;
    options.backend = "tcp";
    options.device = c10::Device(c10::kCPU);
    auto group = init_process_group(options);
    at::Tensor tensor = torch::ones({1000});
    for (int i = 0; i < 3; ++i) group.all_reduce(tensor).wait();
    if (rank == 0) {
      group.send(tensor, 1).wait();
    } else {
      group.recv(tensor).wait();  // from any: who sent becomes known at its end
    }
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    if (rank == 0) {
      EXPECT_EQ(agent.sync<&twice>("worker1", 21), 42);
    }
    agent.shutdown();
  });
  ranks.expect_success();
  const auto run = tools::read_run(file_);
  ASSERT_EQ(run.ranks.size(), 2u);
  EXPECT_TRUE(run.cut.empty());
  EXPECT_EQ(run.lost, 0u);
  const auto summary = tools::summarize(run);
  EXPECT_GE(summary.collectives, 3u);
  ASSERT_EQ(summary.links.size(), 1u);
  EXPECT_EQ(summary.links[0].bytes, 4000u);
  EXPECT_GT(summary.ranks.at(0).exposed, 0);
  const auto count = arrows();
  EXPECT_EQ(count.at("message"), 1);
  EXPECT_GE(count.at("collective"), 3);
  EXPECT_GE(count.at("call"), 1);
  EXPECT_GE(count.at("reply"), 1);
}

}  // namespace
}  // namespace weft
