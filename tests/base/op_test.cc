// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include <gtest/gtest.h>

#include <weft/base/op.h>

namespace weft {
namespace {

TEST(Op, DefaultIsDoneWithoutError) {
  const Op op;
  EXPECT_TRUE(op.done().query());
  EXPECT_FALSE(op.error());
  EXPECT_EQ(op.source_rank(), -1);
}

TEST(Op, HoldsItsPinUntilDone) {
  auto memory = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = memory;
  Completion completion{Pin(std::move(memory))};
  const Op op = completion.op();
  EXPECT_FALSE(op.done().query());
  EXPECT_FALSE(watch.expired());
  EXPECT_TRUE(completion.finish());
  EXPECT_TRUE(op.done().query());
  EXPECT_TRUE(watch.expired());
}

TEST(Op, FailurePassesFenceAndReleasesPin) {
  auto memory = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = memory;
  Completion completion{Pin(std::move(memory))};
  const Op op = completion.op();
  EXPECT_TRUE(completion.fail(Error(Blame::PeerLost, "rank 1 is lost")));
  EXPECT_TRUE(op.done().query());
  ASSERT_TRUE(op.error());
  EXPECT_EQ(op.error()->blame(), Blame::PeerLost);
  EXPECT_TRUE(watch.expired());
}

TEST(Op, FirstEndDecides) {
  Completion completion{Pin()};
  EXPECT_TRUE(completion.fail(Error(Blame::Cancelled, "first")));
  EXPECT_FALSE(completion.finish());
  EXPECT_FALSE(completion.fail(Error(Blame::Timeout, "second")));
  EXPECT_EQ(completion.op().error()->text(), "first");
}

TEST(Op, ErrorIsSetBeforeTheFencePasses) {
  Completion completion{Pin()};
  const Op op = completion.op();
  bool seen = false;
  Task look([&] { seen = op.error().has_value(); });
  op.done().source()->on_passed(look);
  completion.fail(Error(Blame::Device, "gone"));
  EXPECT_TRUE(seen);
}

TEST(Op, RunsItsEndCallbackOnce) {
  Completion completion{Pin()};
  int told = 0;
  completion.op().on_ended([&, op = completion.op()] {
    ++told;
    EXPECT_TRUE(op.done().query());
    EXPECT_TRUE(op.error());
  });
  EXPECT_EQ(told, 0);
  completion.fail(Error(Blame::Timeout, "late"));
  EXPECT_EQ(told, 1);
  completion.finish();
  EXPECT_EQ(told, 1);
}

TEST(Op, EndingIsTrueWhileOneEnds) {
  Completion completion{Pin()};
  bool inside = false;
  completion.op().on_ended(
      [&, last = std::shared_ptr<void>(nullptr, [&](void*) { inside = Op::ending(); })] {});
  completion.finish();
  EXPECT_TRUE(inside) << "a task's captures are destroyed while the operation ends";
  EXPECT_FALSE(Op::ending());
}

TEST(Op, EndedOneRunsCallbacksAtOnce) {
  int told = 0;
  Op().on_ended([&] { ++told; });
  Op::failed(Error(Blame::Caller, "no")).on_ended([&] { ++told; });
  EXPECT_EQ(told, 2);
}

TEST(Op, EndsByItsProducerNotByItsEvent) {
  const auto event = std::make_shared<HostFlag>();
  Completion completion{Pin(), Fence(event)};
  bool told = false;
  completion.op().on_ended([&] { told = true; });
  event->raise();
  EXPECT_TRUE(completion.op().done().query());
  EXPECT_FALSE(told);
  EXPECT_FALSE(completion.op().ended());
  completion.finish();
  EXPECT_TRUE(completion.op().ended());
  EXPECT_TRUE(told);
}

TEST(Op, FinishReleasesPinAndKeepsTheFence) {
  auto event = std::make_shared<HostFlag>();
  auto memory = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = memory;
  Completion completion(Pin(std::move(memory)), Fence(event));
  EXPECT_FALSE(completion.op().done().query());
  completion.finish();
  EXPECT_TRUE(watch.expired());
  EXPECT_FALSE(completion.op().done().query());
  event->raise();
  EXPECT_TRUE(completion.op().done().query());
}

TEST(Op, CanFailAtOnce) {
  const Op op = Op::failed(Error(Blame::Unsupported, "no"));
  EXPECT_TRUE(op.done().query());
  EXPECT_EQ(op.error()->blame(), Blame::Unsupported);
}

}  // namespace
}  // namespace weft
