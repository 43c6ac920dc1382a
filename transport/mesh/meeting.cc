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
  Table table{random_token(), {}, {own}, {}};
  for (int rank = 1; rank < options_.size; ++rank) {
    auto address = address_of(rank, deadline);
    if (!address) {
      const Error why = address.error().within("rank " + std::to_string(rank) + " cannot join");
      options_.store->set(kTableKey, encode_refusal(why.text()));
      throw why.with_ranks({rank});
    }
    const std::string transport = connector.transport_to(address.value());
    if (rank == 1) table.transport = transport;
    if (table.transport != transport) table.transport.clear();
    table.addresses.push_back(std::move(address).value());
  }
  table.hosts = hosts_of(table.addresses, connector);
  return table;
}

// An error says why the rank cannot join.
Result<std::string> Meeting::address_of(int rank, Deadline deadline) const {
  try {
    const auto value = options_.store->get(address_key(rank), deadline);
    if (const auto why = why_locked(value, rank)) return *why;
    return decode_address(value);
  } catch (const Error& error) {
    if (error.blame() != Blame::Caller) throw;
    return error;  // of a SignedBootstrap
  }
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
  if (options_.rank != 0 || options_.size == 1) return;
  try {
    options_.store->erase(kTableKey);
    for (int rank = 0; rank < options_.size; ++rank) options_.store->erase(address_key(rank));
  } catch (const std::exception& error) {
    log::debug(place_ + ": the store was already closed: " + error.what());
  }
}

}  // namespace weft::transport::mesh
