// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/message.h>
#include <weft/engine/call/peer.h>
#include <weft/engine/call/replies.h>
#include <weft/engine/call/wire_records.h>

namespace weft::call {

namespace {

// The time that a connection may take at least, even if the time limit of calls is shorter: a
// worker that lives accepts it without its program's help.
constexpr std::chrono::milliseconds kConnecting = std::chrono::seconds(5);
constexpr std::chrono::milliseconds kConnectingWithoutLimit = std::chrono::minutes(1);

}  // namespace

Peer::Numbered Peer::connection(const transport::Routes& routes) {
  const auto core = core_.lock();
  MutexLock lock(mutex_);
  if (!core) throw Error(Blame::Cancelled, "the agent has left");
  if (closed_) throw Error(*closed_);
  if (present_.connection) return present_;
  Numbered made;
  const std::string& secret = core->options().secret;
  if (!secret.empty()) made.gate = std::make_shared<Gate>(secret);
  made.connection = connect(*core, routes);
  made.number = core->connections().next_number();
  log::info(describe(core->self()) + " reaches " + describe(entry_.worker) + " by " +
            std::string(made.connection->transport()) + " (" + made.connection->peer() + ")");
  transport::Connection& connection = *made.connection;
  if (made.gate) {
    send_challenge(connection, made.gate->challenge.open());
  } else if (greets_) {
    greet(*core, connection);
  }
  made.connection->receive(
      {[weak = weak_from_this(), number = made.number, gate = made.gate,
        &connection](const transport::Arrival& arrival) {
         const auto self = weak.lock();
         if (!self) return;
         self->heard_by_.store(number, std::memory_order_relaxed);
         if (gate && !gate->is_open()) return self->answered(number, connection, *gate, arrival);
         self->arrived(number, connection, arrival);
       },
       [weak = weak_from_this(), number = made.number, gate = made.gate](const Error& why) {
         if (const auto self = weak.lock()) self->ended(number, why);
         if (gate) gate->open();
       }});
  present_ = made;
  return made;
}

Peer::Numbered Peer::standing_connection() const {
  MutexLock lock(mutex_);
  return present_;
}

// Makes a connection that carries device memory if a map says that there will be some.
std::shared_ptr<transport::Connection> Peer::connect(AgentCore& core,
                                                     const transport::Routes& routes) const {
  // Not limited by the call that connects: others will wait for the same connection.
  const auto limit = core.outgoing_calls().timeout();
  const Deadline deadline =
      Deadline::in(limit.count() == 0 ? kConnectingWithoutLimit : std::max(limit, kConnecting));
  const transport::ConnectOptions options{
      .loop = core.loop(), .deadline = deadline, .has_listened = true};
  if (!map_.has_gpus() && !map_back_.has_gpus())
    return routes.connect(entry_.offers, options, failed_);
  if (entry_.device_offers.empty()) {
    throw Error(
        Blame::Unsupported,
        describe(entry_.worker) +
            " is built without CUDA (WEFT_CUDA=OFF) and takes no tensors of GPUs: leave it out of "
            "rpc::Options::device_maps");
  }
  return core.devices().cuda().connection_over(
      routes.connect(entry_.device_offers, options, failed_), core.loop());
}

void Peer::greet(AgentCore& core, transport::Connection& connection) {
  Head head;
  head.kind = FrameKind::Hello;
  send_message(connection, head,
               encoded(HelloRecord{kWireVersion, core.identity().token, core.self(), entry_.worker,
                                   core.identity().generation, entry_.generation}));
}

// The worker's answer to the challenge. If it is right, everything that waits at the gate is sent.
void Peer::answered(std::uint64_t number, transport::Connection& connection, Gate& gate,
                    const transport::Arrival& arrival) {
  const auto core = core_.lock();
  if (!core) return;
  const auto answer =
      gate.challenge.answer(challenge_in(arrival).value_or(std::span<const std::byte>()));
  connection.accept({}, nullptr, Fence());
  if (!answer) {
    const Error why(Blame::Caller,
                    describe(entry_.worker) + " does not know the secret of " +
                        describe(core->self()) +
                        ": give all workers of the job the same rpc::Options::secret");
    connection.close(why);
    ended(number, why);
    return gate.open();
  }
  send_challenge(connection, answer.value());
  if (greets_) greet(*core, connection);
  gate.open();
}

void Peer::arrived(std::uint64_t number, transport::Connection& connection,
                   const transport::Arrival& arrival) {
  const auto core = core_.lock();
  if (!core) return;
  receive_message(
      connection, arrival, core->devices().receive_memory(), &core->devices().cuda(),
      [core, self = shared_from_this(), number](Message message, const Error* lacking) {
        const auto kind = message.head.kind;
        if (kind == FrameKind::Reply || kind == FrameKind::Failure)
          reply_arrived(*core, self->worker(), number, std::move(message), lacking);
      },
      [&](const Error& why) {
        connection.close(why);
        ended(number, why);
      });
}

void Peer::ended(std::uint64_t number, const Error& why) {
  Numbered lost;  // destroyed outside the lock, with the tasks that wait at its gate
  {
    MutexLock lock(mutex_);
    if (present_.number == number) lost = std::exchange(present_, {});
    const bool is_of_transport = ends_connection(why.blame()) || why.blame() == Blame::Timeout;
    if (lost.connection && heard_by_ != number && is_of_transport) {
      failed_.insert_or_assign(std::string(lost.connection->transport()), why.text());
    }
  }
  const auto core = core_.lock();
  if (!core) return;
  greets_ ? core->connections().ended(*this, number, why)
          : core->outgoing_calls().knock_ended(worker(), number, why);
}

std::uint64_t Peer::close(const Error& why) noexcept {
  Numbered last;
  {
    MutexLock lock(mutex_);
    if (!closed_) closed_ = why;
    last = std::exchange(present_, {});
  }
  if (last.connection) last.connection->close(why);
  if (last.gate) last.gate->open();
  return last.number;
}

void Peer::knock(const Numbered& to, std::uint64_t call) {
  const auto core = core_.lock();
  if (!core) return;
  Head head;
  head.kind = FrameKind::Hello;
  head.call = call;
  const HelloRecord hello{
      kWireVersion,     core->identity().token, {core->self().name, kProbesOnly}, entry_.worker, 0,
      entry_.generation};
  to.pass([connection = to.connection, head, hello] {
    send_message(*connection, head,
                 codec::Writer().write([&](codec::Packer& packer) { packer.pack(hello); }));
  });
}

}  // namespace weft::call
