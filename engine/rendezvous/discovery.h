// Who takes part in a rendezvous by multicast: what processes announce, and how each finds, from
// what it hears, the same ranks and the same host for the store. No sockets, no clock of its own.
//
// Every process draws a nonce. Who has heard world_size processes announces the set it sees (a code
// of its nonces); a set is decided when all its members announce it. The lowest nonce hosts the
// store; ranks that nobody asked for are given out in the order of the nonces.
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
  Decided = 2,  // the sender goes on with the set that it announces
  Bye = 3,      // the sender takes part no more
};

struct Announcement {
  AnnouncementKind kind = AnnouncementKind::Here;
  std::uint64_t nonce = 0;
  int world_size = 1;
  std::optional<int> rank;  // where the process was given one
  int port = 0;  // where it listens for the store's clients (TCP), should it become the host
  std::uint64_t set =
      0;  // code of the set of processes it sees, itself included; 0 while that is not whole
  std::string group;  // the job's group_name
};

constexpr std::size_t kMaxAnnouncedName = 255;

// The datagram. A longer group name is cut.
std::string encode(const Announcement& announcement);
// Nothing for a datagram that is none; every field is checked.
std::optional<Announcement> decode(std::span<const char> datagram);

class DiscoveryState {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // Who has not been heard for so long has left.
  static constexpr auto kPatience = std::chrono::seconds(2);

  DiscoveryState(Announcement self, Time now);

  // Returns whether that was news, so that our own announcement should follow at once.
  bool hear(const Announcement& announcement, const std::string& from, Time now);
  // What to announce now.
  Announcement to_announce(Time now);

  bool decided() const { return !members_.empty(); }
  // Why this process cannot take part: ranks given twice, world sizes that differ, too many
  // processes.
  const std::optional<Error>& conflict() const { return conflict_; }

  // Once decided.
  int rank() const;
  bool hosts() const { return members_.begin()->first == self_.nonce; }
  const std::string& host_address() const { return members_.begin()->second.address; }
  int host_port() const { return members_.begin()->second.announced.port; }
  // For messages: the processes that are there, by address.
  std::string describe(Time now) const;

 private:
  struct Process {
    Announcement announced;
    std::string address;
    Time first;  // heard
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
  std::map<std::uint64_t, Processes> announced_;  // sets this process has announced, by code
  std::map<std::uint64_t, std::set<std::uint64_t>>
      finished_;  // sets without this process that were decided: nonces by code
  Processes members_;
  std::optional<Error> conflict_;
};

}  // namespace weft::group
