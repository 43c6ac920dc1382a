// SPDX-License-Identifier: Apache-2.0
// The receiving half of a cuda_ipc connection. It opens each allocation that the peer names once. A
// stream of this process waits for the peer's event and copies the payload to the destination that
// accept() names.
//
// accept() and refuse() are thread-safe; the other functions run on the event loop unless they say
// otherwise.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/cuda/ipc.h>
#include <weft/transport/connection.h>
#include <weft/transport/cuda_ipc/page.h>
#include <weft/transport/cuda_ipc/passing.h>
#include <weft/transport/cuda_ipc/wire.h>
#include <weft/transport/staged/staging.h>

namespace weft::transport::cuda_ipc {

class Receiver : public std::enable_shared_from_this<Receiver> {
 public:
  using Arrived = std::function<void(const Arrival&)>;

  Receiver(std::shared_ptr<Connection> below, std::shared_ptr<staged::Stage> stage,
           const Capabilities& limits, const std::shared_ptr<EventLoop>& loop);
  ~Receiver();

  // Takes the peer's hello and its page, and connects to its socket. Returns which of its GPUs can
  // be read, one bit for each.
  std::uint32_t meet(Hello theirs, std::shared_ptr<Page> page);
  // Accepts a hello or reach message on the connection below.
  void take_introduction();
  // Handles a message of the connection below. Returns an error if the connection must end.
  std::optional<Error> take(const Arrival& below, const Arrived& arrived);
  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept;
  // Makes accept() fail with `why` from now on. Returns false if it already fails.
  bool refuse(const Error& why);
  // After refuse(): fails pending copies, and tells the peer when its memory is not read any more.
  void end() noexcept;
  // After refuse(): returns the connection below and drops it here. Thread-safe. (It shares
  // ownership of the loop, which must not be destroyed on its own thread.)
  std::shared_ptr<Connection> let_go() noexcept;

 private:
  // An allocation that the peer has described. Later messages name it only by number.
  struct Allocation {
    cuda::IpcHandle handle{};
    Descriptor descriptor;     // used instead of the handle; dropped when the memory is opened
    std::uint64_t passed = 0;  // bytes of the descriptor's memory
    std::shared_ptr<cuda::OpenedMemory> memory;  // opened when first read
  };
  // One of the peer's GPUs.
  struct Source {
    staged::CopyStream* stream = nullptr;  // copies from it; null if it cannot be read
    cuda::Device* device = nullptr;
    std::vector<std::optional<cuda::SharedEvent>> events;  // opened when first named
    std::map<std::uint64_t, Allocation> allocations;       // by the peer's number
  };
  // A message that is being copied to the host. Streams cannot write to pageable memory, so it is
  // copied through pinned chunks.
  struct HostCopies;
  // Each tells the peer when its last reference is dropped. Read: the message has been read, or
  // never will be. Reading: no memory of the peer is read any more.
  struct Read;
  struct Reading;

  EventLoop* loop() const { return loop_.expired() ? nullptr : loop_address_; }
  std::string name() const { return "accept from " + peer_; }
  std::optional<Error> why_refused(std::span<const Slice> destinations) const WEFT_REQUIRES(mutex_);
  // Both run on the loop. connect() is called by meet().
  void connect() WEFT_REQUIRES(mutex_);
  void take_passed();
  std::optional<Error> learn() WEFT_REQUIRES(mutex_);
  std::optional<Error> learn(const Piece& piece, std::map<std::uint64_t, Allocation>& allocations)
      WEFT_REQUIRES(mutex_);
  Op accept_shared(std::span<const Slice> destinations, Pin pin, Fence ready) WEFT_REQUIRES(mutex_);
  std::vector<staged::CopyStream::Copy> copies_to(std::span<const Slice> destinations,
                                                  Source& source, std::vector<Pin>& pins)
      WEFT_REQUIRES(mutex_);
  std::shared_ptr<cuda::OpenedMemory> memory_of(const Piece& piece, Source& source)
      WEFT_REQUIRES(mutex_);
  cuda::EventRef event_of(Source& source) WEFT_REQUIRES(mutex_);
  // Both run on the loop.
  void go_on(const std::shared_ptr<HostCopies>& copies);
  void finish(const std::shared_ptr<HostCopies>& copies, const std::optional<Error>& error);

  const std::string peer_;
  const std::shared_ptr<staged::Stage> stage_;
  const Capabilities& limits_;
  const std::weak_ptr<EventLoop> loop_;
  // Not owned: if a turn of the loop held the last reference, the loop would be destroyed on its
  // own thread.
  EventLoop* const loop_address_;
  const std::shared_ptr<staged::Chunks> chunks_;
  staged::CopyStreams streams_;
  Hello theirs_;
  std::vector<Source> sources_;  // by index in the peer's hello

  Mutex mutex_;  // also guards the contents of sources_
  std::optional<Error> failure_ WEFT_GUARDED_BY(mutex_);
  std::shared_ptr<Connection> below_ WEFT_GUARDED_BY(mutex_);  // not used once failure_ is set
  std::shared_ptr<Reading> reading_ WEFT_GUARDED_BY(mutex_);
  enum class Stand { None, Plain, Shared };  // the kind of message that waits for accept()
  Stand stand_ WEFT_GUARDED_BY(mutex_) = Stand::None;
  std::vector<std::shared_ptr<HostCopies>> to_host_ WEFT_GUARDED_BY(mutex_);
  Shared message_ WEFT_GUARDED_BY(mutex_);  // without its header
  // Of all payloads; unchanged until the next message.
  std::vector<std::uint64_t> sizes_ WEFT_GUARDED_BY(mutex_);
  std::optional<TakingEnd> taking_ WEFT_GUARDED_BY(mutex_);
  EventLoop::Registration watch_ WEFT_GUARDED_BY(mutex_);  // of taking_
};

}  // namespace weft::transport::cuda_ipc
