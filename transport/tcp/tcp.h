// SPDX-License-Identifier: Apache-2.0
// The tcp backend: sockets on the EventLoop, IPv4 and IPv6.
#pragma once

#include <weft/transport/tcp/settings.h>
#include <weft/transport/transport.h>

namespace weft::transport::tcp {

class Tcp final : public Transport, private Connector {
 public:
  // Throws Caller if Settings::sockets is out of range.
  explicit Tcp(const Settings& settings = {});

  std::string_view name() const override { return "tcp"; }
  Connector* connector() override { return this; }
  bool reaches(DeviceType type) const override { return type == DeviceType::Host; }
  std::shared_ptr<Communicator> join(const JoinOptions& options) override;

 private:
  Capabilities capabilities() const override;
  int preference() const override { return 100; }  // tcp reaches the most peers and is the slowest
  std::optional<std::string> why_unreachable(const std::string& address) const override;
  std::unique_ptr<Listener> listen(const ListenOptions& options) override;
  std::shared_ptr<Connection> connect(const std::string& address,
                                      const ConnectOptions& options) override;

  const Settings settings_;
};

}  // namespace weft::transport::tcp
