// SPDX-License-Identifier: Apache-2.0
#include <weft/base/make_error.h>
#include <weft/engine/call/remote_incoming_call.h>

namespace weft::call {

void RemoteIncomingCall::reply(const std::function<void(codec::Packer&)>& pack) noexcept {
  slot_ = {};  // before the answer, here and below: the caller may take the slot at once
  const auto inbound = inbound_.lock();
  if (!inbound) return;
  if (state_->cancelled)
    return inbound->fail(call_, answer_, Failure::Refused,
                         Error(Blame::Cancelled, "nobody waits for it"));
  inbound->reply(call_, answer_, function_, *state_, pack);
}

void RemoteIncomingCall::fail(const std::exception_ptr& error) noexcept {
  slot_ = {};
  const Error thrown =
      Error(Blame::Remote, text_of(error)).with_ranks(to_error(error, Blame::Remote).ranks());
  // The questions of a shutdown fail when the agent leaves, and shutdown() says so.
  if (answer_ != MessageKind::Shutdown) log_thrown(function_, state_->caller, thrown.text());
  if (const auto inbound = inbound_.lock()) inbound->fail(call_, answer_, Failure::Thrown, thrown);
}

void RemoteIncomingCall::refuse(const std::exception_ptr& error) noexcept {
  slot_ = {};
  const auto inbound = inbound_.lock();
  if (!inbound) return;
  try {
    std::rethrow_exception(error);
  } catch (const CreationError& caught) {
    inbound->fail(call_, answer_, Failure::NotCreated, caught);
  } catch (...) {
    inbound->fail(call_, answer_, Failure::Refused, to_error(error, Blame::Caller));
  }
}

}  // namespace weft::call
