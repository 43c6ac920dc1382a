// SPDX-License-Identifier: Apache-2.0
// Accepts the connections of other ranks at this rank's port. Used on the job's loop only; nothing
// blocks. Ends when the last owner drops it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include <weft/base/descriptor.h>
#include <weft/base/end_of_process.h>
#include <weft/base/event_loop.h>

namespace weft::group {

class Door : public std::enable_shared_from_this<Door> {
 public:
  // `whose` names this rank in a warning.
  Door(std::shared_ptr<EventLoop> loop, Descriptor listening, std::string whose)
      : loop_(std::move(loop)),
        listening_(std::move(listening)),
        end_of_process_(listening_.get()),
        whose_(std::move(whose)) {}

  // Calls `comes` with each connection from now on. If the process lacks what it needs, calls
  // `makes_room` first, which returns true if it has closed another connection.
  void open(std::function<void(Descriptor)> comes, std::function<bool()> makes_room = {});
  // Connections wait in the kernel from now on, until this object ends.
  void close();
  // Warns from now on if the process lacks what a connection needs.
  void warn() { warns_ = true; }
  // errno of the last accept() if it failed for lack of resources, else 0. Any thread may ask.
  int lacks() const { return lacks_; }

 private:
  void watch();
  void accept();

  const std::shared_ptr<EventLoop> loop_;
  const Descriptor listening_;
  const EndOfProcess end_of_process_;
  const std::string whose_;
  std::function<void(Descriptor)> comes_;
  std::function<bool()> makes_room_;
  EventLoop::Registration accepting_;
  EventLoop::Registration resting_;  // a timer that runs instead of accepting
  bool warns_ = false;
  std::atomic<int> lacks_{0};
};

}  // namespace weft::group
