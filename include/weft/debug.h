// SPDX-License-Identifier: Apache-2.0
// Inspecting an agent and injecting faults into its messages: rpc::DebugInfo, rpc::Faults,
// rpc::MessageKind. Marking training steps for those who watch the job: begin_step.
#pragma once

#include <weft/engine/call/types.h>
#include <weft/engine/instruments/steps.h>
