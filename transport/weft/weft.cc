// SPDX-License-Identifier: Apache-2.0
// The default backend for host memory: a mesh whose pairs of ranks each use their own transport.
// Of those that both ranks of a pair can use, that is shm (within a host), else verbs, else tcp. A
// rank listens on all of them, and publishes all their addresses as one (offers.h).
#include <map>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/mesh/mesh.h>
#include <weft/transport/registry.h>
#include <weft/transport/routes.h>
#include <weft/transport/transports_text.h>
#include <weft/transport/weft/offers.h>

namespace weft::transport::weft {

namespace {

constexpr const char* kShared = "shm";
// Best first.
constexpr const char* kTransports[] = {kShared, "verbs", "tcp"};

// Listens on each transport that can.
class OnEach final : public Listener {
 public:
  OnEach(const std::vector<std::shared_ptr<Transport>>& transports, const ListenOptions& options) {
    std::string why;
    for (const auto& transport : transports) {
      const std::string name(transport->name());
      try {
        auto listener = transport->connector()->listen(options);
        offers_.push_back({name, listener->address()});
        listeners_.push_back(std::move(listener));
      } catch (const Error& error) {
        // Another transport would not be the user's choice, if this one is only short of something.
        if (error.blame() == Blame::Busy) throw;
        log::info("backend 'weft' does not use " + name + ": " + error.text());
        why += (why.empty() ? "" : "; ") + name + ": " + error.text();
      }
    }
    if (offers_.empty()) throw Error(Blame::Unsupported, "no transport can listen: " + why);
  }
  std::string address() const override { return encode(offers_); }

 private:
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::vector<Offer> offers_;
};

// Connects each pair of ranks of one group by its best transport, or by the next if that fails.
class Pairs final : public Connector {
 public:
  explicit Pairs(std::vector<std::shared_ptr<Transport>> transports)
      : transports_(std::move(transports)), routes_(Routes::over(transports_)) {}

  Capabilities capabilities() const override {
    return transports_.back()->connector()->capabilities();
  }
  int preference() const override { return -1; }
  std::optional<std::string> why_unreachable(const std::string& address) const override {
    if (!transport_to(address).empty()) return std::nullopt;
    const auto offers = decode(address);
    return offers ? routes_.why_unreachable(offers.value()) : offers.error().text();
  }
  std::string transport_to(const std::string& address) const override {
    {
      MutexLock lock(mutex_);
      const auto known = chosen_.find(address);
      if (known != chosen_.end()) return known->second;
    }
    const auto offers = decode(address);
    std::string name;
    if (offers) name = routes_.transport_to(offers.value(), failed_for(address));
    MutexLock lock(mutex_);
    if (!name.empty() && !failed_.contains(address)) chosen_.emplace(address, name);
    return name;
  }
  // A mesh::Reroute.
  bool has_other(const std::string& address, const std::string& transport, const Error& why) {
    const auto offers = decode(address);
    if (!offers) return false;
    MutexLock lock(mutex_);
    chosen_.erase(address);
    Routes::Failed& failed = failed_[address];
    failed.emplace(transport, why.text());
    return !failed.contains(routes_.transport_to(offers.value(), failed));
  }
  std::string host_of(const std::string& address) const override {
    const auto offers = decode(address);
    if (!offers) return {};
    for (const Offer& offer : offers.value()) {
      if (offer.transport != kShared) continue;
      for (const auto& transport : transports_) {
        if (transport->name() == kShared) return transport->connector()->host_of(offer.address);
      }
    }
    return {};
  }
  std::string transport_of_host() const override { return kShared; }
  std::unique_ptr<Listener> listen(const ListenOptions& options) override {
    return std::make_unique<OnEach>(transports_, options);
  }
  std::shared_ptr<Connection> connect(const std::string& address,
                                      const ConnectOptions& options) override {
    const auto offers = decode(address);
    if (!offers) throw offers.error();
    return routes_.connect(offers.value(), options, failed_for(address));
  }

 private:
  Routes::Failed failed_for(const std::string& address) const {
    MutexLock lock(mutex_);
    const auto found = failed_.find(address);
    return found == failed_.end() ? Routes::Failed() : found->second;
  }

  const std::vector<std::shared_ptr<Transport>> transports_;
  const Routes routes_;
  mutable Mutex mutex_;
  std::map<std::string, Routes::Failed> failed_ WEFT_GUARDED_BY(mutex_);  // by address
  // The transports to addresses to which none has failed: looking at another process takes several
  // system calls, and a group of n ranks asks several times for each of n addresses.
  mutable std::map<std::string, std::string> chosen_ WEFT_GUARDED_BY(mutex_);
};

class Weft final : public Transport {
 public:
  Weft(std::vector<std::shared_ptr<Transport>> transports, std::vector<std::string> lines)
      : transports_(std::move(transports)), lines_(std::move(lines)) {}

  std::string_view name() const override { return "weft"; }
  std::vector<std::string> describe() const override { return lines_; }
  bool asks_for_secret() override { return true; }
  bool reaches(DeviceType type) const override { return type == DeviceType::Host; }

  std::shared_ptr<Communicator> join(const JoinOptions& options) override {
    const auto pairs = std::make_shared<Pairs>(transports_);
    const auto chooser_of = [](const std::string& transport) {
      return transport == kShared ? mesh::choose_in_cache : mesh::choose;
    };
    auto joined =
        mesh::join(pairs, "weft", options, chooser_of,
                   [pairs](const std::string& address, const std::string& transport,
                           const Error& why) { return pairs->has_other(address, transport, why); });
    if (options.rank == 0 && options.size > 1)
      log::info("group '" + options.group_name + "' of " + std::to_string(options.size) +
                " ranks: rank 0 uses " + transports_text(*joined));
    return joined;
  }

 private:
  const std::vector<std::shared_ptr<Transport>> transports_;  // best first
  const std::vector<std::string> lines_;
};

}  // namespace

Result<std::shared_ptr<Transport>> open() {
  std::vector<std::shared_ptr<Transport>> transports;
  std::vector<std::string> lines;
  std::string why;
  for (const std::string name : kTransports) {
    try {
      transports.push_back(transport::open(name));
      lines.push_back((name == kShared ? "between ranks that share a host: " : "between hosts: ") +
                      name);
    } catch (const Error& error) {
      // Another transport would not be the user's choice, if this one is only short of something.
      if (error.blame() == Blame::Busy) return error;
      lines.push_back("no " + name + ": " + error.text());
      why += (why.empty() ? "" : "; ") + name + ": " + error.text();
    }
  }
  if (transports.empty())
    return Error(Blame::Unsupported, "none of its transports can be used: " + why);
  return std::shared_ptr<Transport>(std::make_shared<Weft>(std::move(transports), lines));
}

}  // namespace weft::transport::weft
