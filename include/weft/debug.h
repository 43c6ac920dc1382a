// SPDX-License-Identifier: Apache-2.0
// Inspecting an agent and injecting faults into its messages: rpc::DebugInfo, rpc::Faults,
// rpc::MessageKind. Marking training steps and ranges for those who watch the job: begin_step,
// Range.
#pragma once

#include <weft/engine/call/types.h>
#include <weft/engine/instruments/range.h>
#include <weft/engine/instruments/steps.h>
