// Looking inside an agent, and breaking its messages on purpose: rpc::DebugInfo, rpc::Faults, rpc::MessageKind.
#pragma once

#include <weft/engine/rpc/types.h>
