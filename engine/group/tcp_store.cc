#include <algorithm>
#include <future>
#include <system_error>
#include <thread>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <weft/base/error.h>
#include <weft/engine/group/address.h>
#include <weft/engine/group/store.h>
#include <weft/engine/group/tcp_store.h>

namespace weft::group {

c10::intrusive_ptr<c10d::Store> connect_to_store(const std::string& address, int port, std::chrono::milliseconds timeout,
                                                 Deadline deadline) {
  using Store = c10::intrusive_ptr<c10d::Store>;
  std::packaged_task<Store()> connect([=]() -> Store {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(port);
    options.numWorkers = 1;  // a host in Python waits until it has counted every rank: this one counts itself
    options.timeout = timeout;
    const BriskLookups brisk;
    return c10::make_intrusive<c10d::TCPStore>(address, options);
  });
  std::future<Store> store = connect.get_future();
  // c10d waits for the first answer without any limit, and nothing but the other end stops it: so a thread of its own does,
  // which is left behind where no answer comes.
  try {
    std::thread(std::move(connect)).detach();
  } catch (const std::system_error& error) {
    throw system_error(Blame::Busy, "starting a thread that connects to the store", error.code().value());
  }
  if (store.wait_for(std::min(deadline.remaining(), kLongestTimeout)) != std::future_status::ready) {
    throw Error(Blame::Timeout, "whoever listens at " + address + ":" + std::to_string(port) +
                                    " does not answer as the store of a job does; is that port another program's?");
  }
  return store.get();
}

}  // namespace weft::group
