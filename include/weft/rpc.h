// Remote procedure calls: rpc::init, Agent, RemoteError, expose.
#pragma once

#include <weft/engine/rpc/agent.h>
#include <weft/codec.h>
#include <weft/debug.h>
#include <weft/future.h>
