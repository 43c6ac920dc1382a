// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include <weft/engine/rendezvous/discovery.h>

namespace weft::group {

namespace {

constexpr std::uint32_t kMagic = 0x314d4657;  // "WFM1"
constexpr int kMaxWorld = 1 << 20;
constexpr std::size_t kMaxSets = 64;  // of other processes, and of our own, that are remembered

struct Head {
  std::uint32_t magic;
  std::uint8_t kind;
  std::uint8_t group_bytes;
  std::uint16_t port;
  std::int32_t world_size;
  std::int32_t rank;  // -1 = not given
  std::uint64_t nonce;
  std::uint64_t set;
};
static_assert(sizeof(Head) == 32);

// FNV-1a over the nonces; never 0.
template <class Processes>
std::uint64_t code_of(const Processes& processes) {
  std::uint64_t code = 0xcbf29ce484222325;
  for (const auto& [nonce, process] : processes) {
    for (int shift = 0; shift < 64; shift += 8)
      code = (code ^ ((nonce >> shift) & 0xff)) * 0x100000001b3;
  }
  return code == 0 ? 1 : code;
}

}  // namespace

std::string encode(const Announcement& announcement) {
  Head head{};
  head.magic = kMagic;
  head.kind = static_cast<std::uint8_t>(announcement.kind);
  head.group_bytes =
      static_cast<std::uint8_t>(std::min(announcement.group.size(), kMaxAnnouncedName));
  head.port = static_cast<std::uint16_t>(announcement.port);
  head.world_size = announcement.world_size;
  head.rank = announcement.rank.value_or(-1);
  head.nonce = announcement.nonce;
  head.set = announcement.set;
  std::string datagram(sizeof head, '\0');
  std::memcpy(datagram.data(), &head, sizeof head);
  return datagram.append(announcement.group, 0, head.group_bytes);
}

std::optional<Announcement> decode(std::span<const char> datagram) {
  Head head{};
  if (datagram.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, datagram.data(), sizeof head);
  const bool known = head.kind >= static_cast<std::uint8_t>(AnnouncementKind::Here) &&
                     head.kind <= static_cast<std::uint8_t>(AnnouncementKind::Bye);
  if (head.magic != kMagic || !known || datagram.size() != sizeof head + head.group_bytes)
    return std::nullopt;
  if (head.nonce == 0 || head.port == 0 || head.world_size < 1 || head.world_size > kMaxWorld)
    return std::nullopt;
  if (head.rank < -1 || head.rank >= head.world_size) return std::nullopt;
  Announcement announcement;
  announcement.kind = static_cast<AnnouncementKind>(head.kind);
  announcement.nonce = head.nonce;
  announcement.world_size = head.world_size;
  if (head.rank >= 0) announcement.rank = head.rank;
  announcement.port = head.port;
  announcement.set = head.set;
  announcement.group.assign(datagram.data() + sizeof head, head.group_bytes);
  return announcement;
}

DiscoveryState::DiscoveryState(Announcement self, Time now)
    : self_(std::move(self)), started_(now) {
  look_for_decision(now);
}

bool DiscoveryState::hear(const Announcement& announcement, const std::string& from, Time now) {
  if (announcement.group != self_.group || announcement.nonce == self_.nonce || decided() ||
      conflict_)
    return false;
  if (announcement.kind == AnnouncementKind::Bye) return others_.erase(announcement.nonce) > 0;
  if (announcement.world_size != self_.world_size) {
    refuse("the process at " + from + " gives the world size " +
           std::to_string(announcement.world_size) + ", this one gives " +
           std::to_string(self_.world_size));
    return true;
  }
  if (announcement.kind == AnnouncementKind::Decided) {
    const auto ours = announced_.find(announcement.set);
    if (ours == announced_.end()) {
      // Another set, which goes on without this process. If it contains an earlier life of this
      // very process, only some of its members are heard.
      if (finished_.size() > kMaxSets) finished_.clear();
      auto& nonces = finished_[announcement.set];
      nonces.insert(announcement.nonce);
      if (static_cast<int>(nonces.size()) >= self_.world_size) {
        refuse(std::to_string(self_.world_size) +
               " other processes have joined already; this one is too many");
      }
      return others_.erase(announcement.nonce) > 0;
    }
    // The sender has heard every member, this process too, announce the set.
    members_ = ours->second;
    return true;
  }
  const std::size_t bound = 4 * static_cast<std::size_t>(self_.world_size) + 64;
  const auto [place, is_new] = others_.try_emplace(announcement.nonce);
  if (is_new && others_.size() > bound) {
    others_.erase(place);
    return false;
  }
  Process& process = place->second;
  const bool news = is_new || process.announced.set != announcement.set;
  process.announced = announcement;
  process.address = from;
  process.last = now;
  if (is_new) process.first = now;
  look_for_conflicts(now);
  look_for_decision(now);
  return news;
}

DiscoveryState::Processes DiscoveryState::present(Time now) const {
  Processes all;
  all[self_.nonce] = {self_, "", started_, now};
  for (const auto& [nonce, process] : others_) {
    if (now - process.last < kPatience) all.emplace(nonce, process);
  }
  return all;
}

void DiscoveryState::look_for_conflicts(Time now) {
  std::map<int, std::string> takers;
  if (self_.rank) takers[*self_.rank] = "this process";
  Time newest = started_;
  for (const auto& [nonce, process] : present(now)) {
    newest = std::max(newest, process.first);
    if (nonce == self_.nonce || !process.announced.rank) continue;
    const auto [taker, is_first] =
        takers.emplace(*process.announced.rank, "the one at " + process.address);
    if (is_first) continue;
    return refuse("rank " + std::to_string(taker->first) + " is given to " + taker->second +
                  " and to the process at " + process.address);
  }
  // Only processes that were heard after the newest one came are certainly still present.
  int there = 1;
  for (const auto& [nonce, process] : others_) there += process.last >= newest ? 1 : 0;
  if (there > self_.world_size) {
    refuse(std::to_string(there) + " processes came to a world of " +
           std::to_string(self_.world_size));
  }
}

void DiscoveryState::look_for_decision(Time now) {
  if (conflict_) return;
  Processes all = present(now);
  if (all.size() != static_cast<std::size_t>(self_.world_size)) return;
  const std::uint64_t code = code_of(all);
  for (const auto& [nonce, process] : all) {
    if (nonce != self_.nonce && process.announced.set != code) return;
  }
  members_ = std::move(all);
}

Announcement DiscoveryState::to_announce(Time now) {
  Announcement announcement = self_;
  Processes all = decided() ? members_ : present(now);
  if (all.size() == static_cast<std::size_t>(self_.world_size)) {
    announcement.set = code_of(all);
    if (announced_.size() > kMaxSets) announced_.clear();
    announced_[announcement.set] = std::move(all);
  }
  if (decided()) announcement.kind = AnnouncementKind::Decided;
  return announcement;
}

int DiscoveryState::rank() const {
  std::set<int> taken;
  for (const auto& [nonce, process] : members_) {
    if (process.announced.rank) taken.insert(*process.announced.rank);
  }
  int next = 0;
  for (const auto& [nonce, process] : members_) {
    while (taken.contains(next)) ++next;
    if (nonce == self_.nonce) return self_.rank.value_or(next);
    if (!process.announced.rank) ++next;
  }
  return next;
}

std::string DiscoveryState::describe(Time now) const {
  const Processes all = present(now);
  std::string text =
      std::to_string(all.size()) + " of " + std::to_string(self_.world_size) + " processes";
  std::string separator = " (this one, ";
  for (const auto& [nonce, process] : all) {
    if (nonce == self_.nonce) continue;
    text += separator + process.address;
    separator = ", ";
  }
  return separator == ", " ? text + ")" : text + " (this one)";
}

void DiscoveryState::refuse(const std::string& why) {
  if (!conflict_) conflict_ = Error(Blame::Caller, why);
}

}  // namespace weft::group
