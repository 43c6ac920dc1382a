// SPDX-License-Identifier: Apache-2.0
#include <weft/tests/conformance/communicator/threads.h>
#include <weft/tests/harness/interface.h>
#include <weft/tests/harness/memory_bootstrap.h>

namespace weft::conformance {

transport::JoinOptions Threads::options_for(const Rank& rank, std::chrono::milliseconds timeout) {
  transport::JoinOptions options;
  options.rank = rank.rank;
  options.size = rank.size;
  options.group_name = "claims";
  options.store = rank.store;
  options.timeout = timeout;
  options.loop = rank.loop;
  options.interface_address = harness::interface_or("127.0.0.1");
  return options;
}

void Threads::run_ranks(const std::function<void(Rank&)>& join,
                        const std::function<void(Rank&)>& body) const {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  run_threads(ranks_, [&](int number) {
    Rank rank;
    rank.rank = number;
    rank.size = ranks_;
    rank.store = store;
    rank.loop = std::make_shared<EventLoop>("rank " + std::to_string(number));
    join(rank);
    body(rank);
    leave(rank);
  });
}

}  // namespace weft::conformance
