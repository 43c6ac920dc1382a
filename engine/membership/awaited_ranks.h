// SPDX-License-Identifier: Apache-2.0
// Ranks that have published an address and have not connected to this one, their parent in the
// tree, yet. This rank holds a connection to the listening socket of each. The kernel ends that
// connection when the rank's process dies; the rank itself ends it too, because this one says
// nothing on it. Then this rank connects again: a rank whose socket refuses that, and whose hello
// does not follow, has died. One whose machine does not answer is lost too.
//
// Neighbours owns it. Used on the job's loop only; nothing blocks.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include <weft/base/descriptor.h>
#include <weft/base/event_loop.h>
#include <weft/engine/membership/link.h>

namespace weft::group {

class AwaitedRanks : public std::enable_shared_from_this<AwaitedRanks> {
 public:
  // `greets` returns true while some connection to this rank has not said whose it is. `ended` is
  // called for a rank that is no longer awaited then.
  AwaitedRanks(std::shared_ptr<EventLoop> loop, std::function<bool()> greets,
               std::function<void(int rank, const LinkEnd& how)> ended)
      : loop_(std::move(loop)), greets_(std::move(greets)), ended_(std::move(ended)) {}

  void watch(int rank, const std::string& host, int port);
  // The rank has said hello.
  void came(int rank) { ranks_.erase(rank); }

 private:
  struct Awaited {
    std::string host;
    int port = 0;
    Descriptor socket;
    EventLoop::Registration ending;  // of the connection
    EventLoop::Registration grace;   // until the next connection, or until the hello must be here
  };
  void on_event(int rank);
  void watch_again(int rank, const std::string& host, int port);
  void give_grace(int rank);
  void unreachable(int rank, int error);

  const std::shared_ptr<EventLoop> loop_;
  const std::function<bool()> greets_;
  const std::function<void(int, const LinkEnd&)> ended_;
  std::map<int, Awaited> ranks_;
};

}  // namespace weft::group
