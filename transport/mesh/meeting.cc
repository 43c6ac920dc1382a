// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <map>

#include <sys/random.h>

#include <weft/base/config.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/transport/mesh/meeting.h>
#include <weft/transport/signed_bootstrap.h>

namespace weft::transport::mesh {

namespace {

constexpr const char* kTableKey = "mesh/table";
// How long rank 0 waits for all, before it looks at those that have come.
constexpr auto kFirstPatience = std::chrono::seconds(1);
std::string address_key(int rank) { return "mesh/address/" + std::to_string(rank); }

Token random_token() {
  Token token;
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    throw system_error(Blame::Busy, "no random numbers for the group's token", errno);
  }
  return token;
}

}  // namespace

Meeting::Meeting(const JoinOptions& options, std::string place)
    : options_(options), place_(std::move(place)) {}

Table Meeting::hold(const std::string& address, const Connector& connector,
                    Deadline deadline) const {
  try {
    if (address.size() > kMaxAddress)
      throw Error(Blame::Unsupported, "the address of this rank is longer than " +
                                          std::to_string(kMaxAddress) + " bytes");
    options_.store->set(address_key(options_.rank), encode_address(address));
    if (options_.rank == 0) {
      const Table table = collect(address, connector, deadline);
      options_.store->set(kTableKey, encode(table));
      return table;
    }
    const auto value = options_.store->get(kTableKey, deadline);
    if (const auto why = why_locked(value, 0)) throw Error(*why);
    auto table = decode_table(value, options_.size);
    if (!table) throw table.error();
    return std::move(table).value();
  } catch (const Error& error) {
    if (error.blame() == Blame::Timeout) throw why_late();
    throw error.within(place_);
  }
}

Table Meeting::collect(const std::string& own, const Connector& connector,
                       Deadline deadline) const {
  std::vector<std::string> keys;
  for (int rank = 1; rank < options_.size; ++rank) keys.push_back(address_key(rank));
  std::vector<std::string> others;
  for (auto patience = kFirstPatience;; patience *= 2) {
    try {
      others = read(keys, Deadline::sooner(deadline, Deadline::in(patience)));
      break;
    } catch (const Error& error) {
      if (error.blame() != Blame::Timeout || deadline.passed()) throw;
    }
    look_at_first(keys);
  }
  Table table{random_token(), connector.transport_to(others.front()), {own}, {}};
  for (std::string& address : others) {
    if (connector.transport_to(address) != table.transport) table.transport.clear();
    table.addresses.push_back(std::move(address));
  }
  table.hosts = hosts_of(table.addresses, connector);
  return table;
}

// Refuses a rank that cannot join, if all ranks before it have come.
void Meeting::look_at_first(std::vector<std::string> keys) const {
  // The first `come` ranks have come, and not all of the first `more`.
  std::size_t come = 0;
  for (std::size_t more = keys.size(); more - come > 1;) {
    const std::size_t middle = come + (more - come) / 2;
    const std::vector<std::string> half(keys.begin() + static_cast<std::ptrdiff_t>(come),
                                        keys.begin() + static_cast<std::ptrdiff_t>(middle));
    (exist(*options_.store, half) ? come : more) = middle;
  }
  keys.resize(come);
  if (!keys.empty()) static_cast<void>(read(keys, Deadline::in(kFirstPatience)));
}

// Reads the addresses of the ranks from 1 on. Refuses a rank that cannot join.
std::vector<std::string> Meeting::read(const std::vector<std::string>& keys,
                                       Deadline deadline) const {
  std::vector<std::string> addresses;
  const auto refuse = [&](const Error& cause) {
    const int rank = static_cast<int>(addresses.size()) + 1;
    const Error why = cause.within("rank " + std::to_string(rank) + " cannot join");
    options_.store->set(kTableKey, encode_refusal(why.text()));
    throw why.with_ranks({rank});
  };
  const auto take = [&](const Bootstrap::Bytes& value) {
    if (const auto why = why_locked(value, static_cast<int>(addresses.size()) + 1)) refuse(*why);
    auto address = decode_address(value);
    if (!address) refuse(address.error());
    addresses.push_back(std::move(address).value());
  };
  std::vector<Bootstrap::Bytes> values;
  try {
    values = get_all(*options_.store, keys, deadline);
  } catch (const Error& error) {
    if (error.blame() != Blame::Caller) throw;  // of a SignedBootstrap, which names no rank
  }
  for (const auto& value : values) take(value);
  if (!values.empty()) return addresses;
  for (const std::string& key : keys) {
    std::optional<Error> why;
    Bootstrap::Bytes value;
    try {
      value = options_.store->get(key, deadline);
    } catch (const Error& error) {
      if (error.blame() != Blame::Caller) throw;
      why = error;
    }
    if (why) refuse(*why);
    take(value);
  }
  return addresses;
}

std::optional<Error> Meeting::why_locked(const Bootstrap::Bytes& value, int writer) const {
  if (!options_.secret.empty() || !is_signed(value)) return std::nullopt;
  return Error(Blame::Caller, "rank " + std::to_string(writer) + " was given a secret, and rank " +
                                  std::to_string(options_.rank) +
                                  " none: give all ranks the same ProcessGroupOptions::secret, or "
                                  "none")
      .with_ranks({writer});
}

// Rank 0 decides for all, so its environment counts, and all ranks see the same hosts.
std::vector<std::uint32_t> Meeting::hosts_of(const std::vector<std::string>& addresses,
                                             const Connector& connector) const {
  std::vector<std::uint32_t> hosts(addresses.size(), 0);
  if (config().hierarchy == Hierarchy::Off) return hosts;
  std::map<std::string, std::uint32_t> numbers;
  for (std::size_t rank = 0; rank < addresses.size(); ++rank) {
    const auto number = static_cast<std::uint32_t>(numbers.size());
    hosts[rank] = numbers.emplace(connector.host_of(addresses[rank]), number).first->second;
  }
  if (const auto unknown = numbers.find(""); unknown != numbers.end()) {
    const auto rank = std::find(hosts.begin(), hosts.end(), unknown->second) - hosts.begin();
    if (numbers.size() > 1) {
      log::debug(place_ + ": collectives are done in one level, because rank 0 does not know, or " +
                 "cannot reach through shared memory, the host of rank " + std::to_string(rank));
    }
    return std::vector<std::uint32_t>(addresses.size(), 0);
  }
  return hosts;
}

Error Meeting::why_late() const {
  std::vector<int> absent;
  for (int rank = 0; rank < options_.size; ++rank) {
    try {
      if (!options_.store->exists(address_key(rank))) absent.push_back(rank);
    } catch (const std::exception&) {  // a closed store tells nothing about the rank
    }
  }
  return Error(Blame::Timeout,
               place_ + ": not all ranks joined within " + weft::describe(options_.timeout) +
                   (absent.empty() ? "; rank 0 has not published the ranks' addresses"
                                   : "; missing: " + ranks_text(absent)))
      .with_ranks(absent.empty() ? std::vector{0} : absent);
}

void Meeting::tidy() const noexcept {
  if (options_.rank != 0 || options_.size == 1 || ends_with_job(*options_.store)) return;
  try {
    options_.store->erase(kTableKey);
    for (int rank = 0; rank < options_.size; ++rank) options_.store->erase(address_key(rank));
  } catch (const std::exception& error) {
    log::debug(place_ + ": the store was already closed: " + error.what());
  }
}

}  // namespace weft::transport::mesh
