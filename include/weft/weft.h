// SPDX-License-Identifier: Apache-2.0
// All of Weft.
#pragma once

// clang-format off
// Included first, to keep short the list of including files that a compiler prints above its error.
#include <weft/engine/codec/refusals.h>
#include <weft/engine/call/refusals.h>
// clang-format on

#include <weft/autograd.h>
#include <weft/checkpoint.h>
#include <weft/codec.h>
#include <weft/debug.h>
#include <weft/error.h>
#include <weft/fully_shard.h>
#include <weft/functional.h>
#include <weft/future.h>
#include <weft/group.h>
#include <weft/mesh.h>
#include <weft/objects.h>
#include <weft/optim.h>
#include <weft/parallel.h>
#include <weft/rpc.h>
#include <weft/training.h>
#include <weft/version.h>
