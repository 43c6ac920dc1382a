// What the job's store holds of workers that come and go.
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include <weft/engine/rpc/directory.h>
#include <weft/tests/harness/memory_bootstrap.h>

namespace weft::rpc {
namespace {

Directory directory_of(const std::shared_ptr<transport::Bootstrap>& store, const WorkerInfo& self) {
  return {store, self, std::nullopt, /*has_secret=*/false, {}};
}

TEST(Directory, FindsByNameWhoIsThereNow) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  const Deadline deadline = Deadline::in(std::chrono::seconds(20));
  auto asks = directory_of(store, {"asks", 0});
  asks.join({}, {}, deadline);
  auto first = directory_of(store, {"moves", 1});
  first.join({}, {}, deadline);
  EXPECT_EQ(asks.recipient("moves").rank, 1);
  first.leave();
  auto second = directory_of(store, {"moves", 2});  // under the same name
  second.join({}, {}, deadline);
  auto other = directory_of(store, {"other", 1});  // and somebody else in its place
  other.join({}, {}, deadline);
  EXPECT_EQ(asks.workers().size(), 3U);
  EXPECT_EQ(asks.recipient("moves").rank, 2);
  EXPECT_EQ(asks.recipient("other").rank, 1);
  asks.forget(1);
  EXPECT_EQ(asks.recipient("moves").rank, 2);
  EXPECT_EQ(asks.recipient("other").life, 1);
  asks.forget_before(2, 1);
  second.leave();
  EXPECT_THROW(asks.recipient("moves"), NotThere);
  EXPECT_EQ(asks.known(1)->name, "other");
}

// Everybody reads the list when it looks for a worker that it does not know.
TEST(Directory, WhoComesAgainMakesTheListOfThoseThatCameNoLonger) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  const Deadline deadline = Deadline::in(std::chrono::seconds(20));
  auto stays = directory_of(store, {"stays", 0});
  stays.join({}, {}, deadline);
  for (Life life = 0; life < 5; ++life) {
    const WorkerInfo who{"worker" + std::to_string(life), 1};
    auto comes = directory_of(store, who);
    EXPECT_EQ(comes.join({}, {}, deadline), life);
    EXPECT_EQ(stays.recipient(who.name).life, life);
    EXPECT_EQ(stays.workers().size(), 2U);
    comes.leave();
    EXPECT_EQ(stays.workers().size(), 1U);
  }
  EXPECT_EQ(store->add("joined", 0), 2);
}

}  // namespace
}  // namespace weft::rpc
