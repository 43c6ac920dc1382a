// The ways to a peer. Each side offers the addresses it has, one for every transport it listens on;
// of those that both have the one with the highest preference wins. What was chosen is the
// connection's transport().
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
  // With names exactly these transports, best first whatever they prefer; without, all
  // point-to-point ones that can be used here. Throws Caller for a name that does not exist or has
  // no connections, Unsupported with the reason for one that cannot be used.
  explicit Routes(const std::vector<std::string>& names = {});

  // Listens on every transport; the listeners live as long as this object, or until close(). What
  // each needs beyond `options` it takes from the environment. Throws what Connector::listen throws
  // where none of them can.
  std::vector<Offer> listen(const ListenOptions& options);
  void close();

  // By the best transport that reaches one of the addresses. Throws Unsupported, saying for each
  // offer why it is of no use. `failed` names the transports that have failed for this peer, each
  // with the reason: they are passed over as long as another one is left.
  using Failed = std::map<std::string, std::string>;
  std::shared_ptr<Connection> connect(const std::vector<Offer>& offers,
                                      const ConnectOptions& options,
                                      const Failed& failed = {}) const;

  // The transports' names, best first.
  std::vector<std::string> names() const;

 private:
  std::vector<std::shared_ptr<Transport>> transports_;  // best first
  std::vector<std::unique_ptr<Listener>> listeners_;
  bool chosen_ = false;  // by name
};

}  // namespace weft::transport
