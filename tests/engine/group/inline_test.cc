// SPDX-License-Identifier: Apache-2.0
// Work::on_done_inline.
#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/engine/group/core.h>
#include <weft/group.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using std::chrono::milliseconds;

// Records the calls of one function.
struct Told {
  std::atomic<int> calls{0};
  std::optional<Error> error;
  std::thread::id thread;
  bool inside_a_backend = false;

  auto function() {
    return [this](const std::optional<Error>& why) {
      error = why;
      thread = std::this_thread::get_id();
      inside_a_backend = Op::ending();
      ++calls;
    };
  }
  bool came() const {
    return harness::comes_true([this] { return calls > 0; });
  }
};

TEST(InlineOfNothing, IsCalledAtOnce) {
  Told told;
  Work().on_done_inline(told.function());
  EXPECT_EQ(told.calls, 1);
  EXPECT_FALSE(told.error);
  EXPECT_EQ(told.thread, std::this_thread::get_id());
  EXPECT_EQ(error_of([] { Work().on_done_inline(nullptr); }).blame(), Blame::Caller);
}

class Inline : public testing::TestWithParam<const char*> {
 protected:
  static void run(int ranks, const std::function<void(ProcessGroup&)>& body) {
    harness::run_ranks(As::Threads, ranks, body, {.backend = GetParam()});
  }
};
INSTANTIATE_TEST_SUITE_P(, Inline, testing::Values("gloo", "tcp", "shm"),
                         [](const auto& instance) { return std::string(instance.param); });

TEST_P(Inline, RunsOnTheCompletingThread) {
  run(2, [](ProcessGroup& group) {
    const auto tensor = torch::zeros({4});
    if (group.rank() == 0) {
      // The operation has not ended: the other rank waits until the functions are attached.
      Told told, again;
      Work work = group.recv(tensor, 1);
      work.on_done_inline(told.function());
      work.on_done_inline(again.function());
      EXPECT_EQ(told.calls, 0);
      group.store()->set("attached", std::string("yes"));
      ASSERT_TRUE(told.came() && again.came());
      EXPECT_FALSE(told.error);
      EXPECT_TRUE(told.inside_a_backend);
      EXPECT_NE(told.thread, std::this_thread::get_id());
      EXPECT_EQ(tensor[0].item<float>(), 1);  // the data has arrived
      // The operation has ended: the function runs before the call returns.
      Told late;
      work.on_done_inline(late.function());
      EXPECT_EQ(late.calls, 1);
      EXPECT_EQ(late.thread, std::this_thread::get_id());
      EXPECT_EQ(told.calls, 1);
    } else {
      group.store()->wait({"attached"});
      group.send(torch::ones({4}), 0).wait();
    }
    group.barrier().wait();
  });
}

TEST_P(Inline, RunsOncePerOperation) {
  run(2, [](ProcessGroup& group) {
    constexpr int kMany = 200;
    std::vector<Told> told(kMany);
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < kMany; ++i) {
      tensors.push_back(torch::ones({i % 7 == 0 ? 20'000 : 3}));
      Work work = i % 5 == 0 ? group.barrier() : group.all_reduce(tensors.back());
      work.on_done_inline(told[static_cast<std::size_t>(i)].function());  // the Work is dropped
    }
    // For parts of different sizes, the backend runs several operations.
    Told several;
    group.reduce_scatter(torch::zeros({group.rank() + 1}), {torch::ones({1}), torch::ones({2})})
        .on_done_inline(several.function());
    group.barrier().wait();
    EXPECT_TRUE(several.came());
    EXPECT_FALSE(several.error);
    for (const Told& one : told) {
      EXPECT_TRUE(one.came());
      EXPECT_EQ(one.calls, 1);
      EXPECT_FALSE(one.error);
    }
  });
}

TEST_P(Inline, GetsTheErrorOfAnAbort) {
  run(2, [](ProcessGroup& group) {
    harness::meet(group);
    if (group.rank() == 1) {
      EXPECT_TRUE(harness::comes_true([&] { return group.error().has_value(); }));
      return;
    }
    Told before, behind;
    Work work = group.recv(torch::ones({1}), 1);
    work.on_done_inline(before.function());
    group.abort("enough");
    ASSERT_TRUE(before.came());
    work.on_done_inline(behind.function());
    for (const Told* told : {&before, &behind}) {
      ASSERT_EQ(told->calls, 1);
      ASSERT_TRUE(told->error);
      EXPECT_EQ(told->error->blame(), Blame::Cancelled);
      EXPECT_EQ(told->error->text(), work.error()->text());
      EXPECT_NE(told->error->text().find("recv from rank 1"), std::string::npos)
          << told->error->text();
    }
  });
}

// The error counts as seen: the group's next call throws its own, not one of an earlier operation.
TEST_P(Inline, GetsTheErrorOfATimeout) {
  run(2, [](ProcessGroup& group) {
    auto other = group.new_group({0, 1}).with_timeout(milliseconds(300));
    if (group.rank() == 0) {
      Told told;
      other.recv(torch::ones({1}), 1).on_done_inline(told.function());
      ASSERT_TRUE(told.came());
      ASSERT_TRUE(told.error);
      EXPECT_EQ(told.error->blame(), Blame::Timeout) << told.error->what();
      EXPECT_TRUE(harness::comes_true([&] { return other.error().has_value(); }));
      const auto next = error_of([&] { static_cast<void>(other.barrier()); });
      EXPECT_EQ(next.text().find("earlier operation"), std::string::npos) << next.text();
    }
    group.barrier().wait();
  });
}

TEST_P(Inline, ExceptionsAreLogged) {
  run(2, [](ProcessGroup& group) {
    harness::LogWatch& log = harness::LogWatch::current();
    log.allow("on_done_inline");
    for (const bool has_ended : {false, true}) {
      Work work = group.all_reduce(torch::ones({4}));
      if (has_ended) work.wait();
      work.on_done_inline(
          [](const std::optional<Error>&) { throw std::runtime_error("not my day"); });
      work.wait();
      group.barrier().wait();
    }
    group.all_reduce(torch::ones({4})).wait();
    EXPECT_TRUE(harness::comes_true([&] {
      const std::string text = log.text();
      const auto first = text.find("not my day");
      return first != std::string::npos && text.find("not my day", first + 1) != std::string::npos;
    })) << log.text();
    EXPECT_NE(log.text().find("all_reduce #"), std::string::npos) << log.text();
    harness::meet(group);
  });
}

TEST_P(Inline, MayDropTheGroupsLastHandle) {
  run(2, [](ProcessGroup& group) {
    ProcessGroup own = group.new_group({0, 1});
    const auto tensor = torch::ones({4});
    Told told;
    {
      Work work = own.all_reduce(tensor);
      work.on_done_inline(
          [tell = told.function(), last = std::make_shared<ProcessGroup>(std::move(own))](
              const std::optional<Error>& error) mutable {
            last.reset();
            tell(error);
          });
    }
    ASSERT_TRUE(told.came());
    EXPECT_FALSE(told.error);
    group.barrier().wait();
  });
}

}  // namespace
}  // namespace weft
