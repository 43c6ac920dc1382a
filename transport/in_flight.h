// SPDX-License-Identifier: Apache-2.0
// The operations of a device communicator that are enqueued on one stream and not yet done. No
// callback tells the host when an event passes, so the loop polls the oldest one every few
// microseconds: when it is done, InFlight finishes its Op and releases its Pin. When all are done
// the loop goes on polling for a short time, so that a caller who enqueues one operation after
// another need not wake it for each.
//
// A member of its owner. The loop keeps the owner alive while anything is in flight: a communicator
// may be dropped with operations under way. Thread-safe.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/base/op.h>
#include <weft/cuda/device.h>

namespace weft::transport {

class InFlight {
 public:
  struct Operation {
    std::string name;       // "all_reduce", for messages
    Completion completion;  // its fence is `done`
    Pin pin;                // held until `done` has passed, even if the operation has failed before
    Fence ready;            // the stream waits for this before it starts
    Fence done;  // a recorded event; the operations pass in the order in which they were added
    // True if the operation is not on the stream yet. Polling `done` advances it, so the loop
    // polls in every turn.
    bool in_line = false;
    // True if `done` passes only after that of the operation added before it: both are events of
    // one stream. The loop then polls only a few of many such operations.
    bool is_behind = false;
  };
  struct Oldest {
    std::string name;
    Deadline::Clock::time_point since;  // when it was ready and everything before it done
  };
  // Called on the loop at each poll, while the oldest operation is ready and not done.
  using Watch = std::function<void(const Oldest&)>;

  // A poll of the driver takes about a microsecond and its locks, which threads that enqueue need
  // too.
  static constexpr auto kBetweenLooks = std::chrono::microseconds(4);

  InFlight(std::shared_ptr<cuda::Device> device, const std::shared_ptr<EventLoop>& loop,
           Watch watch = {}, std::chrono::microseconds between_looks = kBetweenLooks);
  // Called when the loop has ended. Finishes the operations that have passed; fails the others and
  // retires their memory until the device no longer uses it.
  ~InFlight();
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // `owner` contains this object.
  void add(Operation operation, std::shared_ptr<const void> owner);
  // Fails every Op under way. Their fences pass, and their pins are released, when the stream gets
  // there.
  void fail(const Error& why) noexcept;
  // True if all operations have passed, even if the loop has not noticed yet.
  bool passed() const;

 private:
  struct Entry {
    Operation operation;
    std::optional<Deadline::Clock::time_point> since;
  };
  static void end(Completion& completion, const std::optional<Error>& lost) noexcept;
  // Keeps the owner alive for the loop; null while nothing is in flight.
  struct Kept {
    std::shared_ptr<const void> owner;
  };

  // The following functions run on the loop only, so no other thread removes entries.

  // Returns how many operations at the front have passed.
  std::size_t count_passed() const;
  // Returns the end of the row of operations that begins at `from` and pass one after the other.
  std::size_t end_of_row(std::size_t from) const;
  // False if there is no such operation.
  bool has_passed(std::size_t which) const;
  bool turn(Kept& kept);
  // If nothing is in flight: releases the owner, and some time later stops polling.
  void rest(Kept& kept, Deadline::Clock::time_point now);

  std::shared_ptr<cuda::Device> device_;
  std::weak_ptr<EventLoop> loop_;
  const Watch watch_;
  const std::chrono::microseconds between_looks_;
  mutable Mutex mutex_;
  std::deque<Entry> entries_ WEFT_GUARDED_BY(mutex_);
  std::weak_ptr<Kept> kept_ WEFT_GUARDED_BY(mutex_);  // owned by watcher_'s poller
  // Set while there are entries, and a little longer.
  EventLoop::Registration watcher_ WEFT_GUARDED_BY(mutex_);
  Deadline::Clock::time_point idle_ WEFT_GUARDED_BY(mutex_);  // since when there are no entries
  Deadline::Clock::time_point next_look_ = {};                // used on the loop only
};

}  // namespace weft::transport
