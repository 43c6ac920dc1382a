// SPDX-License-Identifier: Apache-2.0
// What an NVTX tool receives.
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/trace.h>
#include <weft/tests/harness/nvtx_tool.h>

namespace weft {
namespace {

using testing::ElementsAre;

constinit trace::Name copy{trace::Layer::Cuda, "copy"};
constinit trace::Name step{trace::Layer::Engine, "step"};
constexpr const char* kSum = "Sum";
constinit trace::Name only_here{trace::Layer::User, "only here"};

class Trace : public testing::Test {
 protected:
  static void SetUpTestSuite() { harness::attach_nvtx_tool(); }
  void SetUp() override { harness::take_nvtx_recording(); }
};

TEST_F(Trace, RangesNestInTheDomainOfTheirLayer) {
  {
    trace::Range outer(step);
    trace::Range inner(copy);
  }
  const auto recording = harness::take_nvtx_recording();
  EXPECT_THAT(recording.domains, ElementsAre("weft.base", "weft.cuda", "weft.kernels",
                                             "weft.transport", "weft.engine", "weft.user"));
  EXPECT_THAT(recording.texts(), ElementsAre("push weft.engine step", "push weft.cuda copy",
                                             "pop weft.cuda", "pop weft.engine"));
  for (const auto& event : recording.events) EXPECT_TRUE(event.fields.empty());
}

TEST_F(Trace, PayloadHasNcclsFieldNames) {
  {
    trace::Range range(copy,
                       {.bytes = 4096, .reduction = kSum, .rank = 1, .ranks = 2, .device = 3});
  }
  const std::map<std::string, std::string> expected{{"NCCL communicator ID", "0"},
                                                    {"Message size [bytes]", "4096"},
                                                    {"Reduction operation", "Sum"},
                                                    {"Rank", "1"},
                                                    {"No. of ranks", "2"},
                                                    {"CUDA device", "3"},
                                                    {"Root", "-1"},
                                                    {"Peer rank", "-1"}};
  EXPECT_THAT(harness::take_nvtx_recording().payloads("push weft.cuda copy"),
              ElementsAre(expected));
}

TEST_F(Trace, OperationsAreStartEndRanges) {
  const trace::Member member = trace::Member::join({"group", "default", 1, {0, 1, 2}});
  trace::Operation operation = trace::Operation::begin(
      member, trace::Kind::Collective,
      {.name = "reduce", .peer = 2, .bytes = 64, .reduction = kSum, .device = 5});
  operation.end();
  const auto recording = harness::take_nvtx_recording();
  EXPECT_THAT(recording.texts(), ElementsAre("start weft.engine reduce", "end weft.engine 17"));
  auto fields = recording.payloads("start weft.engine reduce").at(0);
  EXPECT_NE(fields["NCCL communicator ID"], "0");
  fields.erase("NCCL communicator ID");
  const std::map<std::string, std::string> expected{{"Message size [bytes]", "64"},
                                                    {"Reduction operation", "Sum"},
                                                    {"Rank", "1"},
                                                    {"No. of ranks", "3"},
                                                    {"CUDA device", "5"},
                                                    {"Root", "2"},
                                                    {"Peer rank", "-1"}};
  EXPECT_EQ(fields, expected);
}

TEST_F(Trace, MessageNamesItsPeer) {
  const trace::Member member = trace::Member::join({"group", "default", 1, {0, 1, 2}});
  trace::Operation::begin(member, trace::Kind::Send, {.name = "send", .peer = 2}).end();
  auto fields = harness::take_nvtx_recording().payloads("start weft.engine send").at(0);
  EXPECT_EQ(fields["Peer rank"], "2");
  EXPECT_EQ(fields["Root"], "-1");
}

TEST_F(Trace, GroupIdIsSharedAndRenewed) {
  const auto id = [](const std::string& name, int rank, const std::vector<int>& ranks) {
    const trace::Member member = trace::Member::join({"group", name, rank, ranks});
    trace::Operation::begin(member, trace::Kind::Collective, {.name = "all_reduce"}).end();
    return harness::take_nvtx_recording()
        .payloads("start weft.engine all_reduce")
        .at(0)["NCCL communicator ID"];
  };
  const std::string first = id("ids", 0, {0, 1});
  EXPECT_EQ(id("ids", 1, {0, 1}), first);
  const std::set<std::string> others{first, id("ids", 0, {0, 1}), id("ids", 0, {1, 0}),
                                     id("ids too", 0, {0, 1})};
  EXPECT_EQ(others.size(), 4u);
  const trace::Member agent = trace::Member::join({"agent", "worker", 0, {}});
  trace::Operation::begin(agent, trace::Kind::Call, {.name = "f"}).end();
  EXPECT_EQ(
      harness::take_nvtx_recording().payloads("start weft.engine f").at(0)["NCCL communicator ID"],
      "0");
}

TEST_F(Trace, NamesAreRegisteredOncePerDomain) {
  const trace::Member member = trace::Member::join({"group", "default", 0, {0}});
  for (int i = 0; i < 3; ++i) {
    trace::Operation::begin(member, trace::Kind::Collective, {.name = "barrier"}).end();
    trace::Range range(only_here, {.reduction = kSum});
  }
  const auto recording = harness::take_nvtx_recording();
  EXPECT_EQ(recording.registered.at("weft.engine barrier"), 1);
  EXPECT_EQ(recording.registered.at("weft.user only here"), 1);
  EXPECT_EQ(recording.registered.at("weft.user Sum"), 1)
      << "a payload's text is registered in the domain of its event";
  EXPECT_EQ(recording.events.size(), 12u);
}

TEST_F(Trace, MarksAreOneEvent) {
  trace::mark(step);
  trace::mark(copy, {.bytes = 8});
  const auto recording = harness::take_nvtx_recording();
  EXPECT_THAT(recording.texts(), ElementsAre("mark weft.engine step", "mark weft.cuda copy"));
  auto fields = recording.payloads("mark weft.cuda copy").at(0);
  EXPECT_EQ(fields["Message size [bytes]"], "8");
  EXPECT_EQ(fields["Reduction operation"], "");
}

}  // namespace
}  // namespace weft
