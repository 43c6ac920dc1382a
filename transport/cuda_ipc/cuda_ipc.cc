// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <utility>

#include <weft/base/log.h>
#include <weft/transport/cuda_ipc/cuda_ipc.h>
#include <weft/transport/cuda_ipc/receiver.h>
#include <weft/transport/cuda_ipc/sender.h>

namespace weft::transport::cuda_ipc {

namespace {

class CudaIpcConnection final : public Connection,
                                public std::enable_shared_from_this<CudaIpcConnection> {
 public:
  CudaIpcConnection(const std::shared_ptr<Connection>& below,
                    const std::shared_ptr<staged::Stage>& stage,
                    const std::shared_ptr<EventLoop>& loop, Identity here)
      : below_(below),
        peer_(below->peer()),
        loop_(loop),
        loop_address_(loop.get()),
        here_(std::move(here)),
        capabilities_(capabilities_over(below->capabilities())),
        sender_(std::make_shared<Sender>(below, stage, capabilities_, loop)),
        receiver_(std::make_shared<Receiver>(below, stage, capabilities_, loop)) {}

  // Sends the hello and begins to receive, because the peer's hello may arrive before the user
  // calls receive().
  void start();
  // Called when the user's last reference is dropped.
  void drop() noexcept;

  std::string_view transport() const override { return "cuda_ipc"; }
  std::string peer() const override { return peer_; }
  const Capabilities& capabilities() const override { return capabilities_; }

  void receive(Handlers handlers) override;
  Op send(std::span<const std::byte> header, std::span<const Slice> payloads, Pin pin,
          Fence ready) noexcept override {
    return sender_->send(header, payloads, std::move(pin), std::move(ready));
  }
  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept override {
    return receiver_->accept(destinations, std::move(pin), std::move(ready));
  }
  void close(const Error& why) noexcept override { close(why, &Connection::close); }
  void turn_away(const Error& why) noexcept override { close(why, &Connection::turn_away); }

 private:
  enum class Phase { Hello, Reach, Messages };
  // A message that arrived before receive() was called.
  struct Kept {
    std::vector<std::byte> header;
    std::vector<std::uint64_t> sizes;
    Bytes in_place;  // stays until it is accepted
  };

  using Closing = void (Connection::*)(const Error&) noexcept;
  void close(const Error& why, Closing closing) noexcept;

  // The functions below run on the event loop.
  void arrived(const Arrival& below);
  std::optional<Error> meet(const Arrival& below);
  std::optional<Error> learn_reach(const Arrival& below);
  std::optional<Error> show(const Arrival& below);
  void lose(const Error& why);
  void closed(const Error& why);
  void end() noexcept;

  // Used by callers only; drop() resets it.
  std::shared_ptr<Connection> below_;
  const std::string peer_;
  const std::weak_ptr<EventLoop> loop_;
  EventLoop* const loop_address_;  // not owned, see Sender
  const Identity here_;
  const Capabilities capabilities_;
  const std::shared_ptr<Sender> sender_;
  const std::shared_ptr<Receiver> receiver_;
  std::atomic<bool> receives_{false};
  std::atomic<bool> dropped_{false};

  // Used on the event loop only.
  Phase phase_ = Phase::Hello;
  std::shared_ptr<Process> process_;
  std::optional<std::string> why_not_;
  std::optional<Handlers> handlers_;
  std::optional<Kept> kept_;
  std::optional<Error> lost_;    // why we closed the connection, if the peer is to blame
  std::optional<Error> closed_;  // the end, if it came before receive() was called
};

void CudaIpcConnection::start() {
  sender_->introduce(
      encode(Hello{here_, sender_->page()->name(), sender_->socket(), sender_->gpus()}));
  below_->receive({[weak = weak_from_this()](const Arrival& below) {
                     if (const auto self = weak.lock()) self->arrived(below);
                   },
                   [weak = weak_from_this()](const Error& why) {
                     if (const auto self = weak.lock()) self->closed(why);
                   }});
}

void CudaIpcConnection::receive(Handlers handlers) {
  if (!handlers.arrived || !handlers.closed) {
    throw Error(Blame::Caller, "receive from " + peer() + ": both handlers must be given");
  }
  if (receives_.exchange(true))
    throw Error(Blame::Caller, "receive from " + peer() + " was called before; once only");
  if (loop_.expired()) return;
  loop_address_->post([self = shared_from_this(), handlers = std::move(handlers)]() mutable {
    self->handlers_ = std::move(handlers);
    if (const auto kept = std::exchange(self->kept_, std::nullopt)) {
      if (const auto wrong = self->show({kept->header, kept->sizes, kept->in_place}))
        self->lose(*wrong);
    }
    if (self->closed_ && !self->dropped_) self->handlers_->closed(*self->closed_);
  });
}

void CudaIpcConnection::close(const Error& why, Closing closing) noexcept {
  const Error reason = why.within("the connection to " + peer() + " was closed here");
  if (!sender_->refuse(reason)) return;
  receiver_->refuse(reason);
  ((*below_).*closing)(why);
  // Posted, so that it runs after the connection below has ended its pending operations.
  if (!loop_.expired()) loop_address_->post([self = shared_from_this()] { self->end(); });
}

void CudaIpcConnection::drop() noexcept {
  dropped_ = true;
  close(Error(Blame::Cancelled, "the last reference to the connection was dropped"));
  // Drops the connection below here and not in a later turn of the loop, because it shares
  // ownership of the loop.
  sender_->let_go();
  receiver_->let_go();
  below_.reset();
}

void CudaIpcConnection::end() noexcept {
  receiver_->end();
  sender_->end();
}

void CudaIpcConnection::arrived(const Arrival& below) {
  if (dropped_ || lost_) return;
  std::optional<Error> wrong;
  switch (phase_) {
    case Phase::Hello: wrong = meet(below); break;
    case Phase::Reach: wrong = learn_reach(below); break;
    case Phase::Messages: wrong = show(below); break;
  }
  if (wrong) lose(*wrong);
}

std::optional<Error> CudaIpcConnection::meet(const Arrival& below) {
  auto hello = decode_hello(below.header);
  if (!hello) return hello.error();
  if (!below.sizes.empty()) return Error(Blame::Protocol, "the peer sent payloads with its hello");
  receiver_->take_introduction();
  phase_ = Phase::Reach;
  const Identity there = hello.value().identity;
  const PageName page = hello.value().page;
  std::uint32_t reached = 0;
  why_not_ = why_unreachable(here_, there);
  try {
    // On another host this process id would name some other process.
    if (!why_not_) {
      process_ = std::make_shared<Process>(there.process);
      reached = receiver_->meet(std::move(hello).value(), Page::open(there.process, page));
    }
  } catch (const Error& error) {
    if (error.blame() != Blame::Unsupported) return error;
    why_not_ = error.text();
  }
  sender_->introduce(encode_reach(reached));
  return std::nullopt;
}

std::optional<Error> CudaIpcConnection::learn_reach(const Arrival& below) {
  const auto reached = decode_reach(below.header);
  if (!reached) return reached.error();
  if (!below.sizes.empty()) return Error(Blame::Protocol, "the peer sent payloads with its reach");
  receiver_->take_introduction();
  phase_ = Phase::Messages;
  const std::string why = why_not_               ? *why_not_
                          : reached.value() == 0 ? "the peer can read none of our GPUs"
                                                 : "";
  log::info("cuda_ipc to " + peer() + ": " +
            (why.empty() ? "the peer reads device memory where it is"
                         : "device memory is sent over the connection below, because " + why));
  // A peer whose process or page this process cannot open is not allowed to read our memory.
  sender_->meet(
      process_, why_not_ ? 0 : reached.value(),
      why_not_
          ? peer() + " cannot open it: " + *why_not_
          : "it is of a second GPU, or there is no peer-to-peer access to it from the GPUs of " +
                peer());
  return std::nullopt;
}

std::optional<Error> CudaIpcConnection::show(const Arrival& below) {
  if (handlers_) return receiver_->take(below, handlers_->arrived);
  kept_.emplace();
  kept_->header.assign(below.header.begin(), below.header.end());
  kept_->sizes.assign(below.sizes.begin(), below.sizes.end());
  kept_->in_place = below.in_place;
  return std::nullopt;
}

void CudaIpcConnection::lose(const Error& why) {
  lost_ = why.within("the connection to " + peer() + " is lost");
  receiver_->refuse(*lost_);
  sender_->lose(*lost_);  // closed() follows
}

void CudaIpcConnection::closed(const Error& why) {
  const Error reason = lost_.value_or(why);
  sender_->refuse(reason);
  receiver_->refuse(reason);
  end();
  if (!handlers_) {
    closed_ = reason;
  } else if (!dropped_) {
    handlers_->closed(reason);
  }
}

// Callers' references point to this; see Holder in stream_connection.cc.
struct Holder {
  std::shared_ptr<EventLoop> loop;
  std::shared_ptr<CudaIpcConnection> connection;
  ~Holder() {
    connection->drop();
    if (loop->inside()) loop->post([last = loop] {});
  }
};

}  // namespace

bool fits(const Connection& below) { return below.transport() == "shm"; }

std::shared_ptr<Connection> over(std::shared_ptr<Connection> below,
                                 std::shared_ptr<staged::Stage> stage,
                                 const std::shared_ptr<EventLoop>& loop, const Identity& here) {
  if (stage->devices().size() > kMaxGpus) {
    throw Error(Blame::Unsupported, "cuda_ipc: " + std::to_string(stage->devices().size()) +
                                        " GPUs, but a connection supports " +
                                        std::to_string(kMaxGpus));
  }
  auto connection = std::make_shared<CudaIpcConnection>(below, stage, loop, here);
  connection->start();
  auto* const seen = connection.get();
  const auto holder = std::shared_ptr<Holder>(new Holder{loop, std::move(connection)});
  return {holder, seen};
}

}  // namespace weft::transport::cuda_ipc
