// SPDX-License-Identifier: Apache-2.0
// The sending half of a cuda_ipc connection. It names device memory to the peer, together with an
// event that a stream of this process records when the memory is ready. It keeps the memory pinned
// until the peer has read it.
//
// send() and refuse() are thread-safe; the other functions run on the event loop unless they say
// otherwise.
#pragma once

#include <deque>
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
#include <weft/transport/in_flight.h>
#include <weft/transport/staged/staging.h>

namespace weft::transport::cuda_ipc {

class Sender : public std::enable_shared_from_this<Sender> {
 public:
  Sender(std::shared_ptr<Connection> below, std::shared_ptr<staged::Stage> stage,
         const Capabilities& limits, const std::shared_ptr<EventLoop>& loop);

  // Our side of the hello.
  const std::shared_ptr<Page>& page() const { return page_; }
  std::vector<Gpu> gpus() const;
  // Descriptor of the socket's name; 0 if there is none.
  std::uint32_t socket() {
    MutexLock lock(mutex_);
    return passing_ ? passing_->name() : 0;
  }

  Op send(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready) noexcept;
  // Starts sending messages. Memory of the `reached` GPUs (one bit for each) is named to the peer;
  // `why_not` tells why memory of the others is not.
  void meet(std::shared_ptr<Process> peer, std::uint32_t reached, std::string why_not);
  // Makes send() fail with `why` from now on. Returns false if it already fails.
  bool refuse(const Error& why);
  // Like refuse(), and closes the connection below.
  void lose(const Error& why);
  // Sends a hello or reach message, before all others.
  void introduce(const std::vector<std::byte>& message);
  // After refuse(): fails all messages that the peer has not read, in order. Their memory stays
  // pinned as long as the peer may read it.
  void end() noexcept;
  // After refuse(): returns the connection below and drops it here. Thread-safe. (It shares
  // ownership of the loop, which must not be destroyed on its own thread.)
  std::shared_ptr<Connection> let_go() noexcept;

 private:
  // An allocation on this GPU that has been named.
  struct Known {
    // Identify the allocation at its address: the driver's id, for memory of cuMemAlloc, or the
    // physical memory, for virtual addresses.
    std::uint64_t id = 0;
    std::optional<cuda::PhysicalMemory> physical;
    std::size_t bytes = 0;

    // Sent with the next message that names it.
    std::uint64_t allocation = 0;
    std::uint64_t replaces = 0;
    bool is_told = false;
    std::optional<cuda::IpcHandle> handle;  // until is_told
    Descriptor descriptor;                  // until it is passed
    std::uint64_t named_in = 0;             // number of the last Naming that lists it
  };
  // How a message names its payloads. It may be made again before the message is sent.
  struct Naming {
    std::uint64_t number = 0;
    std::optional<std::size_t> gpu;  // of the named payloads; a message names memory of one GPU
    std::vector<Payload> payloads;
    std::size_t pieces = 0;
    std::vector<Known*> told;  // allocations that this message describes, each once
    // Why the last slice was not named although the peer reaches its GPU.
    std::string why_not;
  };
  struct Source {
    Source(std::shared_ptr<cuda::Device> on, const std::shared_ptr<EventLoop>& loop);
    std::shared_ptr<cuda::Device> device;
    cuda::Stream stream;
    std::vector<cuda::SharedEvent> events;
    std::vector<std::uint32_t> values;  // of the slots' words in the page
    std::vector<std::size_t> free;
    std::map<CUdeviceptr, Known> known;  // by base
    bool is_reached = false;
    InFlight in_flight;
  };
  struct Item {
    std::vector<std::byte> header;
    std::vector<Slice> payloads;
    Pin pin;
    Fence ready;
    std::shared_ptr<staged::Landing> landing;
    bool is_awaited = false;
  };
  // The result of trying to send an item.
  enum class Went { Out, Waits };

  EventLoop* loop() const { return loop_.expired() ? nullptr : loop_address_; }
  std::string name() const { return "send to " + peer_; }
  std::optional<Error> why_refused(Bytes header, std::span<const Slice> payloads) const;
  void pump();
  void pump(std::vector<std::pair<std::shared_ptr<staged::Landing>, Error>>& failed)
      WEFT_REQUIRES(mutex_);
  Went go(Item& item) WEFT_REQUIRES(mutex_);
  Went go_shared(Item& item, Naming naming) WEFT_REQUIRES(mutex_);
  std::optional<Went> pass(const Naming& naming, Item& item) WEFT_REQUIRES(mutex_);
  bool stream_waits(Source& source, Item& item) WEFT_REQUIRES(mutex_);
  // Names a slice. Returns false, and names nothing of it, if some of it cannot be shared.
  bool name_slice(Source& source, const Slice& slice, Naming& naming) WEFT_REQUIRES(mutex_);
  std::optional<Piece> name_piece(Source& source, CUdeviceptr address, std::size_t bytes,
                                  Naming& naming) WEFT_REQUIRES(mutex_);
  Known* known_at(Source& source, const cuda::AllocationRange& range, Naming& naming)
      WEFT_REQUIRES(mutex_);
  std::optional<Known> share(Source& source, const cuda::AllocationRange& range,
                             std::optional<cuda::PhysicalMemory> mapped, Naming& naming)
      WEFT_REQUIRES(mutex_);
  std::optional<std::string> why_not_passed() WEFT_REQUIRES(mutex_);
  // Ends a part of `landing` when `below` ends. If `names` and the message was not sent, ends the
  // connection, because the peer will never report that it has read the message.
  void follow(const std::shared_ptr<staged::Landing>& landing, const Op& below, bool names);
  // Runs on the loop.
  void was_read(std::size_t gpu, std::size_t slot);

  const std::string peer_;
  const std::shared_ptr<staged::Stage> stage_;
  const Capabilities& limits_;
  const std::weak_ptr<EventLoop> loop_;
  // Not owned: if a turn of the loop held the last reference, the loop would be destroyed on its
  // own thread.
  EventLoop* const loop_address_;
  const std::shared_ptr<Page> page_ = Page::make();
  std::vector<std::unique_ptr<Source>> sources_;  // by index in the hello

  Mutex mutex_;  // also guards the contents of sources_
  std::optional<Error> failure_ WEFT_GUARDED_BY(mutex_);
  std::shared_ptr<Connection> below_ WEFT_GUARDED_BY(mutex_);  // not used once failure_ is set
  std::shared_ptr<Process> process_ WEFT_GUARDED_BY(mutex_);   // the peer's
  bool is_met_ WEFT_GUARDED_BY(mutex_) = false;
  std::string why_not_ WEFT_GUARDED_BY(mutex_);
  std::uint64_t allocations_ WEFT_GUARDED_BY(mutex_) = 0;
  std::uint64_t namings_ WEFT_GUARDED_BY(mutex_) = 0;
  std::optional<PassingEnd> passing_ WEFT_GUARDED_BY(mutex_);  // set if there is a GPU
  bool has_said_why_ WEFT_GUARDED_BY(mutex_) = false;          // has logged why nothing is passed
  EventLoop::Registration retry_ WEFT_GUARDED_BY(mutex_);  // passes again while the socket is full
  std::deque<Item> line_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::transport::cuda_ipc
