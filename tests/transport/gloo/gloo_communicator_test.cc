// What is Gloo's own; the conformance suite has the rest.
#include <array>
#include <mutex>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include <weft/base/log.h>
#include <weft/tests/harness/memory_bootstrap.h>
#include <weft/tests/harness/no_more_threads.h>
#include <weft/transport/transport.h>

namespace weft::transport::gloo {

Result<std::shared_ptr<Transport>> open();  // as the table of backends declares it

namespace {

std::shared_ptr<Communicator> join(int rank, const std::shared_ptr<Bootstrap>& store) {
  return open().value()->join({.rank = rank,
                               .size = 2,
                               .group_name = "test",
                               .store = store,
                               .timeout = std::chrono::minutes(1),
                               .loop = std::make_shared<EventLoop>("rank")});
}

using Numbers = std::array<float, 4>;

Elements elements_of(Numbers& numbers) { return {{numbers.data(), sizeof numbers, Device::host()}, Dtype::Float32}; }

Error failure_of(const Op& op) {
  EXPECT_TRUE(op.done().synchronize(Deadline::in(std::chrono::minutes(1))));
  return op.error().value_or(Error(Blame::Remote, "it did not fail"));
}

// A job that dies for want of threads is one thing; that it takes the process with it, without a word, another.
TEST(GlooCommunicator, WithoutThreadsMessagesFailWithBusyAndAbortAndDestructionStillWork) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::shared_ptr<Communicator> peer;
  std::thread joining([&] { peer = join(1, store); });
  auto communicator = join(0, store);
  joining.join();
  std::mutex mutex;
  std::string logged;
  const log::Capture capture([&](LogLevel, std::string_view line) {
    std::lock_guard lock(mutex);
    logged += line;
  });
  Numbers summed{}, received{};
  const Op waiting = communicator->all_reduce(elements_of(summed), ReduceOp::Sum, Pin(), Fence());  // for the peer
  {
    const harness::NoMoreThreads no_more;
    if (harness::can_make_threads()) GTEST_SKIP() << "this system, or this sanitizer, makes threads with any stack";
    const Op refused = communicator->point_to_point()->recv(elements_of(received), 1, 0, Pin(), Fence());
    EXPECT_EQ(failure_of(refused).blame(), Blame::Busy) << failure_of(refused).what();
    EXPECT_NE(failure_of(refused).text().find("ulimit -u"), std::string::npos) << failure_of(refused).text();
    EXPECT_FALSE(waiting.ended());
    communicator->abort(Error(Blame::Cancelled, "enough"));
    EXPECT_EQ(failure_of(waiting).text(), "enough");
    communicator.reset();
  }
  EXPECT_NE(logged.find("the calling thread breaks its connections"), std::string::npos) << logged;
  EXPECT_NE(logged.find("this one waits for it"), std::string::npos) << logged;
}

// Where it had begun, the peer would get half a message, or one that its sender knows as failed.
TEST(GlooCommunicator, AMessageThatIsRefusedForWantOfAThreadHasNotBegun) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::shared_ptr<Communicator> peer;
  std::thread joining([&] { peer = join(1, store); });
  const auto communicator = join(0, store);
  joining.join();
  Numbers refused{1}, sent{2}, received{}, dropped{};
  {
    const harness::NoMoreThreads no_more;
    if (harness::can_make_threads()) GTEST_SKIP() << "this system, or this sanitizer, makes threads with any stack";
    const Op send = communicator->point_to_point()->send(elements_of(refused), 1, 0, Pin(), Fence());
    EXPECT_EQ(failure_of(send).blame(), Blame::Busy) << failure_of(send).what();
    const Op recv = peer->point_to_point()->recv(elements_of(dropped), 0, 0, Pin(), Fence());
    EXPECT_EQ(failure_of(recv).blame(), Blame::Busy) << failure_of(recv).what();
  }
  const Op recv = peer->point_to_point()->recv(elements_of(received), 0, 0, Pin(), Fence());
  const Op send = communicator->point_to_point()->send(elements_of(sent), 1, 0, Pin(), Fence());
  for (const Op& op : {send, recv}) {
    EXPECT_TRUE(op.done().synchronize(Deadline::in(std::chrono::minutes(1))));
    EXPECT_FALSE(op.error()) << op.error()->what();
  }
  EXPECT_EQ(received[0], 2);
}

}  // namespace
}  // namespace weft::transport::gloo
