#include <algorithm>
#include <future>
#include <system_error>
#include <thread>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <weft/base/error.h>
#include <weft/base/shortage.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/store.h>
#include <weft/engine/store/tcp_store.h>

namespace weft::group {

namespace {

// How long c10d tries again by itself where the host that was there refuses the connection or
// closes it.
constexpr std::chrono::milliseconds kLongestOfC10d = std::chrono::seconds(2);
constexpr auto kBetweenLooks = std::chrono::milliseconds(500);

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_to_store(const std::string& address, int port,
                                                 std::chrono::milliseconds timeout,
                                                 Deadline deadline,
                                                 const std::function<void()>& look) {
  using Store = c10::intrusive_ptr<c10d::Store>;
  // c10d takes a lack of descriptors for the network's fault, and tries again until its time is
  // over.
  require_descriptors(1, "the connection to the store at " + address + ":" + std::to_string(port));
  std::packaged_task<Store()> connect([=]() -> Store {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(port);
    options.numWorkers =
        1;  // a host in Python waits until it has counted every rank: this one counts itself
    options.timeout = std::min(timeout, kLongestOfC10d);
    const BriskLookups brisk;
    auto made = c10::make_intrusive<c10d::TCPStore>(address, options);
    made->setTimeout(timeout);
    return made;
  });
  std::future<Store> store = connect.get_future();
  // c10d waits for the first answer without any limit, and nothing but the other end stops it: so a
  // thread of its own does, which is left behind where no answer comes.
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
    throw Error(Blame::Timeout,
                "whoever listens at " + address + ":" + std::to_string(port) +
                    " does not answer as the store of a job does; is that port another program's?");
  }
  return store.get();
}

}  // namespace weft::group
