// SPDX-License-Identifier: Apache-2.0
// The errors of outgoing calls, as their callers see them. Usable from every thread; nothing here
// blocks.
#pragma once

#include <string>

#include <weft/base/error.h>
#include <weft/engine/call/function.h>
#include <weft/engine/call/pending.h>

namespace weft::call {

class AgentCore;

// Names the call in errors: "f on worker1 (rank 1), called by worker0 (rank 0)".
std::string in_words(AgentCore& core, const Function* function, const std::string& to);
// The call has not been answered within its time limit. Says why, as far as this side knows.
Error not_in_time(AgentCore& core, const WaitingCall& call, const std::string& to);
// This agent has left while the call was pending.
Error left(AgentCore& core, const WaitingCall& call, const std::string& to);
// The connection to the worker has failed, for that reason.
Error gone(AgentCore& core, const Error& why, int rank);

}  // namespace weft::call
