// tcp://[multicast address]:port — processes that know nothing of each other but a multicast
// address meet there, without a host named beforehand. Each announces itself by UDP until all of
// them agree on who takes part; the lowest nonce then hosts the store on a TCP port that it holds
// from the start. Datagrams stay on the local network (hop limit 1).
//
// The interface: the first of WEFT_SOCKET_IFNAME, or the scope of the address (ff02::7%eth0), or
// the one that the kernel's routes name, or the loopback where there is no route.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <weft/base/deadline.h>
#include <weft/engine/store/address.h>

namespace weft::group {

struct Meeting {
  int rank = 0;
  bool hosts = false;
  std::string host;  // where the store is
  int port = 0;
  Descriptor listener;        // of the host: bound to that port and listening
  std::string local_address;  // of this process, as the others reach it
  // The others may still need this process's announcements: released once all of them have come to
  // the store.
  std::shared_ptr<const void> announcing;
};

// Blocks. `rank` where this process has been given one. Throws Caller when ranks are given twice,
// world sizes differ or too many processes come, on each of the processes concerned; Timeout,
// saying who came. `look` is called from time to time.
Meeting meet_by_multicast(
    const std::string& address, int port, const std::string& group, std::optional<int> rank,
    int world_size, Deadline deadline,
    const std::function<void(const std::function<std::string()>& who_came)>& look);

}  // namespace weft::group
