// Connecting to c10d's TCPStore, by a deadline.
#pragma once

#include <functional>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <weft/base/deadline.h>

namespace weft::group {

// A client of the TCPStore that listens at this address, a numeric one; its calls take `timeout` at
// most. `look` is called now and then while no answer comes. Throws Timeout where whoever listens
// there has not answered as a store does by the deadline: another program, or a host that hangs.
// Throws Busy where this process has no descriptor left for the connection. Other failures are
// c10d's exceptions, after two seconds at most: the host that was there has ended, or turned this
// one away.
c10::intrusive_ptr<c10d::Store> connect_to_store(const std::string& address, int port,
                                                 std::chrono::milliseconds timeout,
                                                 Deadline deadline,
                                                 const std::function<void()>& look = {});

}  // namespace weft::group
