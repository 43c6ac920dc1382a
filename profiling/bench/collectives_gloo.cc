// SPDX-License-Identifier: Apache-2.0
// The peer of collectives_bench that calls Gloo directly, without c10d: the same calls, timing and
// output format. The ranks meet in a temporary folder named after MASTER_PORT.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <sched.h>
#include <unistd.h>

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string text_in(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? "" : text;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const int rank = std::atoi(text_in("RANK").c_str());
  const int size = std::atoi(text_in("WORLD_SIZE").c_str());
  const auto folder =
      std::filesystem::temp_directory_path() / ("weft-bench-gloo-" + text_in("MASTER_PORT"));
  std::filesystem::create_directory(folder);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<unsigned>(rank) % static_cast<unsigned>(sysconf(_SC_NPROCESSORS_ONLN)),
          &cores);
  sched_setaffinity(0, sizeof cores, &cores);
  gloo::rendezvous::FileStore store(folder);
  auto device = gloo::transport::tcp::CreateDevice("127.0.0.1");
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
  context->connectFullMesh(store, device);

  const char* operation = argv[1];
  for (const std::size_t bytes :
       {std::size_t{4}, std::size_t{1} << 10, std::size_t{64} << 10, std::size_t{1} << 20,
        std::size_t{16} << 20, std::size_t{64} << 20}) {
    const std::size_t count = bytes / sizeof(float);
    std::vector<float> data(count, 0.0F);
    std::vector<float> gathered(
        std::strcmp(operation, "all_gather") == 0 ? count * static_cast<std::size_t>(size) : 1);
    const auto call = [&] {
      if (std::strcmp(operation, "all_reduce") == 0) {
        gloo::AllreduceOptions options(context);
        options.setOutput(data.data(), count);
        options.setReduceFunction(
            static_cast<void (*)(void*, const void*, const void*, std::size_t)>(&gloo::sum<float>));
        gloo::allreduce(options);
      } else if (std::strcmp(operation, "broadcast") == 0) {
        gloo::BroadcastOptions options(context);
        options.setOutput(data.data(), count);
        options.setRoot(0);
        gloo::broadcast(options);
      } else {
        gloo::AllgatherOptions options(context);
        options.setInput(data.data(), count);
        options.setOutput(gathered.data(), gathered.size());
        gloo::allgather(options);
      }
    };
    gloo::BarrierOptions together(context);
    gloo::barrier(together);
    for (int i = 0; i < 3; ++i) call();
    const double start = now();
    for (int i = 0; i < 5; ++i) call();
    int calls = std::clamp(static_cast<int>(0.3 / std::max((now() - start) / 5, 1e-7)), 6, 20000);
    gloo::BroadcastOptions agreed(context);
    agreed.setOutput(&calls, 1);
    agreed.setRoot(0);
    gloo::broadcast(agreed);
    for (int i = 0; i < calls / 5; ++i) call();
    std::vector<double> times;
    for (int i = 0; i < calls; ++i) {
      const double begin = now();
      call();
      times.push_back(now() - begin);
    }
    if (rank != 0) continue;
    std::printf("%zu", bytes);
    for (const double time : times) std::printf(" %.9f", time);
    std::printf("\n");
  }
  gloo::BarrierOptions together(context);
  gloo::barrier(together);
  if (rank == 0) std::filesystem::remove_all(folder);
  return 0;
}
