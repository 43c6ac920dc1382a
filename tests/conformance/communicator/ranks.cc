// SPDX-License-Identifier: Apache-2.0
#include <thread>

#include <weft/tests/conformance/communicator/ranks.h>

namespace weft::conformance {

void leave(Rank& rank) {
  const Deadline deadline = Deadline::in(std::chrono::seconds(60));
  rank.store->set("left/" + std::to_string(rank.rank), {});
  for (int other = 0; other < rank.size; ++other)
    rank.store->get("left/" + std::to_string(other), deadline);
  rank.communicator.reset();
  rank.loop.reset();
  rank.allocate = nullptr;
  rank.gate = nullptr;
}

void run_threads(int ranks, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&body, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace weft::conformance
