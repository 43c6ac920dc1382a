#include <gtest/gtest.h>
#include <torch/torch.h>
#include <csignal>
#include <weft/group.h>
#include <weft/tests/harness/ranks.h>
namespace weft {
TEST(Scratch, Threads) {
  harness::run_ranks(harness::As::Threads, 3, [](ProcessGroup& g) { auto t = torch::ones({3}); g.all_reduce(t).wait(); EXPECT_EQ(t.sum().item<double>(), 9); });
}
TEST(Scratch, Procs) {
  harness::run_ranks(harness::As::Processes, 3, [](ProcessGroup& g) { auto t = torch::ones({3}); g.all_reduce(t).wait(); EXPECT_EQ(t.sum().item<double>(), 9); });
}
TEST(Scratch, Kill) {
  harness::Processes p(3, [](int rank) {
    auto g = init_process_group();
    auto t = torch::ones({3});
    g.all_reduce(t).wait();
    harness::Processes::say("ready");
    if (rank == 1) pause();
    auto e = harness::error_of([&] { for (;;) g.all_reduce(t).wait(); });
    printf("rank %d: %s\n", rank, e.what());
    auto e2 = harness::error_of([&] { for (;;) g.all_reduce(t).wait(); });
    printf("rank %d: %s\n", rank, e2.what());
  });
  p.wait_for(1, "ready");
  p.signal(1, SIGKILL);
  p.expect_success({1});
}
TEST(Scratch, Stop) {
  harness::Processes p(3, [](int rank) {
    ProcessGroupOptions o; o.timeout=std::chrono::seconds(2);
    auto g = init_process_group(o);
    auto t = torch::ones({3});
    g.all_reduce(t).wait();
    harness::Processes::say("ready");
    if (rank == 1) pause();
    auto e = harness::error_of([&] { for (;;) g.all_reduce(t).wait(); });
    printf("rank %d: %s\n", rank, e.what());
    auto e2 = harness::error_of([&] { for (;;) g.all_reduce(t).wait(); });
    printf("rank %d: %s\n", rank, e2.what());
  });
  p.wait_for(1, "ready");
  p.signal(1, SIGSTOP);
  p.expect_success({1});
}
TEST(Scratch, RecvFromDead) {
  harness::Processes p(3, [](int rank) {
    auto g = init_process_group();
    auto t = torch::ones({3});
    g.all_reduce(t).wait();
    harness::Processes::say("ready");
    if (rank == 1) pause();
    if (rank == 2) { auto e = harness::error_of([&] { g.recv(t).wait(); });
    printf("rank %d: %s\n", rank, e.what()); }
    else {
    auto e = harness::error_of([&] { g.send(t, 1).wait(); });
    printf("rank %d: %s\n", rank, e.what());}
  });
  p.wait_for(1, "ready");
  p.signal(1, SIGKILL);
  p.expect_success({1});
}
}
