// Where a device says what it has done: a queue that is polled, and an event channel whose
// descriptor becomes readable when something comes after arm(). One lane's own, so that nothing
// overflows. For one thread at a time.
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

  // Takes what has come, as much as there is room for; returns that part of `entries`. Throws
  // Device.
  std::span<const ibv_wc> poll(std::span<ibv_wc> entries);
  // From now on the descriptor tells of the next completion. What has come just before may go
  // untold: poll once more.
  bool arm() noexcept;
  // Takes the event that made the descriptor readable.
  void take_event() noexcept;

 private:
  const std::shared_ptr<Device> device_;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* queue_ = nullptr;
};

// What a completion that failed says about the lane: PeerLost where the peer or the way to it is at
// fault, in words and with the status as native_code(). `peer` names it.
Error error_of(const Library& library, const ibv_wc& completion, const std::string& peer);

}  // namespace weft::transport::verbs
