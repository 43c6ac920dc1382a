// SPDX-License-Identifier: Apache-2.0
// The GPU bench of streams over the fake driver: every way to hand work between streams is
// measured, and none hangs.
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <unistd.h>

#include <weft/profiling/bench/gpu_streams.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::bench {
namespace {

using StreamsBench = cuda::ThreadedCuda;

TEST_F(StreamsBench, MeasuresEveryWayWithoutHanging) {
  std::string file =
      (std::filesystem::temp_directory_path() / ("weft-streams-" + std::to_string(getpid())))
          .string();
  std::string options[] = {"gpu_bench", "--json", file, "--runs", "2"};
  std::array<char*, 5> arguments{};
  for (std::size_t i = 0; i < arguments.size(); ++i) arguments[i] = options[i].data();
  Report report("gpu", static_cast<int>(arguments.size()), arguments.data(), 1);
  bench_streams(report, device);
  EXPECT_EQ(fake.calls(&cuda::Driver::launch_host_func), 3 * 100)
      << "one warm-up run and two runs, of 50 rounds each";
  EXPECT_EQ(report.finish(), 0);
  std::ifstream rows(file);
  const std::string text{std::istreambuf_iterator<char>(rows), {}};
  for (const char* peer : {"weft", "host function", "event"}) {
    EXPECT_THAT(text, testing::HasSubstr("\"peer\":\"" + std::string(peer) + "\"")) << peer;
  }
  std::filesystem::remove(file);
  EXPECT_TRUE(device->retirement().reclaim_all(Deadline::in(std::chrono::seconds(30))));
}

}  // namespace
}  // namespace weft::bench
