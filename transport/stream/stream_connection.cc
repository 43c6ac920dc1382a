// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <functional>
#include <optional>
#include <utility>

#include <weft/transport/stream/inbox.h>
#include <weft/transport/stream/outbox.h>
#include <weft/transport/stream/stream_connection.h>

namespace weft::transport {

namespace {

class StreamConnection final : public Connection,
                               private OneSided,
                               public std::enable_shared_from_this<StreamConnection> {
 public:
  StreamConnection(std::unique_ptr<ByteStream> stream, const Capabilities& capabilities,
                   std::string transport_name, const std::shared_ptr<EventLoop>& loop,
                   std::chrono::milliseconds linger)
      : loop_(loop),
        loop_address_(loop.get()),
        linger_for_(linger),
        capabilities_(capabilities),
        transport_(std::move(transport_name)),
        peer_(stream->peer()),
        stream_(std::move(stream)),
        outbox_(*stream_, capabilities_, who(), transport_, loop,
                [this](const Fence& fence) { again(fence, &StreamConnection::write); }),
        inbox_(
            *stream_, capabilities_, who(), loop,
            [this](const Fence& fence) { again(fence, &StreamConnection::read); },
            [this] { soon(); }) {}
  ~StreamConnection() override;

  // Apart from the constructor, because the stream's callbacks need a weak_ptr to this.
  void start();
  // Called when the last outside reference is dropped.
  void drop() noexcept;

  std::string_view transport() const override { return transport_; }
  std::string peer() const override { return peer_; }
  const Capabilities& capabilities() const override { return capabilities_; }
  void receive(Handlers handlers) override;
  Op send(std::span<const std::byte> header, std::span<const Slice> payloads, Pin pin,
          Fence ready) noexcept override {
    return outbox_.send(header, payloads, std::move(pin), std::move(ready));
  }
  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept override {
    return inbox_.accept(destinations, std::move(pin), std::move(ready));
  }
  OneSided* one_sided() override { return capabilities_.one_sided ? this : nullptr; }
  Result<Pin> reach(const Slice& memory, cuda::Device& gpu) noexcept override {
    return outbox_.reach(memory, gpu);
  }
  void close(const Error& why) noexcept override { close(why, linger_for_); }
  void turn_away(const Error& why) noexcept override { close(why, std::chrono::milliseconds(0)); }

 private:
  Result<std::shared_ptr<MemoryRegion>> expose(const Slice& memory) noexcept override {
    return outbox_.expose(memory);
  }
  Op put(const Slice& from, const RegionKey& to, std::uint64_t offset, Pin pin,
         Fence ready) noexcept override {
    return outbox_.put(from, to, offset, std::move(pin), std::move(ready));
  }

  using Turn = void (StreamConnection::*)();

  std::string who() const { return peer_ + " (" + transport_ + ")"; }
  // Returns the loop without sharing it: a callback that held the last reference would destroy the
  // loop from inside. Null if the loop has ended in this very turn. Callers on other threads keep
  // it alive, see Holder.
  EventLoop* loop() const { return loop_.expired() ? nullptr : loop_address_; }
  // Returns a function that calls `turn` while the connection is alive.
  static std::function<void()> calling(std::weak_ptr<StreamConnection> weak, Turn turn);
  void again(const Fence& fence, Turn turn);
  void soon();
  void close(const Error& why, std::chrono::milliseconds linger) noexcept;
  // Everything below runs on the loop.
  void read();
  void write();
  // Sends `reason` to the peer; empty if this side does not close. Then waits at most for `linger`
  // until the peer has ended its side.
  void end(const Error& why, const std::optional<std::string>& reason,
           std::chrono::milliseconds linger);
  void tell_closed();
  void let_go();

  const std::weak_ptr<EventLoop> loop_;
  EventLoop* const loop_address_;
  const std::chrono::milliseconds linger_for_;
  const Capabilities capabilities_;
  const std::string transport_;
  const std::string peer_;
  std::unique_ptr<ByteStream> stream_;
  Outbox outbox_;
  Inbox inbox_;

  std::atomic<bool> receives_{false};
  std::atomic<bool> dropped_{false};
  std::optional<Handlers> handlers_;
  std::optional<Error> ended_;
  EventLoop::Registration linger_;
};

std::function<void()> StreamConnection::calling(std::weak_ptr<StreamConnection> weak, Turn turn) {
  return [weak = std::move(weak), turn] {
    if (const auto self = weak.lock()) ((*self).*turn)();
  };
}

void StreamConnection::start() {
  stream_->start(*loop_address_, calling(weak_from_this(), &StreamConnection::read),
                 calling(weak_from_this(), &StreamConnection::write));
  again(Fence(), &StreamConnection::write);  // the preamble
}

StreamConnection::~StreamConnection() {
  if (stream_) stream_->stop();
  outbox_.let_go();
  if (ended_) return;
  // The loop ended before it could do this.
  outbox_.refuse(Error(Blame::Cancelled, "the loop of the connection to " + who() + " has ended"));
  inbox_.refuse(Error(Blame::Cancelled, "the loop of the connection to " + who() + " has ended"));
  inbox_.end();
  outbox_.end(std::nullopt);
}

void StreamConnection::again(const Fence& fence, Turn turn) {
  if (auto* const here = loop()) here->when(fence, calling(weak_from_this(), turn));
}

void StreamConnection::soon() {
  if (auto* const here = loop())
    here->post_soon(calling(weak_from_this(), &StreamConnection::read));
}

void StreamConnection::receive(Handlers handlers) {
  if (!handlers.arrived || !handlers.closed) {
    throw Error(Blame::Caller, "receive from " + who() + ": both handlers must be given");
  }
  if (receives_.exchange(true))
    throw Error(Blame::Caller, "receive from " + who() + " was called twice; call it once");
  auto* const here = loop();
  if (!here) return;
  here->post([self = shared_from_this(), handlers = std::move(handlers)]() mutable {
    self->handlers_ = std::move(handlers);
    if (self->ended_) return self->tell_closed();
    if (self->handlers_->in_place) self->inbox_.work_in_place();
    self->read();
  });
}

void StreamConnection::close(const Error& why, std::chrono::milliseconds linger) noexcept {
  const Error reason = why.within("the connection to " + who() + " was closed here");
  if (!outbox_.refuse(reason)) return;
  inbox_.refuse(reason);
  if (auto* const here = loop()) {
    here->post([self = shared_from_this(), reason, why, linger] {
      self->end(reason, why.text(), linger);
    });
  }
}

void StreamConnection::drop() noexcept {
  dropped_ = true;
  close(Error(Blame::Cancelled, "its last reference was dropped"));
}

void StreamConnection::read() {
  if (!stream_) return;
  if (ended_) {
    if (inbox_.drain()) let_go();
    return;
  }
  const auto why = inbox_.pump(handlers_ ? &handlers_->arrived : nullptr);
  if (!why || !outbox_.refuse(*why)) return;  // if close() was called first, its own turn follows
  inbox_.refuse(*why);
  end(*why, std::nullopt, linger_for_);
}

void StreamConnection::write() {
  if (stream_) outbox_.flush();
}

void StreamConnection::end(const Error& why, const std::optional<std::string>& reason,
                           std::chrono::milliseconds linger) {
  ended_ = why;
  if (!stream_->withdraw(why)) {  // before the pins are released
    inbox_.keep_pins();
    outbox_.keep_pins();
  }
  inbox_.end();
  const bool is_heard = outbox_.end(reason);
  tell_closed();
  auto* const here = loop();
  if (!reason || !is_heard || !here || inbox_.drain() || linger.count() == 0) return let_go();
  linger_ = here->at(Deadline::in(linger), [self = shared_from_this()] { self->let_go(); });
}

void StreamConnection::tell_closed() {
  if (!handlers_) return;
  const Handlers handlers = *std::exchange(handlers_, std::nullopt);
  if (!dropped_) handlers.closed(*ended_);
}

void StreamConnection::let_go() {
  if (!stream_) return;
  linger_.reset();
  outbox_.let_go();
  stream_->stop();
  // Destroyed in a later turn: this may be a call of the stream itself.
  if (auto* const here = loop()) here->post([stream = std::move(stream_)] {});
}

// The object that callers own. The connection may outlive it while the loop has work for it; the
// loop does not end before the connection has finished its part of this turn.
struct Holder {
  std::shared_ptr<EventLoop> loop;
  std::shared_ptr<StreamConnection> connection;
  ~Holder() {
    connection->drop();
    if (loop->inside()) loop->post([last = loop] {});
  }
};

}  // namespace

std::shared_ptr<Connection> connect_over(std::unique_ptr<ByteStream> stream,
                                         const Capabilities& capabilities,
                                         std::string transport_name,
                                         std::shared_ptr<EventLoop> loop,
                                         std::chrono::milliseconds linger) {
  auto connection = std::make_shared<StreamConnection>(std::move(stream), capabilities,
                                                       std::move(transport_name), loop, linger);
  connection->start();
  auto* const seen = connection.get();
  const auto holder = std::shared_ptr<Holder>(new Holder{std::move(loop), std::move(connection)});
  return {holder, seen};
}

}  // namespace weft::transport
