// Remote procedure calls: rpc::init, Agent, RemoteError, expose.
#pragma once

#include <weft/codec.h>
#include <weft/debug.h>
#include <weft/engine/rpc/agent.h>
#include <weft/future.h>
