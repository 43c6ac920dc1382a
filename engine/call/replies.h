// SPDX-License-Identifier: Apache-2.0
// Replies to outgoing calls: decodes them and completes the calls that wait for them.
#pragma once

#include <cstdint>

#include <weft/base/error.h>
#include <weft/engine/call/message.h>
#include <weft/engine/call/types.h>

namespace weft::call {

class AgentCore;

// A reply, or the failure of a call, has come from the worker by that connection. With `lacking`,
// there was no memory for it, and it has no storages. On the loop; nothing here blocks.
void reply_arrived(AgentCore& core, const WorkerInfo& worker, std::uint64_t connection_number,
                   Message message, const Error* lacking);

}  // namespace weft::call
