// SPDX-License-Identifier: Apache-2.0
// RDMA between processes on hosts that InfiniBand or RoCE connects. docs/rdma.md lists the
// requirements for a cluster.
#pragma once

#include <map>

#include <weft/base/mutex.h>
#include <weft/transport/transport.h>
#include <weft/transport/verbs/registration.h>

namespace weft::transport::verbs {

// "roce/192.0.2.1:4711#…": the fabric, then the TCP address where the peers meet.
struct Address {
  Fabric fabric = Fabric::Roce;
  std::string meeting;
  std::string text() const;
  // Throws Caller if the text is not such an address.
  static Address parse(const std::string& text);
};

class Verbs final : public Transport, public Connector {
 public:
  // `meeting` is the transport over which two ends exchange their hellos. Throws Unsupported if no
  // port can be used.
  Verbs(std::vector<std::shared_ptr<Device>> devices, const Config& config,
        std::shared_ptr<Transport> meeting);

  std::string_view name() const override { return "verbs"; }
  Connector* connector() override { return this; }
  bool reaches(DeviceType type) const override { return type == DeviceType::Host; }
  std::vector<std::string> describe() const override;
  std::shared_ptr<Communicator> join(const JoinOptions& options) override;

  Capabilities capabilities() const override;
  int preference() const override { return 200; }
  std::optional<std::string> why_unreachable(const std::string& address) const override;
  std::unique_ptr<Listener> listen(const ListenOptions& options) override;
  std::shared_ptr<Connection> connect(const std::string& address,
                                      const ConnectOptions& options) override;

 private:
  // A port and its device's registrations.
  struct Way {
    Path path;
    std::shared_ptr<RegistrationCache> registrations;
  };
  Way way_from(const std::string& interface_address) const;
  // The way for outgoing connections: the port that this process listens on, as its other ports may
  // not be on the peers' network.
  Way way_out() const;

  const std::vector<std::shared_ptr<Device>> devices_;
  const Config config_;
  const std::shared_ptr<Transport> meeting_;
  std::map<const Device*, std::shared_ptr<RegistrationCache>> registrations_;
  mutable Mutex mutex_;
  std::string listens_at_ WEFT_GUARDED_BY(mutex_);  // interface_address of the last listen()
};

}  // namespace weft::transport::verbs
