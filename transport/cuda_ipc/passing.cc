// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstring>
#include <utility>

#include <weft/transport/cuda_ipc/passing.h>

namespace weft::transport::cuda_ipc {

namespace {

constexpr char kWho[] = "passing descriptors";
constexpr std::size_t kMostPassed = 1 << 16;  // that a peer may pass before it names them

using Words = std::array<std::byte, sizeof(std::uint64_t)>;

// Both ends are on one host, so the bytes are in its native order.
Words words_of(std::uint64_t allocation) {
  Words words;
  std::memcpy(words.data(), &allocation, sizeof allocation);
  return words;
}

}  // namespace

PassingEnd::PassingEnd() {
  try {
    listening_ = listen_for_this_user(kWho);
  } catch (const Error& error) {
    why_not_ = error.text();
  }
}

std::optional<std::string> PassingEnd::why_not(std::uint64_t process) {
  if (why_not_ || socket_) return why_not_;
  try {
    while (!socket_) {
      Descriptor found = accept_from(listening_.socket, kWho);
      if (!found) throw Error(Blame::PeerLost, "passing descriptors: the peer has not connected");
      // Other processes of this user may have connected first.
      if (check_peer(found, kWho) == static_cast<pid_t>(process)) socket_ = std::move(found);
    }
  } catch (const Error& error) {
    why_not_ = error.text();
  }
  listening_ = {};
  return why_not_;
}

PassingEnd::Outcome PassingEnd::pass(std::uint64_t allocation, const Descriptor& descriptor) {
  if (!socket_) return Outcome::Gone;
  try {
    return transport::pass(socket_, words_of(allocation), descriptor, kWho) ? Outcome::Passed
                                                                            : Outcome::Full;
  } catch (const Error& error) {
    why_not_ = error.text();
    socket_ = {};
    return Outcome::Gone;
  }
}

void PassingEnd::close() noexcept {
  listening_ = {};
  socket_ = {};
  if (!why_not_) why_not_ = "the connection has ended";
}

TakingEnd::TakingEnd(std::uint64_t process, std::uint32_t name) {
  auto connected = connect_to(static_cast<pid_t>(process), static_cast<int>(name), kWho);
  if (!connected)
    throw Error(Blame::Busy, "passing descriptors: too many connections to the peer's socket");
  if (check_peer(*connected, kWho) != static_cast<pid_t>(process)) {
    throw Error(Blame::PeerLost,
                "passing descriptors: another process than the peer has the socket now");
  }
  socket_ = std::move(*connected);
}

bool TakingEnd::take() {
  try {
    while (!is_over_) {
      Words words{};
      auto passed = take_passed(socket_, words, kWho);
      if (!passed) return true;
      std::uint64_t allocation = 0;
      std::memcpy(&allocation, words.data(), sizeof allocation);
      if (!*passed) break;
      passed_[allocation] = std::move(*passed);
      if (passed_.size() > kMostPassed) {
        throw Error(Blame::Protocol,
                    "the peer passed more than " + std::to_string(kMostPassed) + " descriptors");
      }
    }
  } catch (const Error& error) {
    failure_ = error;
  }
  is_over_ = true;
  return false;
}

Descriptor TakingEnd::find(std::uint64_t allocation) {
  const auto found = passed_.find(allocation);
  if (found == passed_.end()) return {};
  Descriptor descriptor = std::move(found->second);
  passed_.erase(found);
  return descriptor;
}

}  // namespace weft::transport::cuda_ipc
