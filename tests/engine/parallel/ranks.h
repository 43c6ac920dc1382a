// Ranks as threads of the test's process, over an in-memory store.
#pragma once

#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/group.h>

namespace weft::testing {

// Runs the body on `ranks` threads, each with its own process group; rethrows the lowest rank's exception.
inline void with_ranks(int ranks, const std::function<void(ProcessGroup)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ProcessGroupOptions options;
        options.backend = "gloo";
        options.store = store;
        options.rank = rank;
        options.world_size = ranks;
        options.timeout = std::chrono::seconds(30);
        options.device = c10::Device(c10::kCPU);
        body(init_process_group(std::move(options)));
      } catch (...) {
        failures[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace weft::testing
