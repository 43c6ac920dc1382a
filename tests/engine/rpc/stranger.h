// SPDX-License-Identifier: Apache-2.0
// A peer that connects to an agent and writes its messages by hand, for tests of how agents treat
// peers.
#pragma once

#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <weft/engine/call/core.h>
#include <weft/engine/call/message.h>
#include <weft/engine/call/wire_records.h>
#include <weft/rpc.h>

namespace weft::harness {

class Stranger {
 public:
  // A peer that does not read sees no answer.
  enum class Reads { Yes, No };

  Stranger(rpc::Agent& agent, const std::string& transport, Reads reads = Reads::Yes)
      : routes_({transport}) {
    const auto offers = agent.shared_core()->directory().find(agent.self().rank).offers;
    connection_ = routes_.connect(offers, {loop_, Deadline::in(std::chrono::seconds(20))});
    if (reads == Reads::Yes) read();
  }
  ~Stranger() { connection_->close(Error(Blame::Cancelled, "enough")); }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  // Begins to read.
  void read() {
    connection_->receive({[this](const transport::Arrival& arrival) { arrived(arrival); },
                          [this](const Error&) {
                            std::lock_guard lock(mutex_);
                            ended_ = true;
                          }});
  }

  void challenge(std::span<const std::byte> body) { call::send_challenge(*connection_, body); }
  // Sends a hello with the right token, as `rank` of the agent's job would.
  void greet(rpc::Agent& agent, int rank) {
    say(call::FrameKind::Hello,
        std::tuple(call::kWireVersion, agent.shared_core()->identity().token,
                   rpc::WorkerInfo{"stranger", rank}, agent.self(), call::Generation{0},
                   agent.shared_core()->identity().generation));
  }
  template <class T>
  Op say(call::FrameKind kind, const T& value) {
    call::Head head;
    head.kind = kind;
    head.call = 1;
    return say(head, value);
  }
  template <class T>
  Op say(const call::Head& head, const T& value) {
    return call::send_message(*connection_, head, codec::Writer().write([&](codec::Packer& packer) {
      packer.pack(value);
    }));
  }
  // Sends call `number` of function F.
  template <auto F, class... A>
  Op call(std::uint64_t number, rpc::MessageKind kind, const A&... arguments) {
    const call::Identity id = call::detail::Called<call::detail::FunctionBody<F>>::entered.id;
    call::Head head;
    head.kind = call::FrameKind::Call;
    head.message = static_cast<std::uint8_t>(kind);
    head.call = number;
    head.name = id.name;
    head.signature = id.signature;
    return say(head, std::tuple<A...>(arguments...));
  }

  // Sends a call of F that creates the value `id`, with fork `id + 1`.
  template <auto F, class... A>
  Op create(std::uint64_t number, std::uint64_t id, const A&... arguments) {
    const call::Identity entered = rref::detail::Created<call::detail::FunctionBody<F>>::entered.id;
    call::Head head;
    head.kind = call::FrameKind::Call;
    head.message = static_cast<std::uint8_t>(rpc::MessageKind::Create);
    head.call = number;
    head.name = entered.name;
    head.signature = entered.signature;
    return say(head, std::tuple(id, id + 1, std::tuple<A...>(arguments...)));
  }

  struct Said {
    call::Head head;
    std::vector<std::byte> body;
    call::FailureRecord failure() const {
      call::FailureRecord record;
      codec::Reader({}).read(body, [&](const msgpack::object& object) { object.convert(record); });
      return record;
    }
  };
  // Waits for the agent's next message; nothing if it ended the connection.
  std::optional<Said> next() {
    wait();
    std::lock_guard lock(mutex_);
    if (said_.empty()) return std::nullopt;
    auto one = std::move(said_.front());
    said_.pop_front();
    return one;
  }
  // Waits for the answer to a challenge; nothing if another message came, or the end.
  std::optional<std::vector<std::byte>> challenge_answered() {
    auto said = next();
    if (!said || said->head.kind != call::FrameKind::Challenge) return std::nullopt;
    return std::move(said->body);
  }
  // Whether the agent has ended the connection.
  bool has_ended() {
    std::lock_guard lock(mutex_);
    return ended_;
  }
  // Waits; whether the agent ended the connection without a message before.
  bool is_refused() {
    wait();
    std::lock_guard lock(mutex_);
    return said_.empty() && ended_;
  }

 private:
  void arrived(const transport::Arrival& arrival) {
    const auto parsed = call::parse_head(arrival.header, arrival.sizes.size());
    {
      std::lock_guard lock(mutex_);
      if (parsed)
        said_.push_back(
            {parsed.value().head, {parsed.value().rest.begin(), parsed.value().rest.end()}});
    }
    connection_->accept({}, nullptr, Fence());
  }
  void wait() {
    const auto anything = [&] {
      std::lock_guard lock(mutex_);
      return !said_.empty() || ended_;
    };
    loop_->drive(anything, Deadline::in(std::chrono::seconds(20)));
  }

  std::shared_ptr<EventLoop> loop_ = std::make_shared<EventLoop>("stranger");
  transport::Routes routes_;
  std::shared_ptr<transport::Connection> connection_;
  std::mutex mutex_;
  std::deque<Said> said_;
  bool ended_ = false;
};

}  // namespace weft::harness
