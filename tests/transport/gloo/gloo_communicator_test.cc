// SPDX-License-Identifier: Apache-2.0
// Behaviour of the Gloo backend alone; tests/conformance has the claims for every backend.
#include <array>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <weft/base/log.h>
#include <weft/tests/harness/memory_bootstrap.h>
#include <weft/tests/harness/no_more_threads.h>
#include <weft/transport/gloo/waiters.h>
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

Elements elements_of(Numbers& numbers) {
  return {{numbers.data(), sizeof numbers, Device::host()}, Dtype::Float32};
}

Error failure_of(const Op& op) {
  EXPECT_TRUE(op.done().synchronize(Deadline::in(std::chrono::minutes(1))));
  return op.error().value_or(Error(Blame::Remote, "it did not fail"));
}

// A lack of threads may fail a job, but must not end the process without an error.
TEST(GlooCommunicator, OutOfThreadsMessagesFailWithBusy) {
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
  const Op waiting = communicator->all_reduce(elements_of(summed), ReduceOp::Sum, Pin(),
                                              Fence());  // waits for the peer
  {
    const harness::NoMoreThreads no_more;
    if (harness::can_make_threads())
      GTEST_SKIP() << "this system, or this sanitizer, makes threads with any stack";
    const Op refused =
        communicator->point_to_point()->recv(elements_of(received), 1, 0, Pin(), Fence());
    EXPECT_EQ(failure_of(refused).blame(), Blame::Busy) << failure_of(refused).what();
    EXPECT_NE(failure_of(refused).text().find("ulimit -u"), std::string::npos)
        << failure_of(refused).text();
    EXPECT_FALSE(waiting.ended());
    communicator->abort(Error(Blame::Cancelled, "enough"));
    EXPECT_EQ(failure_of(waiting).text(), "enough");
    communicator.reset();
  }
  EXPECT_NE(logged.find("the calling thread breaks its connections"), std::string::npos) << logged;
  EXPECT_NE(logged.find("this thread waits for it"), std::string::npos) << logged;
}

// Had the send begun, the peer would receive half a message, or one that its sender reports as
// failed.
TEST(GlooCommunicator, RefusedMessageSendsNothing) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::shared_ptr<Communicator> peer;
  std::thread joining([&] { peer = join(1, store); });
  const auto communicator = join(0, store);
  joining.join();
  Numbers refused{1}, sent{2}, received{}, dropped{};
  {
    const harness::NoMoreThreads no_more;
    if (harness::can_make_threads())
      GTEST_SKIP() << "this system, or this sanitizer, makes threads with any stack";
    const Op send =
        communicator->point_to_point()->send(elements_of(refused), 1, 0, Pin(), Fence());
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

std::ptrdiff_t threads_of_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

TEST(GlooCommunicator, MessagesOfOneTagShareAThread) {
  constexpr int kMessages = 3000;
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::shared_ptr<Communicator> peer;
  std::thread joining([&] { peer = join(1, store); });
  const auto communicator = join(0, store);
  joining.join();
  std::vector<Numbers> sent(kMessages), received(kMessages);
  std::vector<Op> ops;
  const auto before = threads_of_process();
  for (auto& numbers : received) {
    ops.push_back(communicator->point_to_point()->recv(elements_of(numbers), 1, 5, Pin(), Fence()));
  }
  EXPECT_LT(threads_of_process(), before + 8) << "for " << kMessages << " receives";
  for (int i = 0; i < kMessages; ++i) {
    sent[static_cast<std::size_t>(i)][0] = static_cast<float>(i);
    ops.push_back(peer->point_to_point()->send(elements_of(sent[static_cast<std::size_t>(i)]), 0, 5,
                                               Pin(), Fence()));
  }
  EXPECT_LT(threads_of_process(), before + 8) << "and as many sends";
  for (const Op& op : ops) {
    ASSERT_TRUE(op.done().synchronize(Deadline::in(std::chrono::minutes(1))));
    ASSERT_FALSE(op.error()) << op.error()->what();
  }
  for (int i = 0; i < kMessages; ++i)
    ASSERT_EQ(received[static_cast<std::size_t>(i)][0], static_cast<float>(i));
}

TEST(GlooCommunicator, ThreadsEndWithTheirTagsMessages) {
  constexpr int kTags = 200;
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::shared_ptr<Communicator> peer;
  std::thread joining([&] { peer = join(1, store); });
  const auto communicator = join(0, store);
  joining.join();
  std::vector<Numbers> sent(kTags), received(kTags);
  std::vector<Op> ops;
  const auto before = threads_of_process();
  for (int tag = 0; tag < kTags; ++tag) {
    ops.push_back(communicator->point_to_point()->recv(
        elements_of(received[static_cast<std::size_t>(tag)]), 1, tag, Pin(), Fence()));
  }
  for (int tag = kTags; tag-- > 0;) {  // the last tag first
    sent[static_cast<std::size_t>(tag)][0] = static_cast<float>(tag);
    const Op send = peer->point_to_point()->send(elements_of(sent[static_cast<std::size_t>(tag)]),
                                                 0, tag, Pin(), Fence());
    for (const Op& op : {send, ops[static_cast<std::size_t>(tag)]}) {
      ASSERT_TRUE(op.done().synchronize(Deadline::in(std::chrono::minutes(1))));
      ASSERT_FALSE(op.error()) << op.error()->what();
    }
    ASSERT_EQ(received[static_cast<std::size_t>(tag)][0], static_cast<float>(tag));
  }
  const auto are_few = [&] { return threads_of_process() < before + 40; };
  const Deadline soon = Deadline::in(std::chrono::seconds(20));
  while (!are_few() && !soon.passed()) std::this_thread::yield();
  EXPECT_TRUE(are_few()) << threads_of_process() - before << " threads are kept";
}

TEST(GlooCommunicator, TagsBeyondTheThreadLimitAreRefused) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::shared_ptr<Communicator> peer;
  std::thread joining([&] { peer = join(1, store); });
  const auto communicator = join(0, store);
  joining.join();
  std::vector<Numbers> received(Waiters::kMostThreads + 1);
  std::vector<Op> ops;
  for (std::size_t tag = 0; tag < received.size(); ++tag) {
    ops.push_back(communicator->point_to_point()->recv(elements_of(received[tag]), 1,
                                                       static_cast<int>(tag), Pin(), Fence()));
  }
  const Error refused = failure_of(ops.back());
  EXPECT_EQ(refused.blame(), Blame::Busy);
  EXPECT_NE(refused.text().find("use fewer tags at a time, or the backend weft"), std::string::npos)
      << refused.text();
  EXPECT_FALSE(ops.front().ended());
  communicator->abort(Error(Blame::Cancelled, "enough"));
  EXPECT_EQ(failure_of(ops.front()).text(), "enough");
}

}  // namespace
}  // namespace weft::transport::gloo
