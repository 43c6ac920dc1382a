// SPDX-License-Identifier: Apache-2.0
// tcp://[multicast address]:port — processes meet that know only a multicast address, without a
// host named beforehand. Each announces itself by UDP until all of them agree on who takes part.
// The process with the lowest nonce then hosts the store, on a TCP port that it has held from the
// start. Datagrams stay on the local network (hop limit 1).
//
// The interface is the first of WEFT_SOCKET_IFNAME; else the scope of the address (ff02::7%eth0);
// else the interface of the kernel's route; else the loopback.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <weft/base/deadline.h>
#include <weft/engine/store/address.h>

namespace weft::group {

struct MulticastMeeting {
  int rank = 0;
  bool hosts = false;
  std::string host;  // where the store listens
  int port = 0;
  Descriptor listener;        // of the host: bound to `port` and listening
  std::string local_address;  // of this process, as the others reach it
  // Keeps announcing, since the others may still need this process's announcements. Release it once
  // all of them have come to the store.
  std::shared_ptr<const void> announcing;
};

// Blocks. `rank` is the rank that this process was given, if any. Throws Caller, on each process
// concerned, if a rank is given twice, world sizes differ or too many processes come; Timeout, with
// the processes that came. Calls `look` from time to time.
MulticastMeeting meet_by_multicast(
    const std::string& address, int port, const std::string& group, std::optional<int> rank,
    int world_size, Deadline deadline,
    const std::function<void(const std::function<std::string()>& who_came)>& look);

}  // namespace weft::group
