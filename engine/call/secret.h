// SPDX-License-Identifier: Apache-2.0
// Options::secret. Both ends of a connection prove that they know it before either reads anything
// else from the other. docs/wire.md has the bytes.
//
//   connector                             listener
//   nonce c                           →
//                                     ←   nonce l, proof(listener, c, l)
//   proof(connector, c, l), and then
//   all that has waited               →
//
// The nonces are fresh, so an overheard proof proves nothing later. The sides differ, so a proof
// cannot be sent back to its maker. The messages after that are neither encrypted nor signed.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/base/task.h>

namespace weft::call {

// A process that connects gets a proof on which it can try guesses.
inline constexpr std::size_t kShortestSecret = 16;  // bytes

using Nonce = std::array<std::byte, 32>;
using Proof = std::array<std::byte, 32>;

enum class Side : std::uint8_t { Connector = 1, Listener = 2 };

// Throws Busy if the system gives no random bytes.
Nonce make_nonce();
// HMAC-SHA-256 with the secret as its key.
Proof prove(std::string_view secret, Side side, const Nonce& of_connector,
            const Nonce& of_listener);
// Takes the same time wherever the two differ. False if the sizes differ.
bool is_same(const Proof& expected, std::span<const std::byte> shown);

// A connector's messages wait here until the listener has proved itself, or until the connection
// has ended: then sending them fails. So calls may be issued meanwhile. Usable from every thread.
class Gate {
 public:
  // The connector's nonce.
  const Nonce nonce = make_nonce();

  // Runs the task, or keeps it until open().
  void pass(Task task);
  void open();
  bool is_open() const { return open_; }

 private:
  Mutex mutex_;
  std::atomic<bool> open_{false};
  std::vector<Task> waiting_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
