// Options::secret. Both ends of a connection prove that they know it before either reads anything
// else of the other; the bytes are in docs/wire.md.
//
//   connector                             listener
//   nonce c                           →
//                                     ←   nonce l, proof(listener, c, l)
//   proof(connector, c, l), and then
//   all that has waited               →
//
// The nonces are fresh, so what was overheard proves nothing later; the sides differ, so nobody's
// own proof can be sent back to him. What follows is neither encrypted nor signed.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include <weft/base/task.h>

namespace weft::rpc {

// Who connects gets a proof to try guesses on.
inline constexpr std::size_t kShortestSecret = 16;  // characters

using Nonce = std::array<std::byte, 32>;
using Proof = std::array<std::byte, 32>;

enum class Side : std::uint8_t { Connector = 1, Listener = 2 };

// Throws Busy where the system gives no random bytes.
Nonce make_nonce();
// HMAC-SHA-256 with the secret as its key.
Proof prove(std::string_view secret, Side side, const Nonce& of_connector,
            const Nonce& of_listener);
// Takes the same time wherever they differ. Other sizes are never the same.
bool is_same(const Proof& expected, std::span<const std::byte> shown);

// What a connector has to say waits here until the listener has proved itself, or the connection
// has ended, which fails whatever is sent: a call may be issued while that happens. Usable from
// every thread.
class Gate {
 public:
  // The connector's.
  const Nonce nonce = make_nonce();

  // Runs the task, or keeps it until open().
  void pass(Task task);
  void open();
  bool is_open() const { return open_; }

 private:
  std::mutex mutex_;
  std::atomic<bool> open_{false};
  std::vector<Task> waiting_;
};

}  // namespace weft::rpc
