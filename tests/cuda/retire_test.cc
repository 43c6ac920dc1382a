// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <stdexcept>

#include <weft/cuda/fence.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::cuda {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;

using Retired = FakeCuda;

TEST_F(Retired, ReclaimRunsTasksOfPassedFences) {
  Stream stream(*device);
  Retirement& retirement = device->retirement();
  std::vector<int> freed;
  retirement.retire(record(stream), [&] { freed.push_back(1); });
  retirement.retire(Fence(), [&] { freed.push_back(2); });
  EXPECT_THAT(freed, ElementsAre()) << "retiring must not free on the caller's thread";
  EXPECT_EQ(retirement.reclaim(), 1u);
  EXPECT_THAT(freed, ElementsAre(2));
  EXPECT_EQ(retirement.pending(), 1u);
  fake.run();
  EXPECT_EQ(retirement.reclaim(), 1u);
  EXPECT_THAT(freed, ElementsAre(2, 1));
  EXPECT_EQ(retirement.reclaim(), 0u);
}

TEST_F(Retired, TasksKeepTheirOrder) {
  std::vector<int> freed;
  for (int i = 0; i < 5; ++i)
    device->retirement().retire(Fence(), [&freed, i] { freed.push_back(i); });
  device->retirement().reclaim();
  EXPECT_THAT(freed, ElementsAre(0, 1, 2, 3, 4));
}

TEST_F(Retired, ReclaimAllWaitsUntilItsDeadline) {
  Stream stream(*device);
  int freed = 0;
  device->retirement().retire(record(stream), [&] { ++freed; });
  EXPECT_FALSE(device->retirement().reclaim_all(Deadline::in(milliseconds(1))));
  EXPECT_EQ(freed, 0);
  fake.run();
  EXPECT_TRUE(device->retirement().reclaim_all(Deadline::in(milliseconds(0))));
  EXPECT_EQ(freed, 1);
}

TEST_F(Retired, FailedTaskDoesNotStopOthers) {
  int freed = 0;
  device->retirement().retire(Fence(), [] { throw std::runtime_error("stuck"); });
  device->retirement().retire(Fence(), [&] { ++freed; });
  EXPECT_EQ(device->retirement().reclaim(), 2u);
  EXPECT_EQ(freed, 1);
  EXPECT_THAT(take_logged(), ElementsAre(HasSubstr("stuck")));
}

TEST_F(Retired, FailingTaskIsNotRetriedForEver) {
  Retirement& retirement = device->retirement();
  bool fails = true;
  int freed = 0;
  std::function<void()> free = [&] {
    if (!fails) return void(++freed);
    retirement.retire(Fence(), free);
    throw std::runtime_error("stuck");
  };
  retirement.retire(Fence(), free);
  EXPECT_FALSE(retirement.reclaim_all(Deadline::in(std::chrono::seconds(1))));
  EXPECT_THAT(take_logged(), ElementsAre(HasSubstr("stuck")));
  EXPECT_EQ(retirement.pending(), 1u);
  fails = false;
  EXPECT_TRUE(retirement.reclaim_all(Deadline::in(std::chrono::seconds(30))));
  EXPECT_EQ(freed, 1);
}

TEST_F(Retired, TasksMayRetireMore) {
  int freed = 0;
  device->retirement().retire(Fence(),
                              [&] { device->retirement().retire(Fence(), [&] { ++freed; }); });
  device->retirement().reclaim();
  EXPECT_EQ(device->retirement().pending(), 1u);
  device->retirement().reclaim();
  EXPECT_EQ(freed, 1);
  device->retirement().retire(Fence(),
                              [&] { device->retirement().retire(Fence(), [&] { ++freed; }); });
  EXPECT_TRUE(device->retirement().reclaim_all(Deadline::in(std::chrono::seconds(30))));
  EXPECT_EQ(freed, 2) << "reclaim_all() runs tasks that were retired meanwhile";
}

}  // namespace
}  // namespace weft::cuda
