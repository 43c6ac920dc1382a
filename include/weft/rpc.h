// Remote procedure calls: rpc::init, Agent, RemoteError, expose.
#pragma once

// clang-format off
// First, since a compiler prints through which files it came to the sentence of an error.
#include <weft/engine/call/refusals.h>
// clang-format on

#include <weft/codec.h>
#include <weft/debug.h>
#include <weft/engine/rpc/agent.h>
#include <weft/future.h>
