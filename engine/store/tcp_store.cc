// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <future>
#include <system_error>
#include <thread>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/base/shortage.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/store.h>
#include <weft/engine/store/tcp_store.h>

namespace weft::group {

namespace {

// How long c10d itself retries when a host that was up refuses or closes the connection.
constexpr std::chrono::milliseconds kLongestOfC10d = std::chrono::seconds(2);
constexpr auto kBetweenLooks = std::chrono::milliseconds(500);

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_to_store(const std::string& address, int port,
                                                 std::chrono::milliseconds timeout,
                                                 Deadline deadline,
                                                 const std::function<void()>& look) {
  using Store = c10::intrusive_ptr<c10d::Store>;
  // c10d takes a lack of descriptors for a network failure, and retries until its time is over.
  require_descriptors(1, "the connection to the store at " + address + ":" + std::to_string(port));
  std::packaged_task<Store()> connect([=]() -> Store {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(port);
    // A host in Python waits until it has counted all ranks; this makes the client count itself.
    options.numWorkers = 1;
    options.timeout = std::min(timeout, kLongestOfC10d);
    const BriskLookups brisk;
    auto made = c10::make_intrusive<c10d::TCPStore>(address, options);
    made->setTimeout(timeout);
    return made;
  });
  std::future<Store> store = connect.get_future();
  // c10d waits for the first answer without a limit, and only the other end can stop it. So a
  // thread of its own connects, and is abandoned if no answer arrives.
  try {
    std::thread(std::move(connect)).detach();
  } catch (const std::system_error& error) {
    throw system_error(Blame::Busy, "starting a thread that connects to the store",
                       error.code().value());
  }
  while (store.wait_for(std::min<std::chrono::nanoseconds>(deadline.remaining(), kBetweenLooks)) !=
         std::future_status::ready) {
    if (look) look();
    if (!deadline.passed()) continue;
    throw Error(Blame::Timeout, "the listener at " + address + ":" + std::to_string(port) +
                                    " does not answer like the store of a job: another program "
                                    "uses that port, or rank 0 is "
                                    "stopped; look there, or give all ranks another MASTER_PORT");
  }
  return store.get();
}

}  // namespace weft::group
