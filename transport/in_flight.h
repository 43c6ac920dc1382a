// The operations of a device communicator that are enqueued on one stream and not yet done there. Nobody on the host is
// told when an event passes, so the loop looks at the oldest of them in every turn: when it is done, its Op is finished and
// its Pin let go.
//
// A part of its owner, whom the loop keeps alive while anything is in flight: a communicator may be dropped with operations
// under way. Usable from every thread.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <weft/base/event_loop.h>
#include <weft/base/op.h>
#include <weft/cuda/device.h>

namespace weft::transport {

class InFlight {
 public:
  struct Operation {
    std::string name;       // "all_reduce", for messages
    Completion completion;  // its fence is `done`
    Pin pin;                // held until `done` has passed, also when the operation has failed before
    Fence ready;            // what the stream waits for before it starts
    Fence done;             // a recorded event; the operations pass in the order in which they were added
  };
  struct Oldest {
    std::string name;
    Deadline::Clock::time_point since;  // when it was ready, and everything before it done
  };
  // Called on the loop in every turn while an operation that is ready is under way.
  using Watch = std::function<void(const Oldest&)>;

  InFlight(std::shared_ptr<cuda::Device> device, const std::shared_ptr<EventLoop>& loop, Watch watch = {});
  // What is still under way (its loop has ended) fails; its memory is retired until the device has done with it.
  ~InFlight();
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // `owner` has this object as a part.
  void add(Operation operation, std::shared_ptr<const void> owner);
  // Fails every Op under way. Their fences pass, and their pins are let go, when the stream gets there.
  void fail(const Error& why) noexcept;
  bool empty() const;

 private:
  struct Entry {
    Operation operation;
    std::optional<Deadline::Clock::time_point> since;
  };
  std::optional<Fence> first() const;
  // Only on the loop, so nobody else takes entries away.
  bool turn();

  std::shared_ptr<cuda::Device> device_;
  std::weak_ptr<EventLoop> loop_;
  Watch watch_;
  mutable std::mutex mutex_;
  std::deque<Entry> entries_;
  EventLoop::Registration watcher_;  // while there are entries
};

}  // namespace weft::transport
