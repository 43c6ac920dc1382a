// The sending half of a StreamConnection. What can go goes at once, on the thread that calls
// send(), and costs no allocation; what cannot waits in line and goes on the loop. send() is for
// every thread, the rest for the loop.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/op.h>
#include <weft/profiling/trace/depth.h>
#include <weft/transport/byte_stream.h>
#include <weft/transport/connection.h>

namespace weft::transport {

class Outbox {
 public:
  using Bytes = ByteStream::Bytes;
  // Has flush() called on the loop, in a later turn, once the fence has passed.
  using Again = std::function<void(const Fence&)>;

  // `who` names the lane in messages, `transport` where what waits is counted. The preamble is the
  // first thing in line.
  Outbox(ByteStream& stream, const Capabilities& limits, std::string who,
         const std::string& transport, std::weak_ptr<EventLoop> loop, Again again);

  Op send(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready) noexcept;
  // As OneSided's, over a stream that has placed writes.
  Op put(const Slice& from, const RegionKey& to, std::uint64_t offset, Pin pin,
         Fence ready) noexcept;
  Result<std::shared_ptr<MemoryRegion>> expose(const Slice& memory) noexcept;
  // As Connection's.
  Result<Pin> reach(const Slice& memory, cuda::Device& gpu) noexcept;
  // From now on send() and put() fail with this. False where it does already. For every thread.
  bool refuse(const Error& why);

  // Writes what may be written.
  void flush() noexcept;
  // The memory of what waits in line stays for good.
  void keep_pins() noexcept;
  // Fails what waits in line, in order, with what send() fails with. Writes no more of it, and last
  // a goodbye where a reason is given and the peer can read one: returns whether it can.
  bool end(const std::optional<std::string>& reason) noexcept;
  // The stream is not touched from now on.
  void let_go() noexcept;

 private:
  // Of a put: no bytes of the stream.
  struct Place {
    RegionKey key;
    std::uint64_t offset = 0;
  };
  struct Item {
    std::vector<std::byte> front;  // head, table and header, and zeros up to the payloads
    std::vector<Slice> payloads;
    std::optional<Place> place;  // where the one payload is put
    std::uint64_t bytes = 0;     // of the whole message, with the zeros behind it
    std::size_t padding = 0;     // these
    std::uint64_t written = 0;
    Fence ready;
    bool awaited = false;                  // somebody calls flush() when `ready` has passed
    std::optional<Completion> completion;  // none for preamble and goodbye
    std::optional<Error> error;            // of this one alone
    trace::Waiting waiting = {};
  };

  std::optional<Error> why_refused(Bytes header, std::span<const Slice> payloads) const;
  // Under the mutex, of payloads on GPUs.
  std::optional<Error> why_not_carried(std::span<const Slice> payloads) const;
  // Writes a message to front_ up to its payloads; a small one all of it.
  void begin(Bytes header, std::span<const Slice> payloads, std::size_t padding, bool is_whole);
  // Queues what is not written yet of a message; returns its Op. Under the mutex.
  Op queue(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready, std::uint64_t bytes,
           std::size_t padding, std::uint64_t written);
  // The lane's end, or a full line. Under the mutex.
  std::optional<Error> why_no_more(const char* call) const;
  // The preamble or a goodbye.
  void queue_own(Bytes bytes);
  // Under the mutex; returns what must be passed before there is more to do, if that is not the
  // stream's to say.
  std::optional<Fence> write_line();
  void keep_line() noexcept;  // as keep_pins()
  // One call of write() for what may go of the line; returns whether all of that went.
  bool write_some();
  // The put that is first in line; returns whether it has ended.
  bool put_first();
  void add_pieces(const Item& item);
  void settle(std::size_t written);

  ByteStream& stream_;
  const Capabilities& limits_;
  const std::string who_;
  const std::weak_ptr<EventLoop> loop_;
  const Again again_;
  const std::size_t unit_;  // of the stream
  const ByteStream::Reach reach_;
  trace::Depth& waiting_;  // messages, of this transport

  std::mutex mutex_;  // of what follows, and of writing
  std::deque<Item> queue_;
  std::optional<Error> failure_;
  std::optional<Error>
      unheard_;            // the peer reads no more, though the lane has not been read to its end
  bool ending_ = false;    // the stream's end is due behind what is in line
  bool let_go_ = false;    // there is no stream any more
  bool preamble_ = false;  // has been written, all of it
  std::size_t turn_bytes_ = 0;
  std::vector<std::byte> front_;  // scratch; keep their memory
  std::vector<Bytes> pieces_;
  std::vector<Item> gone_;  // written, not told yet; the loop's, needs no mutex outside flush()
};

}  // namespace weft::transport
