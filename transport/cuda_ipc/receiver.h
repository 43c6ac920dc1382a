// The receiving half of a cuda_ipc lane: opens what the peer names, once for an allocation, and
// copies it to where accept() says, by a stream of ours that waits for the peer's event.
//
// accept() and refuse() are for every thread, the rest for the loop.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weft/cuda/ipc.h>
#include <weft/transport/connection.h>
#include <weft/transport/cuda_ipc/page.h>
#include <weft/transport/cuda_ipc/passing.h>
#include <weft/transport/cuda_ipc/wire.h>
#include <weft/transport/staging.h>

namespace weft::transport::cuda_ipc {

class Receiver : public std::enable_shared_from_this<Receiver> {
 public:
  using Arrived = std::function<void(const Arrival&)>;

  Receiver(std::shared_ptr<Connection> below, std::shared_ptr<staged::Stage> stage,
           const Capabilities& limits, const std::shared_ptr<EventLoop>& loop);
  ~Receiver();

  // Who is at the other end, and its page. Connects to its socket. Returns which of its GPUs can be
  // read: a bit for each.
  std::uint32_t meet(Hello theirs, std::shared_ptr<Page> page);
  // The message that the lane below shows was for the lane itself.
  void take_introduction();
  // What the lane below shows. Returns why the lane ends, if so.
  std::optional<Error> take(const Arrival& below, const Arrived& arrived);
  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept;
  // From now on accept() fails with this. False where it does already.
  bool refuse(const Error& why);
  // After refuse(): fails what is being copied, and tells the peer that its memory is not read any
  // more.
  void end() noexcept;
  // After refuse(), for every thread: gives up the lane below. (It has a share in the loop, which
  // must not end from inside.)
  std::shared_ptr<Connection> let_go() noexcept;

 private:
  // What the peer has told of once, and takes for known from then on.
  struct Allocation {
    cuda::IpcHandle handle{};
    Descriptor descriptor;     // instead of the handle, until the memory is opened
    std::uint64_t passed = 0;  // bytes that the descriptor is for
    std::shared_ptr<cuda::OpenedMemory> memory;  // from when it is first read
  };
  // One of the peer's GPUs, as we read it.
  struct Source {
    staged::CopyStream* stream = nullptr;  // null: it cannot be read
    cuda::Device* device = nullptr;
    std::vector<std::optional<cuda::SharedEvent>> events;  // opened when first named
    std::map<std::uint64_t, Allocation> allocations;       // by the peer's number
  };
  // A message that is being copied to the host, chunk by chunk: what no stream may write (pageable
  // memory) takes the way over a pinned chunk.
  struct HostCopies;
  // Both tell the peer with their last reference: the message has been read, or never will be;
  // nothing is read any more.
  struct Read;
  struct Reading;

  EventLoop* loop() const { return loop_.expired() ? nullptr : loop_address_; }
  std::string name() const { return "accept from " + peer_; }
  std::optional<Error> why_refused(std::span<const Slice> destinations) const;
  // On the loop, in meet() under the mutex.
  void connect();
  void take_passed();
  // Under the mutex.
  std::optional<Error> learn();
  std::optional<Error> learn(const Piece& piece, std::map<std::uint64_t, Allocation>& allocations);
  Op accept_shared(std::span<const Slice> destinations, Pin pin, Fence ready);
  std::vector<staged::CopyStream::Copy> copies_to(std::span<const Slice> destinations,
                                                  Source& source, std::vector<Pin>& pins);
  std::shared_ptr<cuda::OpenedMemory> memory_of(const Piece& piece, Source& source);
  cuda::EventRef event_of(Source& source);
  // On the loop.
  void go_on(const std::shared_ptr<HostCopies>& copies);
  void finish(const std::shared_ptr<HostCopies>& copies, const std::optional<Error>& error);

  const std::string peer_;
  const std::shared_ptr<staged::Stage> stage_;
  const Capabilities& limits_;
  const std::weak_ptr<EventLoop> loop_;
  EventLoop* const loop_address_;  // without a share in it: a turn that held the last one would end
                                   // it from inside
  const std::shared_ptr<staged::Chunks> chunks_;
  staged::CopyStreams streams_;
  Hello theirs_;
  std::vector<Source> sources_;  // by place in their hello

  std::mutex mutex_;  // of what follows, and of what is in sources_
  std::optional<Error> failure_;
  std::shared_ptr<Connection> below_;  // not touched once there is a failure
  std::shared_ptr<Reading> reading_;
  enum class Stand { None, Plain, Shared };  // the message that has been shown
  Stand stand_ = Stand::None;
  std::vector<std::shared_ptr<HostCopies>> to_host_;
  Shared message_;                    // without its header
  std::vector<std::uint64_t> sizes_;  // of all payloads; steady until the next message
  std::optional<TakingEnd> taking_;
  EventLoop::Registration watch_;  // of that
};

}  // namespace weft::transport::cuda_ipc
