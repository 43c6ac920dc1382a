// SPDX-License-Identifier: Apache-2.0
// Decides which processes take part in a rendezvous by multicast. From the announcements that it
// hears, each process concludes the same ranks and the same host of the store. Uses no sockets and
// no clock of its own.
//
// Every process draws a nonce. A process that has heard world_size processes announces the set that
// it sees (a code of their nonces). A set is decided when all its members announce it. The lowest
// nonce hosts the store. Ranks that no process was given are assigned in the order of the nonces.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <weft/base/error.h>

namespace weft::group {

enum class AnnouncementKind : std::uint8_t {
  Here = 1,
  Decided = 2,  // the sender has decided on the set that it announces
  Bye = 3,      // the sender no longer takes part
};

struct Announcement {
  AnnouncementKind kind = AnnouncementKind::Here;
  std::uint64_t nonce = 0;
  int world_size = 1;
  std::optional<int> rank;  // if the process was given one
  int port = 0;  // TCP port for clients of the store, should this process become the host
  // The code of the set of processes that it sees, itself included; 0 while that is incomplete.
  std::uint64_t set = 0;
  std::string group;  // the job's group_name
};

constexpr std::size_t kMaxAnnouncedName = 255;

// Makes the datagram. A longer group name is cut.
std::string encode(const Announcement& announcement);
// Checks every field; nullopt for a malformed datagram.
std::optional<Announcement> decode(std::span<const char> datagram);

class DiscoveryState {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // A process that has not been heard for this long has left.
  static constexpr auto kPatience = std::chrono::seconds(2);

  DiscoveryState(Announcement self, Time now);

  // Returns true for news, upon which this process should announce at once.
  bool hear(const Announcement& announcement, const std::string& from, Time now);
  // Returns the announcement to send now.
  Announcement to_announce(Time now);

  bool decided() const { return !members_.empty(); }
  // The reason why this process cannot take part: ranks given twice, different world sizes, or too
  // many processes.
  const std::optional<Error>& conflict() const { return conflict_; }

  // These require decided().
  int rank() const;
  bool hosts() const { return members_.begin()->first == self_.nonce; }
  const std::string& host_address() const { return members_.begin()->second.address; }
  int host_port() const { return members_.begin()->second.announced.port; }
  // The processes that are present, by address; for messages.
  std::string describe(Time now) const;

 private:
  struct Process {
    Announcement announced;
    std::string address;
    Time first;  // when it was first heard
    Time last;
  };
  using Processes = std::map<std::uint64_t, Process>;  // by nonce

  Processes present(Time now) const;
  void look_for_conflicts(Time now);
  void look_for_decision(Time now);
  void refuse(const std::string& why);

  Announcement self_;
  Time started_;
  Processes others_;
  std::map<std::uint64_t, Processes> announced_;  // sets that this process has announced, by code
  // Decided sets without this process: the nonces that announced them, by code.
  std::map<std::uint64_t, std::set<std::uint64_t>> finished_;
  Processes members_;
  std::optional<Error> conflict_;
};

}  // namespace weft::group
