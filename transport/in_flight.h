// The operations of a device communicator that are enqueued on one stream and not yet done there.
// Nobody on the host is told when an event passes, so the loop looks at the oldest of them every
// few microseconds: when it is done, its Op is finished and its Pin let go. When all are, the loop
// goes on looking for a little: whoever enqueues one operation behind the other need not wake it
// for each.
//
// A part of its owner, whom the loop keeps alive while anything is in flight: a communicator may be
// dropped with operations under way. Usable from every thread.
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
    Pin pin;      // held until `done` has passed, also when the operation has failed before
    Fence ready;  // what the stream waits for before it starts
    Fence done;   // a recorded event; the operations pass in the order in which they were added
    // Not on the stream yet: asking `done` is what moves it on, so the loop does in every turn.
    bool in_line = false;
    // `done` passes only when that of the operation added before has: one event of the stream
    // behind another. Of many such only a few are asked.
    bool is_behind = false;
  };
  struct Oldest {
    std::string name;
    Deadline::Clock::time_point since;  // when it was ready, and everything before it done
  };
  // Called on the loop whenever it looks, while an operation that is ready is under way.
  using Watch = std::function<void(const Oldest&)>;

  // To ask the driver takes about a microsecond and its locks, which whoever enqueues wants as
  // well.
  static constexpr auto kBetweenLooks = std::chrono::microseconds(4);

  InFlight(std::shared_ptr<cuda::Device> device, const std::shared_ptr<EventLoop>& loop,
           Watch watch = {}, std::chrono::microseconds between_looks = kBetweenLooks);
  // Its loop has ended. What has passed meanwhile is finished; what is still under way fails, and
  // its memory is retired until the device has done with it.
  ~InFlight();
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // `owner` has this object as a part.
  void add(Operation operation, std::shared_ptr<const void> owner);
  // Fails every Op under way. Their fences pass, and their pins are let go, when the stream gets
  // there.
  void fail(const Error& why) noexcept;
  // Whether all have passed, of which the loop may not know yet.
  bool passed() const;

 private:
  struct Entry {
    Operation operation;
    std::optional<Deadline::Clock::time_point> since;
  };
  static void end(Completion& completion, const std::optional<Error>& lost) noexcept;
  // What the loop keeps alive: the owner, or nobody while nothing is in flight.
  struct Kept {
    std::shared_ptr<const void> owner;
  };

  // What follows, on the loop only, so nobody else takes entries away.

  // How many at the front have passed.
  std::size_t count_passed() const;
  // Where those end that pass one behind the other, from this one on.
  std::size_t end_of_row(std::size_t from) const;
  // False where there is none.
  bool has_passed(std::size_t which) const;
  bool turn(Kept& kept);
  // Where nothing is in flight: lets go of the owner, and some time later of the loop.
  void rest(Kept& kept, Deadline::Clock::time_point now);

  std::shared_ptr<cuda::Device> device_;
  std::weak_ptr<EventLoop> loop_;
  const Watch watch_;
  const std::chrono::microseconds between_looks_;
  mutable std::mutex mutex_;
  std::deque<Entry> entries_;
  std::weak_ptr<Kept> kept_;                    // the watcher's
  EventLoop::Registration watcher_;             // while there are entries, and a little longer
  Deadline::Clock::time_point idle_;            // since when there are none
  Deadline::Clock::time_point next_look_ = {};  // the loop's
};

}  // namespace weft::transport
