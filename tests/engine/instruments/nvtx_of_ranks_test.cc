// SPDX-License-Identifier: Apache-2.0
// Tests what an attached NVTX tool sees of groups.
#include <map>
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/nvtx_tool.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using Fields = std::map<std::string, std::string>;

class NvtxOfRanks : public testing::Test {
 protected:
  static void SetUpTestSuite() { harness::attach_nvtx_tool(); }
  void SetUp() override { harness::take_nvtx_recording(); }

  // Returns, by rank, the payloads of the ranges that the ranks began under `name`. Removes the
  // communicator's id, which must be the same for all of them.
  static std::map<std::string, Fields> by_rank(const harness::NvtxRecording& recording,
                                               const std::string& name) {
    std::map<std::string, Fields> by_rank;
    std::set<std::string> ids;
    for (Fields fields : recording.payloads("start weft.engine " + name)) {
      ids.insert(fields["NCCL communicator ID"]);
      fields.erase("NCCL communicator ID");
      by_rank[fields["Rank"]] = fields;
    }
    EXPECT_EQ(ids.size(), 1u) << name;
    EXPECT_FALSE(ids.contains("0")) << name;
    return by_rank;
  }
};

TEST_F(NvtxOfRanks, OperationsShowRootPeerAndBytes) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup& group) {
    at::Tensor tensor = at::ones({8}, at::kFloat);
    group.all_reduce(tensor, ReduceOp::Max).wait();
    group.reduce(tensor, 1, ReduceOp::Sum).wait();
    group.rank() == 0 ? group.send(tensor, 1).wait() : group.recv(tensor, 0).wait();
  });
  const auto recording = harness::take_nvtx_recording();
  const auto expected = [](const char* rank, const char* reduction, const char* root,
                           const char* peer) {
    return Fields{{"Message size [bytes]", "32"},
                  {"Reduction operation", reduction},
                  {"Rank", rank},
                  {"No. of ranks", "2"},
                  {"CUDA device", "-1"},
                  {"Root", root},
                  {"Peer rank", peer}};
  };
  EXPECT_EQ(by_rank(recording, "all_reduce"),
            (std::map<std::string, Fields>{{"0", expected("0", "Max", "-1", "-1")},
                                           {"1", expected("1", "Max", "-1", "-1")}}));
  EXPECT_EQ(by_rank(recording, "reduce"),
            (std::map<std::string, Fields>{{"0", expected("0", "Sum", "1", "-1")},
                                           {"1", expected("1", "Sum", "1", "-1")}}));
  EXPECT_EQ(by_rank(recording, "send"),
            (std::map<std::string, Fields>{{"0", expected("0", "", "-1", "1")}}));
  EXPECT_EQ(by_rank(recording, "recv"),
            (std::map<std::string, Fields>{{"1", expected("1", "", "-1", "0")}}));
}

}  // namespace
}  // namespace weft
