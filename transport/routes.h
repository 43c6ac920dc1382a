// SPDX-License-Identifier: Apache-2.0
// Chooses the transport to a peer. Each side offers its addresses, one for every transport on which
// it listens. Of the transports that both have, the one with the highest preference is used;
// Connection::transport() names it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <weft/transport/transport.h>

namespace weft::transport {

struct Offer {
  std::string transport;
  std::string address;
};

class Routes {
 public:
  // With names: uses exactly these transports, in this order of preference. Without: all
  // point-to-point transports that can be used here. Throws Caller for a name that does not exist
  // or has no connections, Unsupported with the reason for one that cannot be used.
  explicit Routes(const std::vector<std::string>& names = {});
  // Uses these transports, which have connections, in this order of preference.
  static Routes over(std::vector<std::shared_ptr<Transport>> transports);

  // Listens on every transport. The listeners live as long as this object, or until close().
  // Settings that a transport needs beyond `options` come from the environment. Throws as
  // Connector::listen throws if none can listen.
  std::vector<Offer> listen(const ListenOptions& options);
  void close();

  // Connects by the best transport that reaches one of the addresses. Throws Unsupported, saying
  // for each offer why it cannot be used. `failed` names the transports that have failed for this
  // peer, with the reasons; they are used only if no other is left.
  using Failed = std::map<std::string, std::string>;
  std::shared_ptr<Connection> connect(const std::vector<Offer>& offers,
                                      const ConnectOptions& options,
                                      const Failed& failed = {}) const;

  // The name of the transport that connect() uses for these offers; empty if none reaches the peer.
  std::string transport_to(const std::vector<Offer>& offers, const Failed& failed = {}) const;
  // The error of connect(), for each offer; nothing if a transport may reach the peer.
  std::optional<std::string> why_unreachable(const std::vector<Offer>& offers) const;

  // The transports' names, best first.
  std::vector<std::string> names() const;

 private:
  struct None {};
  explicit Routes(None) {}
  struct Found;
  Found find(const std::vector<Offer>& offers, const Failed& failed) const;

  std::vector<std::shared_ptr<Transport>> transports_;  // best first
  std::vector<std::unique_ptr<Listener>> listeners_;
  bool chosen_ = false;  // the caller named the transports
};

}  // namespace weft::transport
