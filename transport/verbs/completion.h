// SPDX-License-Identifier: Apache-2.0
// The completion queue of one connection, which is polled, and its event channel, whose descriptor
// becomes readable when a completion arrives after arm(). Connections do not share it, so that it
// cannot overflow. Used by one thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include <weft/transport/verbs/device.h>

namespace weft::transport::verbs {

class Completions {
 public:
  // Throws Busy.
  Completions(std::shared_ptr<Device> device, int entries);
  ~Completions();
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  ibv_cq* queue() const { return queue_; }
  int descriptor() const { return channel_->fd; }

  // Moves completions into `entries` and returns the part that was filled. Throws Device.
  std::span<const ibv_wc> poll(std::span<ibv_wc> entries);
  // Makes the descriptor readable at the next completion. It may not report completions that
  // arrived just before, so poll once more after this. Returns false if the device refuses.
  bool arm() noexcept;
  // Consumes the event that made the descriptor readable.
  void take_event() noexcept;

 private:
  const std::shared_ptr<Device> device_;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* queue_ = nullptr;
};

// Returns the connection's error for a failed completion: Device for a local failure, PeerLost if
// the peer or the network is at fault. native_code() is the status. `peer` names the peer in the
// text.
Error error_of(const Library& library, const ibv_wc& completion, const std::string& peer);

}  // namespace weft::transport::verbs
