// SPDX-License-Identifier: Apache-2.0
// The parts of staging through pinned memory: Stage holds the GPUs of a process and the pools that
// connections share for them; Chunks are the pinned chunks of one direction of a connection;
// CopyStream copies between those and a GPU. Thread-safe.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
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

// The GPUs whose memory the connections of this process carry; one for all connections. Without a
// GPU it carries no device memory, but its connections understand a peer that has a GPU.
class Stage {
 public:
  // Blocks for a moment: allocates pinned memory and makes the first copies, for which the driver
  // loads kernels of its own. Throws Device, Unsupported (a GPU without stream memory operations),
  // Busy, Timeout.
  explicit Stage(std::vector<std::shared_ptr<cuda::Device>> devices);

  const std::vector<std::shared_ptr<cuda::Device>>& devices() const { return devices_; }
  // Returns why this memory cannot be carried; nothing if it can.
  std::optional<std::string> why_not(const Slice& slice) const;
  // Returns the device with this index.
  cuda::Device& device(int index) const;
  // Returns the error of the first slice whose GPU is lost: the fences of a lost GPU count as
  // passed although nothing was done.
  std::optional<Error> why_lost(std::span<const Slice> slices) const;
  // Valid only if there is a GPU.
  cuda::PinnedPool& pinned() { return *pinned_; }
  cuda::FlagPool& flags() { return *flags_; }

 private:
  void warm_up(cuda::Device& device);

  std::vector<std::shared_ptr<cuda::Device>> devices_;
  std::optional<cuda::PinnedPool> pinned_;  // portable: visible to all GPUs
  std::optional<cuda::FlagPool> flags_;
};

// Which slices on GPUs a connection of host memory moves over its network (Connection::reach).
struct Reached {
  std::vector<bool> which;
  std::vector<Pin> pins;  // of those slices

  bool operator[](std::size_t index) const { return index < which.size() && which[index]; }
  // Returns one pin for `other` and these, which move into it.
  Pin join_pins(Pin other);
};
// The connection logs once why it does not reach a slice. If it has ended or the GPU is lost, later
// operations fail.
Reached reach_with(Connection& connection, const Stage& stage, std::span<const Slice> slices);

// Pinned blocks of kChunkBytes. All are allocated in the constructor, because a pool that grows may
// wait for the whole device.
class Chunks : public std::enable_shared_from_this<Chunks> {
 public:
  // The chunk is returned when the last reference is dropped.
  using Lease = std::shared_ptr<const Slice>;

  Chunks(Stage& stage, std::size_t chunks);
  // Returns null if all chunks are taken. Then `again` runs once when a chunk is returned, on the
  // thread that returns it. All waiting callers are called; one that finds no chunk free calls
  // take() again.
  Lease take(Task again);

 private:
  void give_back(std::size_t index) noexcept;

  std::vector<cuda::PinnedMemory> blocks_;
  Mutex mutex_;
  std::vector<std::size_t> free_ WEFT_GUARDED_BY(mutex_);
  std::vector<Task> waiting_ WEFT_GUARDED_BY(mutex_);
};

// Returns a Completion that fails when its last reference is dropped before it has ended, because
// the loop that was to end it has ended.
std::shared_ptr<Completion> ending_of(Completion completion, std::string name);

// Ends an operation of several parts. It counts the parts that have not ended, and one more while
// parts may still begin. The first error fails the operation at once.
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

// Begins the timeline span of copies that the stream makes one after another, all in one direction:
// "copy to host", "copy to device", or "copy" from GPU to GPU, with their bytes. Empty if there is
// nothing to copy. It ends like any cuda::Span.
cuda::Span show(const cuda::StreamRef& stream, std::span<const Copy> copies,
                int rank = -1) noexcept;

// The copies of one connection to or from one GPU, in order.
class CopyStream {
 public:
  using Copy = staged::Copy;

  CopyStream(std::shared_ptr<cuda::Device> device, cuda::FlagPool& flags,
             const std::shared_ptr<EventLoop>& loop);

  int device() const { return device_->index(); }
  // Enqueues the copies behind `ready`, and behind `after` if given. The Op ends on the loop when
  // they are made, or with the GPU's error; if they cannot be enqueued, it has failed. The pin is
  // held as long as the GPU may use the memory, even if the Op has failed before. `owner` contains
  // this object.
  Op run(const std::string& name, std::vector<Copy> copies, Pin pin, const Fence& ready,
         const std::shared_ptr<const void>& owner,
         std::optional<cuda::EventRef> after = std::nullopt) noexcept;
  // Makes run() fail with `why` from now on. Does not return while another thread is inside run().
  void close(const Error& why);
  // Fails the copies under way.
  void fail(const Error& why) noexcept;

 private:
  Op enqueue(const std::string& name, const std::vector<Copy>& copies, const Pin& pin,
             const std::shared_ptr<const void>& owner) WEFT_REQUIRES(mutex_);
  // A run() that starts later, because no stream can wait for its `ready`.
  struct Later {
    std::string name;
    std::vector<Copy> copies;
    Pin pin;
    std::optional<cuda::EventRef> after;
    std::shared_ptr<Completion> completion;
  };
  Op enqueue_later(Later later, const Fence& ready, const std::shared_ptr<const void>& owner)
      WEFT_REQUIRES(mutex_);
  bool waits_for(const Fence& ready) WEFT_REQUIRES(mutex_);
  void run_later(std::uint64_t key, const std::shared_ptr<const void>& owner);

  std::shared_ptr<cuda::Device> device_;
  cuda::FlagPool& flags_;
  std::weak_ptr<EventLoop> loop_;
  Mutex mutex_;  // also held while copies are put on the stream, so that they are in order
  std::optional<Error> closed_ WEFT_GUARDED_BY(mutex_);
  // By key; each waits for its `ready` on the loop.
  std::map<std::uint64_t, Later> later_ WEFT_GUARDED_BY(mutex_);
  std::uint64_t next_later_ WEFT_GUARDED_BY(mutex_) = 0;
  cuda::Stream stream_;
  InFlight in_flight_;
};

// The copies of one connection in one direction: a CopyStream for each GPU of the stage, in the
// order of its devices().
class CopyStreams {
 public:
  CopyStreams(Stage& stage, const std::shared_ptr<EventLoop>& loop);

  CopyStream& operator[](std::size_t place) { return *streams_[place]; }
  std::size_t size() const { return streams_.size(); }
  // Returns the stream of a device by its index. The device must be one of the stage's.
  CopyStream& on(int device);
  // These call the same function of every CopyStream.
  void close(const Error& why);
  void fail(const Error& why) noexcept;

 private:
  std::vector<std::unique_ptr<CopyStream>> streams_;
};

}  // namespace weft::transport::staged
