// The sending half of a cuda_ipc lane: names device memory to the peer, behind an event that a
// stream of ours records when the memory is ready, and keeps it until the peer says that it has
// been read.
//
// send() and refuse() are for every thread, the rest for the loop.
#pragma once

#include <deque>
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
#include <weft/transport/in_flight.h>
#include <weft/transport/staging.h>

namespace weft::transport::cuda_ipc {

class Sender : public std::enable_shared_from_this<Sender> {
 public:
  Sender(std::shared_ptr<Connection> below, std::shared_ptr<staged::Stage> stage,
         const Capabilities& limits, const std::shared_ptr<EventLoop>& loop);

  // Our side of the hello.
  const std::shared_ptr<Page>& page() const { return page_; }
  std::vector<Gpu> gpus() const;
  // 0: there is none.
  std::uint32_t socket() const { return passing_ ? passing_->name() : 0; }

  Op send(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready) noexcept;
  // From now on messages go, and memory of these GPUs is named (a bit for each); for others
  // `why_not` says why it is not.
  void meet(std::shared_ptr<Process> peer, std::uint32_t reached, std::string why_not);
  // From now on send() fails with this. False where it does already.
  bool refuse(const Error& why);
  // The same, and ends the lane below.
  void lose(const Error& why);
  // What goes before all messages.
  void introduce(const std::vector<std::byte>& message);
  // After refuse(): fails what has not been read, in order. Its memory stays pinned as long as the
  // peer may read it.
  void end() noexcept;
  // After refuse(), for every thread: gives up the lane below. (It has a share in the loop, which
  // must not end from inside.)
  std::shared_ptr<Connection> let_go() noexcept;

 private:
  // An allocation of this GPU's.
  struct Known {
    // Which one is at that address: that of cuMemAlloc with this number, or, of virtual addresses,
    // this memory.
    std::uint64_t id = 0;
    std::optional<cuda::PhysicalMemory> physical;
    std::size_t bytes = 0;

    // What the next message says of it.
    std::uint64_t allocation = 0;
    std::uint64_t replaces = 0;
    bool is_told = false;
    std::optional<cuda::IpcHandle> handle;  // until it is
    Descriptor descriptor;                  // until it is passed
    std::uint64_t named_in = 0;             // the last naming that has it
  };
  // A message's payloads as they are named, which may be done again before it goes.
  struct Naming {
    std::uint64_t number = 0;
    std::optional<std::size_t> gpu;  // of what is named; a message names memory of one
    std::vector<Payload> payloads;
    std::size_t pieces = 0;
    std::vector<Known*> told;  // by this message, each once
    std::string why_not;       // the last slice was not named, by a GPU's memory that is reached
  };
  struct Source {
    Source(std::shared_ptr<cuda::Device> on, const std::shared_ptr<EventLoop>& loop);
    std::shared_ptr<cuda::Device> device;
    cuda::Stream stream;
    std::vector<cuda::SharedEvent> events;
    std::vector<std::uint32_t> values;  // of the slots' words
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
  // What becomes of an item.
  enum class Went { Out, Waits };

  EventLoop* loop() const { return loop_.expired() ? nullptr : loop_address_; }
  std::string name() const { return "send to " + peer_; }
  std::optional<Error> why_refused(Bytes header, std::span<const Slice> payloads) const;
  void pump();
  // Under the mutex, down to why_not_passed().
  void pump(std::vector<std::pair<std::shared_ptr<staged::Landing>, Error>>& failed);
  Went go(Item& item);
  Went go_shared(Item& item, Naming naming);
  std::optional<Went> pass(const Naming& naming, Item& item);
  bool stream_waits(Source& source, Item& item);
  // False where some of it cannot be shared: then nothing of it is named.
  bool name_slice(Source& source, const Slice& slice, Naming& naming);
  std::optional<Piece> name_piece(Source& source, CUdeviceptr address, std::size_t bytes,
                                  Naming& naming);
  Known* known_at(Source& source, const cuda::AllocationRange& range, Naming& naming);
  std::optional<Known> share(Source& source, const cuda::AllocationRange& range,
                             std::optional<cuda::PhysicalMemory> mapped, Naming& naming);
  std::optional<std::string> why_not_passed();
  // `names`: where the message is not sent after all, the lane ends, because the peer will never
  // say that it has read it.
  void follow(const std::shared_ptr<staged::Landing>& landing, const Op& below, bool names);
  // On the loop.
  void was_read(std::size_t gpu, std::size_t slot);

  const std::string peer_;
  const std::shared_ptr<staged::Stage> stage_;
  const Capabilities& limits_;
  const std::weak_ptr<EventLoop> loop_;
  EventLoop* const loop_address_;  // without a share in it: a turn that held the last one would end
                                   // it from inside
  const std::shared_ptr<Page> page_ = Page::make();
  std::vector<std::unique_ptr<Source>> sources_;  // by place in the hello

  std::mutex mutex_;  // of what follows, and of what is in sources_
  std::optional<Error> failure_;
  std::shared_ptr<Connection> below_;  // not touched once there is a failure
  std::shared_ptr<Process> process_;   // the peer's
  bool is_met_ = false;
  std::string why_not_;
  std::uint64_t allocations_ = 0;
  std::uint64_t namings_ = 0;
  std::optional<PassingEnd> passing_;  // where there is a GPU
  bool has_said_why_ = false;          // nothing is passed
  EventLoop::Registration retry_;      // of passing, while the socket is full
  std::deque<Item> line_;
};

}  // namespace weft::transport::cuda_ipc
