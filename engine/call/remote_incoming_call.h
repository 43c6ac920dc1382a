// SPDX-License-Identifier: Apache-2.0
// An incoming call from another worker. Owned by the tasks that run it; see IncomingCall for its
// threads. Nothing here blocks.
#pragma once

#include <weft/engine/call/in_flight.h>
#include <weft/engine/call/inbound.h>
#include <weft/engine/call/incoming_call.h>

namespace weft::call {

// An incoming call, answered over the connection that it came by.
class RemoteIncomingCall final : public IncomingCall {
 public:
  RemoteIncomingCall(std::shared_ptr<AgentCore> core, const Function& function, bool on_loop,
                     std::shared_ptr<CallState> state, std::weak_ptr<Inbound> inbound,
                     std::uint64_t call, MessageKind answer, Slot slot)
      : IncomingCall(std::move(core), function, on_loop, std::move(state)),
        inbound_(std::move(inbound)),
        call_(call),
        answer_(answer),
        slot_(std::move(slot)) {}

  void reply(const std::function<void(codec::Packer&)>& pack) noexcept override;
  void fail(const std::exception_ptr& error) noexcept override;
  void refuse(const std::exception_ptr& error) noexcept override;

 private:
  const std::weak_ptr<Inbound> inbound_;
  const std::uint64_t call_;
  const MessageKind answer_;
  Slot slot_;
};

}  // namespace weft::call
