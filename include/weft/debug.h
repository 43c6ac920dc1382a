// Looking inside an agent, and breaking its messages on purpose: rpc::DebugInfo, rpc::Faults,
// rpc::MessageKind. Marking training steps for whoever looks at the job: begin_step.
#pragma once

#include <weft/engine/call/types.h>
#include <weft/engine/instruments/steps.h>
