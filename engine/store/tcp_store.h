// SPDX-License-Identifier: Apache-2.0
// Connects to c10d's TCPStore by a deadline.
#pragma once

#include <functional>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <weft/base/deadline.h>

namespace weft::group {

// Returns a client of the TCPStore that listens at this numeric address; its calls take at most
// `timeout`. Calls `look` now and then while no answer arrives. Throws Timeout if the listener has
// not answered as a store does by the deadline: it is another program, or a host that hangs. Throws
// Busy if this process has no descriptor left for the connection. Other failures are c10d's
// exceptions, after at most two seconds: the host was there and has ended, or has rejected this
// process.
c10::intrusive_ptr<c10d::Store> connect_to_store(const std::string& address, int port,
                                                 std::chrono::milliseconds timeout,
                                                 Deadline deadline,
                                                 const std::function<void()>& look = {});

}  // namespace weft::group
