// SPDX-License-Identifier: Apache-2.0
// Remote procedure calls: rpc::init, Agent, RemoteError, expose, remote_parameters. Checkpoints of
// such jobs: JobPart.
#pragma once

// clang-format off
// Included first, to keep short the list of including files that a compiler prints above its error.
#include <weft/engine/call/refusals.h>
#include <weft/engine/rpc/agent.h>
// clang-format on

#include <weft/codec.h>
#include <weft/debug.h>
#include <weft/engine/checkpoint/job_checkpoint.h>
#include <weft/engine/rref/remote_parameters.h>
#include <weft/future.h>
