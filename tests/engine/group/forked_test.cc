// SPDX-License-Identifier: Apache-2.0
// Children that are forked from a rank share its connections; they must neither use nor end them.
#include <optional>
#include <stdexcept>

#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/tests/harness/forked.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::expect_child_to_end_well;
using harness::Processes;

void expect_inherited(const std::function<void()>& use) {
  const Error error = error_of(use);
  EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
  EXPECT_NE(error.text().find("was forked"), std::string::npos) << error.what();
}

class ForkedRanks : public testing::TestWithParam<std::string> {
 protected:
  using Group = std::optional<ProcessGroup>;
  // All ranks fork; afterwards the group works as before.
  static void fork_and_go_on(
      const std::function<void(Group& group, Group& half, Work& work)>& child) {
    Processes processes(2, [&](int rank) {
      Group group = init_process_group({.backend = GetParam()});
      Group half = group->split(0, rank);
      const auto sum = [&] {
        at::Tensor tensor = at::ones(1);
        group->all_reduce(tensor).wait();
        half->all_reduce(tensor).wait();
        return tensor.item<float>();
      };
      EXPECT_EQ(sum(), 4);
      at::Tensor kept = at::ones(1000);
      Work work = group->all_reduce(kept);
      work.wait();
      for (int i = 0; i < 3; ++i) expect_child_to_end_well([&] { child(group, half, work); });
      EXPECT_EQ(sum(), 4);
      group->barrier().wait();
    });
    processes.expect_success();
  }
};

TEST_P(ForkedRanks, ExitQuietly) {
  fork_and_go_on([](Group&, Group&, Work&) {});
}

TEST_P(ForkedRanks, DropGroupsAndWorkQuietly) {
  fork_and_go_on([](Group& group, Group& half, Work& work) {
    group.reset();
    half.reset();
    work = {};
  });
}

TEST_P(ForkedRanks, UnwindQuietly) {
  fork_and_go_on([](Group& group, Group& half, Work& work) {
    const auto unwind = [&] {
      const ProcessGroup one = std::move(*group), other = std::move(*half);
      const Work last = std::move(work);
      throw std::runtime_error("as if by the child's own work");
    };
    EXPECT_THROW(unwind(), std::runtime_error);
  });
}

TEST_P(ForkedRanks, GetACallerErrorForEachUse) {
  fork_and_go_on([](Group& group, Group&, Work& work) {
    at::Tensor tensor;
    expect_inherited([&] { group->barrier().wait(); });
    expect_inherited([&] { group->all_reduce(tensor).wait(); });
    expect_inherited([&] { static_cast<void>(group->split(0, 0)); });
    expect_inherited([&] { group->abort("no"); });
    expect_inherited([&] { work.wait(); });
    expect_inherited([&] { static_cast<void>(work.future()); });
  });
}

INSTANTIATE_TEST_SUITE_P(Group, ForkedRanks, testing::Values("shm", "tcp", "gloo"),
                         [](const auto& backend) { return backend.param; });

}  // namespace
}  // namespace weft
