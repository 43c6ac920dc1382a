// SPDX-License-Identifier: Apache-2.0
// Accepts connections on one or several addresses. Only peers that greet this very listener are
// accepted; other sockets are closed, those that say nothing after a while. A connection of several
// sockets is accepted when all of them have arrived; the connecting side chooses how many. Runs on
// the loop.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <weft/transport/byte_stream.h>
#include <weft/transport/tcp/settings.h>
#include <weft/transport/transport.h>

namespace weft::transport::tcp {

class TcpListener final : public Listener {
 public:
  using Accepted = std::function<void(std::unique_ptr<ByteStream>)>;
  using Short = std::function<void(const Error&)>;  // ListenOptions::short_of_something
  // `interface_address` is as in local_addresses(). A host name is resolved here, which may block.
  // Throws Caller, Busy.
  TcpListener(const std::shared_ptr<EventLoop>& loop, const std::string& interface_address,
              const Settings& settings, Accepted accepted, Short short_of_something = {});
  // Accepts no more peers. `accepted` may be running on the loop for the last time.
  ~TcpListener() override;
  std::string address() const override { return address_; }

 private:
  class Entrance;
  std::shared_ptr<EventLoop> loop_;
  std::shared_ptr<Entrance> entrance_;  // shared with the loop's handlers
  std::string address_;
};

}  // namespace weft::transport::tcp
