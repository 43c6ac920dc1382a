// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <utility>

#include <weft/transport/staged/staged_connection.h>
#include <weft/transport/staged/staged_frame.h>
#include <weft/transport/staged/staged_inbox.h>
#include <weft/transport/staged/staged_outbox.h>

namespace weft::transport::staged {

namespace {

class StagedConnection final : public Connection,
                               public std::enable_shared_from_this<StagedConnection> {
 public:
  StagedConnection(const std::shared_ptr<Connection>& below, const std::shared_ptr<Stage>& stage,
                   const std::shared_ptr<EventLoop>& loop)
      : below_(below),
        transport_(below->transport()),
        peer_(below->peer()),
        loop_(loop),
        loop_address_(loop.get()),
        capabilities_(capabilities_over(below->capabilities())),
        outbox_(std::make_shared<Outbox>(below, stage, capabilities_, loop)),
        inbox_(std::make_shared<Inbox>(below, stage, capabilities_, loop)) {}

  std::string_view transport() const override { return transport_; }
  std::string peer() const override { return peer_; }
  const Capabilities& capabilities() const override { return capabilities_; }

  void receive(Handlers handlers) override;
  Op send(std::span<const std::byte> header, std::span<const Slice> payloads, Pin pin,
          Fence ready) noexcept override {
    return outbox_->send(header, payloads, std::move(pin), std::move(ready));
  }
  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept override {
    return inbox_->accept(destinations, std::move(pin), std::move(ready));
  }
  void close(const Error& why) noexcept override { close(why, &Connection::close); }
  void turn_away(const Error& why) noexcept override { close(why, &Connection::turn_away); }
  // Called when the last outside reference is dropped.
  void drop() noexcept;

 private:
  using Closing = void (Connection::*)(const Error&) noexcept;
  void close(const Error& why, Closing closing) noexcept;

  // These run on the loop.
  void arrived(const Handlers& handlers, const Arrival& below);
  void closed(const Handlers& handlers, const Error& why);
  void end() noexcept;

  std::shared_ptr<Connection> below_;  // used only by callers that hold this
  const std::string transport_;
  const std::string peer_;
  const std::weak_ptr<EventLoop> loop_;
  EventLoop* const loop_address_;  // not an owning reference, see Outbox::loop()
  const Capabilities capabilities_;
  const std::shared_ptr<Outbox> outbox_;
  const std::shared_ptr<Inbox> inbox_;
  std::atomic<bool> dropped_{false};
  std::optional<Error> lost_;  // the peer's violation that ended it; used on the loop only
};

void StagedConnection::receive(Handlers handlers) {
  if (!handlers.arrived || !handlers.closed) {
    throw Error(Blame::Caller, "receive from " + peer() + ": both handlers must be given");
  }
  const auto kept = std::make_shared<const Handlers>(std::move(handlers));
  below_->receive({[weak = weak_from_this(), kept](const Arrival& below) {
                     if (const auto self = weak.lock()) self->arrived(*kept, below);
                   },
                   [weak = weak_from_this(), kept](const Error& why) {
                     if (const auto self = weak.lock()) self->closed(*kept, why);
                   },
                   kept->in_place});
}

void StagedConnection::close(const Error& why, Closing closing) noexcept {
  const Error reason = why.within("the connection to " + peer() + " was closed here");
  if (!outbox_->refuse(reason)) return;
  inbox_->refuse(reason);
  ((*below_).*closing)(why);
  // After the operations that the connection below ends, which were sent earlier.
  if (!loop_.expired()) loop_address_->post([self = shared_from_this()] { self->end(); });
}

void StagedConnection::drop() noexcept {
  dropped_ = true;
  close(Error(Blame::Cancelled, "its last reference was dropped"));
  // Here, and not in a later turn of the loop, because below_ shares the loop.
  outbox_->let_go();
  inbox_->let_go();
  below_.reset();
}

void StagedConnection::end() noexcept {
  inbox_->end();
  outbox_->end();
}

void StagedConnection::arrived(const Handlers& handlers, const Arrival& below) {
  if (dropped_) return;
  const auto wrong = inbox_->take(below, handlers.arrived);
  if (!wrong || lost_) return;
  lost_ = Error(Blame::Protocol, "the connection to " + peer() +
                                     " is lost: the peer sent an invalid message, " + *wrong);
  inbox_->refuse(*lost_);
  outbox_->lose(*lost_);  // closed() follows
}

void StagedConnection::closed(const Handlers& handlers, const Error& why) {
  const Error reason = lost_.value_or(why);
  outbox_->refuse(reason);
  inbox_->refuse(reason);
  end();
  if (!dropped_) handlers.closed(reason);
}

// The object that callers own; see StreamConnection's Holder.
struct Holder {
  std::shared_ptr<EventLoop> loop;
  std::shared_ptr<StagedConnection> connection;
  ~Holder() {
    connection->drop();
    if (loop->inside()) loop->post([last = loop] {});
  }
};

class StagedConnector final : public Connector {
 public:
  StagedConnector(Connector& below, std::shared_ptr<Stage> stage)
      : below_(below), stage_(std::move(stage)) {}

  Capabilities capabilities() const override { return capabilities_over(below_.capabilities()); }
  int preference() const override { return below_.preference(); }
  std::optional<std::string> why_unreachable(const std::string& address) const override {
    return below_.why_unreachable(address);
  }
  std::unique_ptr<Listener> listen(const ListenOptions& options) override {
    ListenOptions own = options;
    own.accepted = [stage = stage_, loop = std::weak_ptr(options.loop),
                    accepted = options.accepted](auto connection) {
      if (const auto here = loop.lock()) accepted(over(std::move(connection), stage, here));
    };
    return below_.listen(own);
  }
  std::shared_ptr<Connection> connect(const std::string& address,
                                      const ConnectOptions& options) override {
    return over(below_.connect(address, options), stage_, options.loop);
  }

 private:
  Connector& below_;
  std::shared_ptr<Stage> stage_;
};

}  // namespace

std::shared_ptr<Connection> over(std::shared_ptr<Connection> below, std::shared_ptr<Stage> stage,
                                 const std::shared_ptr<EventLoop>& loop) {
  auto connection = std::make_shared<StagedConnection>(below, stage, loop);
  auto* const seen = connection.get();
  const auto holder = std::shared_ptr<Holder>(new Holder{loop, std::move(connection)});
  return {holder, seen};
}

std::unique_ptr<Connector> over(Connector& below, std::shared_ptr<Stage> stage) {
  return std::make_unique<StagedConnector>(below, std::move(stage));
}

}  // namespace weft::transport::staged
