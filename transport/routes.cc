// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include <weft/base/fork_mutex.h>
#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/transport/registry.h>
#include <weft/transport/routes.h>

namespace weft::transport {

namespace {

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Logs once in a process for each key: every agent finds the reason anew, for every peer.
void say_once(const std::string& key, const std::string& text) {
  constexpr std::size_t kMost = 256;  // a bound, because peers contribute to the keys
  static constinit ForkMutex mutex(ForkOrder::Transport);
  // Never destroyed: agents may outlive static objects.
  static auto* const said WEFT_POINTEE_GUARDED_BY(mutex) = new std::set<std::string>;
  {
    MutexLock lock(mutex);
    if (said->size() == kMost || !said->insert(key).second) return;
  }
  log::info(text);
}

// Why a better transport is not used. For the log, reasons that differ only in the peer's address
// or in numbers (of processes, say) are the same.
struct PassedOver {
  std::string transport;
  std::string reason;
  std::string address;

  std::string text() const { return transport + ": " + reason; }
  void say(const std::string& taken) const {
    const std::string begin = "transport '" + transport + "' is passed over for '" + taken + "': ";
    std::string key = reason;
    if (const auto at = key.find(address); !address.empty() && at != std::string::npos)
      key.erase(at, address.size());
    std::erase_if(key, [](char letter) { return letter >= '0' && letter <= '9'; });
    say_once(begin + key, begin + reason);
  }
};

}  // namespace

Routes::Routes(const std::vector<std::string>& names) : chosen_(!names.empty()) {
  for (const auto& name : names) {
    auto transport = open(name);
    if (transport->connector() == nullptr) {
      throw Error(Blame::Caller, "transport '" + name +
                                     "' has collectives only, and no connections to single peers");
    }
    transports_.push_back(std::move(transport));
  }
  if (chosen_) return;
  std::string why;
  bool lacks_something = false;  // only for now
  for (const Backend& backend : backends()) {
    auto opened = backend.open();
    if (!opened) {
      lacks_something |= opened.error().blame() == Blame::Busy;
      const std::string reason = std::string(backend.name) + ": " + opened.error().text();
      why += "; " + reason;
      say_once(reason, "a transport cannot be used here; " + reason);
    } else if (Connector* connector = opened.value()->connector();
               connector != nullptr && connector->preference() >= 0) {
      transports_.push_back(std::move(opened.value()));
    }
  }
  if (transports_.empty()) {
    throw Error(lacks_something ? Blame::Busy : Blame::Unsupported,
                "no transport can be used on this machine" + why);
  }
  std::stable_sort(transports_.begin(), transports_.end(), [](const auto& a, const auto& b) {
    return a->connector()->preference() > b->connector()->preference();
  });
}

Routes Routes::over(std::vector<std::shared_ptr<Transport>> transports) {
  Routes routes{None()};
  routes.transports_ = std::move(transports);
  return routes;
}

std::vector<Offer> Routes::listen(const ListenOptions& options) {
  std::vector<Offer> offers;
  std::optional<Error> first;
  for (const auto& transport : transports_) {
    try {
      auto listener = transport->connector()->listen(options);
      offers.push_back({std::string(transport->name()), listener->address()});
      listeners_.push_back(std::move(listener));
    } catch (const Error& error) {
      if (chosen_)
        throw error.within("transport '" + std::string(transport->name()) + "' cannot listen");
      log::warn("transport '" + std::string(transport->name()) +
                "' is not used, because it cannot listen: " + error.text());
      if (!first) first = error;
    }
  }
  if (offers.empty()) throw first->within("no transport can listen");
  return offers;
}

void Routes::close() { listeners_.clear(); }

// The transport for a peer, and why better ones are not used.
struct Routes::Found {
  Transport* transport = nullptr;  // null if none reaches the peer
  std::string address;
  bool has_failed = false;  // it is used only because no other is left
  std::vector<PassedOver> better;

  std::string why() const {
    std::string text;
    for (const PassedOver& one : better) text += (text.empty() ? "" : "; ") + one.text();
    return text;
  }
};

Routes::Found Routes::find(const std::vector<Offer>& offers, const Failed& failed) const {
  Found found;
  for (const auto& transport : transports_) {
    const std::string name(transport->name());
    const auto offer = std::find_if(offers.begin(), offers.end(),
                                    [&](const Offer& one) { return one.transport == name; });
    if (offer == offers.end()) {
      found.better.push_back({name, "the peer does not offer it", {}});
    } else if (const auto reason = transport->connector()->why_unreachable(offer->address)) {
      found.better.push_back({name, *reason, offer->address});
    } else if (const auto known = failed.find(name); known != failed.end()) {
      found.better.push_back({name, "it has failed: " + known->second, offer->address});
      if (found.transport != nullptr) continue;
      found.transport = transport.get();
      found.address = offer->address;
      found.has_failed = true;
    } else {
      found.transport = transport.get();
      found.address = offer->address;
      found.has_failed = false;
      break;
    }
  }
  return found;
}

std::shared_ptr<Connection> Routes::connect(const std::vector<Offer>& offers,
                                            const ConnectOptions& options,
                                            const Failed& failed) const {
  const Found found = find(offers, failed);
  if (found.transport == nullptr) {
    throw Error(Blame::Unsupported,
                "no transport reaches the peer (" + found.why() + "); this process has " +
                    list(names()) +
                    (chosen_ ? ", as chosen: choose others, or leave the choice open" : ""));
  }
  if (!found.has_failed) {
    for (const PassedOver& one : found.better) one.say(std::string(found.transport->name()));
  }
  return found.transport->connector()->connect(found.address, options);
}

std::string Routes::transport_to(const std::vector<Offer>& offers, const Failed& failed) const {
  const Found found = find(offers, failed);
  return found.transport == nullptr ? std::string() : std::string(found.transport->name());
}

std::optional<std::string> Routes::why_unreachable(const std::vector<Offer>& offers) const {
  const Found found = find(offers, {});
  if (found.transport != nullptr) return std::nullopt;
  return "no transport reaches it (" + found.why() + ")";
}

std::vector<std::string> Routes::names() const {
  std::vector<std::string> names;
  for (const auto& transport : transports_) names.emplace_back(transport->name());
  return names;
}

}  // namespace weft::transport
