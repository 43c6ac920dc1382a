// What staging through pinned memory is made of: the GPUs of a process with what lanes share there
// (Stage), the pinned chunks of one lane's direction (Chunks), and a stream that copies between
// those and a GPU (CopyStream). Usable from every thread.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/op.h>
#include <weft/base/task.h>
#include <weft/cuda/device.h>
#include <weft/cuda/event.h>
#include <weft/cuda/flag_pool.h>
#include <weft/cuda/pinned.h>
#include <weft/cuda/span.h>
#include <weft/cuda/stream.h>
#include <weft/transport/connection.h>
#include <weft/transport/in_flight.h>

namespace weft::transport::staged {

// The GPUs whose memory lanes of this process carry; one for all lanes. Without a GPU it carries
// nothing, but its lanes understand those of a peer that has one.
class Stage {
 public:
  // Blocks for a moment: takes pinned memory and makes the first copies, for which the driver loads
  // kernels of its own. Throws Device, Unsupported (a GPU without stream memory operations), Busy,
  // Timeout.
  explicit Stage(std::vector<std::shared_ptr<cuda::Device>> devices);

  const std::vector<std::shared_ptr<cuda::Device>>& devices() const { return devices_; }
  // Why this memory cannot be carried; nothing where it can.
  std::optional<std::string> why_not(const Slice& slice) const;
  // One of them, by its number.
  cuda::Device& device(int index) const;
  // Whether a GPU of theirs is lost: its fences count as passed, but nothing has been done.
  std::optional<Error> why_lost(std::span<const Slice> slices) const;
  // Only where there is a GPU.
  cuda::PinnedPool& pinned() { return *pinned_; }
  cuda::FlagPool& flags() { return *flags_; }

 private:
  void warm_up(cuda::Device& device);

  std::vector<std::shared_ptr<cuda::Device>> devices_;
  std::optional<cuda::PinnedPool> pinned_;  // portable: all GPUs see it
  std::optional<cuda::FlagPool> flags_;
};

// Which of some slices on GPUs a lane of host memory moves by its network (Connection::reach).
struct Reached {
  std::vector<bool> which;
  std::vector<Pin> pins;  // of those

  bool operator[](std::size_t index) const { return index < which.size() && which[index]; }
  // That pin and these, which move into it.
  Pin join_pins(Pin other);
};
// The lane says by itself, once, why it does not; where it has ended, or the GPU is lost, what
// follows fails.
Reached reach_with(Connection& lane, const Stage& stage, std::span<const Slice> slices);

// Pinned blocks of kChunkBytes. Taken from the pool at once, because a pool that grows may wait for
// the whole device.
class Chunks : public std::enable_shared_from_this<Chunks> {
 public:
  // Given back with its last reference.
  using Lease = std::shared_ptr<const Slice>;

  Chunks(Stage& stage, std::size_t chunks);
  // Null where all are taken: then `again` runs, once, when one comes back, on the thread that
  // brings it. All who wait are told; who comes too late for that one asks again.
  Lease take(Task again);

 private:
  void give_back(std::size_t index) noexcept;

  std::vector<cuda::PinnedMemory> blocks_;
  std::mutex mutex_;  // of what follows
  std::vector<std::size_t> free_;
  std::vector<Task> waiting_;
};

// A Completion that fails with its last reference if nobody has ended it: the loop that was to do
// so has ended.
std::shared_ptr<Completion> ending_of(Completion completion, std::string name);

// An operation of several parts: counts those that have not ended, and one for those that are still
// to begin. The first error fails it at once.
class Landing {
 public:
  explicit Landing(std::shared_ptr<Completion> completion) : completion_(std::move(completion)) {}

  Op op() const { return completion_->op(); }
  void begin_part() { parts_.fetch_add(1, std::memory_order_relaxed); }
  void end_part(const std::optional<Error>& error) {
    if (error) completion_->fail(*error);
    if (parts_.fetch_sub(1, std::memory_order_acq_rel) == 1) completion_->finish();
  }
  void fail(const Error& why) { completion_->fail(why); }

 private:
  std::shared_ptr<Completion> completion_;
  std::atomic<std::size_t> parts_{1};
};

struct Copy {
  Slice to;
  Slice from;
};

// What the timeline shows of copies that the stream makes one after the other, all in one
// direction: "copy to host", "copy to device", or "copy" from GPU to GPU, with their bytes. None
// where there is nothing to copy. Ends as a cuda::Span does.
cuda::Span show(const cuda::StreamRef& stream, std::span<const Copy> copies,
                int rank = -1) noexcept;

// One lane's copies to or from one GPU, in order.
class CopyStream {
 public:
  using Copy = staged::Copy;

  CopyStream(std::shared_ptr<cuda::Device> device, cuda::FlagPool& flags,
             const std::shared_ptr<EventLoop>& loop);

  int device() const { return device_->index(); }
  // Enqueues the copies behind `ready`. The Op ends on the loop when they are made, or with the
  // error of the GPU; where they cannot be enqueued it is a failed one. The pin is held as long as
  // the GPU may touch the memory, also when the Op has failed before. `owner` has this object as a
  // part. The stream waits for the event as well, where one is given.
  Op run(const std::string& name, std::vector<Copy> copies, Pin pin, const Fence& ready,
         const std::shared_ptr<const void>& owner,
         std::optional<cuda::EventRef> after = std::nullopt) noexcept;
  // From now on run() fails with this; does not return while another thread is inside of it.
  void close(const Error& why);
  // Fails what is under way.
  void fail(const Error& why) noexcept;

 private:
  Op enqueue(const std::string& name, const std::vector<Copy>& copies, const Pin& pin,
             const std::shared_ptr<const void>& owner);
  // Under the mutex.
  struct Later {
    std::string name;
    std::vector<Copy> copies;
    Pin pin;
    std::optional<cuda::EventRef> after;
    std::shared_ptr<Completion> completion;
  };
  Op enqueue_later(Later later, const Fence& ready, const std::shared_ptr<const void>& owner);
  bool waits_for(const Fence& ready);
  void run_later(std::uint64_t key, const std::shared_ptr<const void>& owner);

  std::shared_ptr<cuda::Device> device_;
  cuda::FlagPool& flags_;
  std::weak_ptr<EventLoop> loop_;
  std::mutex mutex_;  // of the order on the stream
  std::optional<Error> closed_;
  std::map<std::uint64_t, Later> later_;  // what waits for flags that no stream can see
  std::uint64_t next_later_ = 0;
  cuda::Stream stream_;
  InFlight in_flight_;
};

// One lane's copies in one direction: a CopyStream for each GPU of the stage, by place in its
// devices().
class CopyStreams {
 public:
  CopyStreams(Stage& stage, const std::shared_ptr<EventLoop>& loop);

  CopyStream& operator[](std::size_t place) { return *streams_[place]; }
  std::size_t size() const { return streams_.size(); }
  // That of a device by its number; it is one of the stage's.
  CopyStream& on(int device);
  // As each of them does.
  void close(const Error& why);
  void fail(const Error& why) noexcept;

 private:
  std::vector<std::unique_ptr<CopyStream>> streams_;
};

}  // namespace weft::transport::staged
