// SPDX-License-Identifier: Apache-2.0
// The default backend for host memory. It has no connections of its own: the ranks of a group agree
// on another transport and join over it. They use shm if each rank reaches all others by it, else
// tcp.
//
// Store keys of a group that joins: "weft/shm/RANK" is that rank's offer (a byte that says whether
// shm can be used there, then the address of a listener of its own, or the reason);
// "weft/transport" is rank 0's decision.
#include <algorithm>

#include <weft/base/log.h>
#include <weft/transport/registry.h>

namespace weft::transport::weft {

namespace {

constexpr const char* kShared = "shm";
constexpr const char* kNetwork = "tcp";
constexpr const char* kDecisionKey = "weft/transport";
constexpr char kUsable = '+';
constexpr char kUnusable = '-';
constexpr std::size_t kLongest = 4096;  // characters of an offer

std::string offer_key(int rank) { return "weft/shm/" + std::to_string(rank); }

Bootstrap::Bytes bytes_of(const std::string& text) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
  return {bytes, bytes + text.size()};
}

std::string text_of(const Bootstrap::Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), std::min(bytes.size(), kLongest)};
}

// A transport, or the reason why it cannot be used here.
struct Way {
  std::shared_ptr<Transport> transport;
  std::string why_not;
};

// Throws Busy if this process is short of descriptors or memory: falling back to the other
// transport then is not the user's choice.
Way way(const char* name) {
  try {
    return {open(name), {}};
  } catch (const Error& error) {
    if (error.blame() == Blame::Busy) throw;
    return {nullptr, error.text()};
  }
}

class Weft final : public Transport {
 public:
  Weft(Way shared, Way network) : shared_(std::move(shared)), network_(std::move(network)) {}

  std::string_view name() const override { return "weft"; }
  std::vector<std::string> describe() const override {
    return {
        shared_.transport ? "between ranks that share a host: shm" : "no shm: " + shared_.why_not,
        network_.transport ? "between hosts: tcp" : "no tcp: " + network_.why_not};
  }
  bool reaches(DeviceType type) const override { return type == DeviceType::Host; }

  std::shared_ptr<Communicator> join(const JoinOptions& options) override {
    if (options.size == 1) return (shared_.transport ? shared_ : network_).transport->join(options);
    const std::string taken = agree(options, Deadline::in(options.timeout));
    const Way& chosen = taken == kShared ? shared_ : network_;
    if (!chosen.transport) {
      throw Error(Blame::Unsupported, "joining " + place_of(options, name()) +
                                          ": the ranks agreed on " + taken +
                                          ", which cannot be used on this rank: " + chosen.why_not);
    }
    auto joined = chosen.transport->join(options);
    tidy(options);
    return joined;
  }

 private:
  // Blocks until rank 0 has read all offers. Throws Timeout, naming the ranks that made none.
  std::string agree(const JoinOptions& options, Deadline deadline) {
    std::unique_ptr<Listener> listener;  // lives until rank 0 has checked that it can be reached
    options.store->set(offer_key(options.rank), bytes_of(offer(options, listener)));
    try {
      if (options.rank == 0) {
        const std::string decision = decide(options, deadline);
        options.store->set(kDecisionKey, bytes_of(decision));
        return decision;
      }
      const std::string decision = text_of(options.store->get(kDecisionKey, deadline));
      if (decision == kShared || decision == kNetwork) return decision;
      throw Error(
          Blame::PeerLost,
          "joining " + place_of(options, name()) +
              ": rank 0 chose a transport that this rank does not know; run the same version of "
              "Weft on all ranks");
    } catch (const Error& error) {
      if (error.blame() != Blame::Timeout) throw;
      throw Error(Blame::Timeout,
                  "joining " + place_of(options, name()) + ": not all ranks came within " +
                      ::weft::describe(options.timeout) + "; missing: rank " + missing(options));
    }
  }

  std::string offer(const JoinOptions& options, std::unique_ptr<Listener>& listener) {
    if (!shared_.transport) return kUnusable + shared_.why_not;
    try {
      listener = shared_.transport->connector()->listen(
          {.loop = options.loop,
           .interface_address = "",
           .accepted = [](std::shared_ptr<Connection> stranger) {
             stranger->close(Error(Blame::Cancelled, "this listener accepts no connections"));
           }});
      return kUsable + listener->address();
    } catch (const Error& error) {
      if (error.blame() == Blame::Busy) throw error.within("joining " + place_of(options, name()));
      return kUnusable + error.text();
    }
  }

  std::string decide(const JoinOptions& options, Deadline deadline) {
    std::string reason;
    for (int rank = 0; rank < options.size; ++rank) {
      const std::string offered = text_of(options.store->get(offer_key(rank), deadline));
      const auto why = why_not_shared(offered);
      if (why && reason.empty()) reason = "rank " + std::to_string(rank) + ": " + *why;
    }
    const char* const taken = reason.empty() ? kShared : kNetwork;
    log::info(
        "group '" + options.group_name + "' of " + std::to_string(options.size) + " ranks uses " +
        taken +
        (reason.empty() ? ", because all ranks share this host" : ", not shm (" + reason + ")"));
    return taken;
  }

  std::optional<std::string> why_not_shared(const std::string& offered) const {
    if (!shared_.transport) return shared_.why_not;
    if (offered.empty() || offered.front() != kUsable)
      return offered.substr(std::min<std::size_t>(1, offered.size()));
    return shared_.transport->connector()->why_unreachable(offered.substr(1));
  }

  static std::string missing(const JoinOptions& options) {
    std::string ranks;
    for (int rank = 0; rank < options.size; ++rank) {
      try {
        if (options.store->exists(offer_key(rank))) continue;
      } catch (const std::exception&) {  // a store that has ended says nothing about the rank
        continue;
      }
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    return ranks.empty() ? "0, which has not announced the chosen transport" : ranks;
  }

  // Erases the keys: all ranks have joined, so all have read them.
  static void tidy(const JoinOptions& options) noexcept {
    if (options.rank != 0) return;
    try {
      options.store->erase(kDecisionKey);
      for (int rank = 0; rank < options.size; ++rank) options.store->erase(offer_key(rank));
    } catch (const std::exception& error) {
      log::debug("group '" + options.group_name +
                 "': the store has already ended: " + error.what());
    }
  }

  const Way shared_, network_;
};

}  // namespace

Result<std::shared_ptr<Transport>> open() {
  Way shared, network;
  try {
    shared = way(kShared);
    network = way(kNetwork);
  } catch (const Error& error) {
    return error;
  }
  if (!shared.transport && !network.transport) {
    return Error(Blame::Unsupported, "neither shm (" + shared.why_not + ") nor tcp (" +
                                         network.why_not + ") can be used");
  }
  return std::shared_ptr<Transport>(std::make_shared<Weft>(std::move(shared), std::move(network)));
}

}  // namespace weft::transport::weft
