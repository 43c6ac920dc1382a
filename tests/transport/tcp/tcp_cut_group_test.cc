// SPDX-License-Identifier: Apache-2.0
// A group of two ranks over tcp; the cable between them is cut while they join, in an operation,
// while they are idle, and while one leaves.
#include <future>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/harness/file_bootstrap.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/mail.h>
#include <weft/tests/transport/tcp/cable.h>
#include <weft/transport/tcp/tcp.h>

namespace weft::transport::tcp {
namespace {

using harness::expect_good;
using harness::failure_of;
using std::chrono::milliseconds;
using std::chrono::seconds;

Settings quick() {
  Settings settings;
  settings.idle = seconds(1);
  settings.probe_pause = seconds(1);
  settings.probes = 1;
  settings.silence = milliseconds(400);
  return settings;
}

class TcpCutGroup : public testing::Test {
 protected:
  // Starts rank 1 at the other end of the cable; it joins and enters reductions until one fails.
  // Returns false, and the test is skipped, if there can be no cable.
  [[nodiscard]] bool start(std::size_t elements, bool joins_at_once = true) {
    std::string why_not;
    const std::string path = folder_.path();
    cable = lay_cable(
        [=](int parent) {
          tell_line(parent, "here");
          if (!joins_at_once) wait_for_byte(parent);
          const auto own = join(1, path, make_loop("rank 1"), seconds(50));
          for (std::vector<float> numbers(elements); elements > 0;) {
            const Op op = reduce(*own, numbers);
            if (!op.done().synchronize(patience()) || op.error()) break;
          }
          wait_for_byte(parent);
        },
        why_not);
    const auto skip = [&] { GTEST_SKIP() << why_not; };
    if (!cable) skip();
    return cable != nullptr;
  }

  static std::shared_ptr<Communicator> join(int rank, const std::string& folder,
                                            const std::shared_ptr<EventLoop>& loop,
                                            milliseconds timeout,
                                            const Settings& settings = quick()) {
    return std::make_shared<Tcp>(settings)->join(
        {.rank = rank,
         .size = 2,
         .group_name = "cut",
         .store = std::make_shared<harness::FileBootstrap>(folder),
         .timeout = timeout,
         .loop = loop,
         .interface_address = "10.77.7." + std::to_string(rank + 1)});
  }
  std::shared_ptr<Communicator> join(milliseconds timeout, const Settings& settings = quick()) {
    return join(0, folder_.path(), loop, timeout, settings);
  }

  static Op reduce(Communicator& communicator, std::vector<float>& numbers) {
    const Slice slice{numbers.data(), numbers.size() * sizeof(float), Device::host()};
    return communicator.all_reduce({slice, Dtype::Float32}, ReduceOp::Max, {}, {});
  }

  // This operation or a later one fails, and all after it.
  void expect_lost(Communicator& communicator, std::vector<float>& numbers) {
    std::optional<Error> why;
    while (!why) {
      const Op op = reduce(communicator, numbers);
      ASSERT_TRUE(op.done().synchronize(patience()));
      why = op.error();
    }
    EXPECT_EQ(why->blame(), Blame::PeerLost) << why->what();
    EXPECT_THAT(why->text(), testing::HasSubstr("rank 1"));
    EXPECT_THAT(why->text(), testing::HasSubstr("no answer from its machine"));
    EXPECT_EQ(failure_of(communicator.barrier({})).blame(), Blame::PeerLost);
  }

  const harness::Folder folder_;
  std::unique_ptr<Cable> cable;
  std::shared_ptr<EventLoop> loop;  // made after the fork
};

TEST_F(TcpCutGroup, CableCutBeforeJoiningTimesOut) {
  if (!start(0, /*joins_at_once=*/false)) return;
  cable->cut();
  cable->peer().say('x');
  loop = make_loop("rank 0");
  try {
    join(milliseconds(700));
    ADD_FAILURE() << "joined over a cut cable";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    EXPECT_THAT(error.text(), testing::HasSubstr("rank 1"));
  }
}

TEST_F(TcpCutGroup, CableCutMidReductionNamesTheRank) {
  std::vector<float> numbers(4 << 20);
  if (!start(numbers.size())) return;
  loop = make_loop("rank 0");
  const auto communicator = join(seconds(50));
  for (int i = 0; i < 3; ++i) expect_good(reduce(*communicator, numbers));
  const Op hit = reduce(*communicator, numbers);
  cable->cut();
  ASSERT_TRUE(hit.done().synchronize(patience()));
  expect_lost(*communicator, numbers);
}

TEST_F(TcpCutGroup, CableCutWhileIdleFailsNextOperation) {
  std::vector<float> numbers(10);
  if (!start(0)) return;
  loop = make_loop("rank 0");
  const auto communicator = join(seconds(50));
  cable->cut();
  expect_lost(*communicator, numbers);
}

TEST_F(TcpCutGroup, RankLeavesDespiteACutCable) {
  if (!start(0)) return;
  loop = make_loop("rank 0");
  auto communicator = join(seconds(50), Settings());
  cable->cut();
  const auto left = std::async(std::launch::async, [&] { communicator.reset(); });
  // Sooner than any timer of its connections.
  EXPECT_EQ(left.wait_for(seconds(10)), std::future_status::ready)
      << "leaving waits for a rank behind the cut cable";
}

}  // namespace
}  // namespace weft::transport::tcp
