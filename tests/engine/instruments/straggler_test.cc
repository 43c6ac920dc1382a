// SPDX-License-Identifier: Apache-2.0
// Plants a straggler among real ranks of synchronous training and tests what weft-run --status says
// of it. The test sets the time for all processes. Time passes only while the straggler computes,
// so each rank's wait is exact.
#include <array>
#include <atomic>
#include <cstdlib>
#include <thread>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <torch/types.h>

#include <weft/debug.h>
#include <weft/engine/launch/status.h>
#include <weft/group.h>
#include <weft/profiling/trace/host_time.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::Processes;
using testing::HasSubstr;

constexpr int kRanks = 3;
constexpr int kStraggler = 1;
constexpr int kSteps = 5;
constexpr std::int64_t kSecond = 1'000'000'000;

template <class T>
T* shared_memory(const char* file) {
  const int descriptor = file != nullptr ? ::open(file, O_RDWR | O_CLOEXEC) : -1;
  void* const memory = ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE,
                              MAP_SHARED | (file == nullptr ? MAP_ANONYMOUS : 0), descriptor, 0);
  if (descriptor >= 0) ::close(descriptor);
  return memory == MAP_FAILED ? nullptr : static_cast<T*>(memory);
}

// Inherited by the ranks, which are forked.
std::atomic<std::int64_t>* job_time = nullptr;
std::array<trace::Progress*, kRanks> pages{};

// True while `rank` waits in `step`, which it does until the straggler joins.
bool waits_in(int rank, std::uint64_t step) {
  const trace::Progress& page = *pages[static_cast<std::size_t>(rank)];
  return page.steps == step && page.waiting_since != 0;
}

void train(int rank, const std::string& page, const std::string& backend) {
  ::setenv("WEFT_STATUS_FILE", page.c_str(), 1);
  trace::host_time().use_clock([] { return job_time->load(); });
  ProcessGroupOptions options;
  options.backend = backend;
  options.device = c10::Device(c10::kCPU);
  auto group = init_process_group(options);
  auto gradient = torch::ones({4});
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    begin_step();
    if (rank == kStraggler) {
      while (!waits_in(0, step) || !waits_in(2, step))
        std::this_thread::yield();  // the harness's timeout limits it
      *job_time += kSecond;
    }
    group.all_reduce(gradient).wait();
  }
}

class Straggler : public testing::TestWithParam<const char*> {};

TEST_P(Straggler, IsTheRankThatWaitsLeast) {
  job_time = shared_memory<std::atomic<std::int64_t>>(nullptr);
  ASSERT_NE(job_time, nullptr);
  *job_time = 1000 * kSecond;
  launch::StatusLine status(std::chrono::seconds(1), [] {
    return Deadline::Clock::time_point(std::chrono::nanoseconds(job_time->load()));
  });
  std::array<std::string, kRanks> files;
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto place = static_cast<std::size_t>(rank);
    files[place] = status.add(rank);
    pages[place] = shared_memory<trace::Progress>(files[place].c_str());
    ASSERT_NE(pages[place], nullptr);
  }
  Processes ranks(
      kRanks, [&](int rank) { train(rank, files[static_cast<std::size_t>(rank)], GetParam()); });
  ranks.expect_success();
  *job_time += kSteps * kSecond;  // during which no rank waits
  const std::string line = status.line();
  const std::string backend = std::string(" (") + GetParam() + ")";
  std::printf("%s\n", line.c_str());
  EXPECT_THAT(line, HasSubstr("rank 0: step 5, "));
  EXPECT_THAT(line, HasSubstr("waited 50 %" + backend + " | rank 1: "));
  EXPECT_THAT(line, HasSubstr("waited 0 % | rank 2: "));
  EXPECT_THAT(line,
              HasSubstr("waited 50 %" + backend + " | rank 1 waits least, the others wait for it"));
}

std::vector<const char*> backends() {
  std::vector<const char*> names{"shm", "tcp"};
  if (WEFT_TEST_GLOO) names.push_back("gloo");
  return names;
}
INSTANTIATE_TEST_SUITE_P(All, Straggler, testing::ValuesIn(backends()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace weft
