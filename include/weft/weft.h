// All of Weft.
#pragma once

// clang-format off
// First, since a compiler prints through which files it came to the sentence of an error.
#include <weft/engine/codec/refusals.h>
#include <weft/engine/call/refusals.h>
// clang-format on

#include <weft/autograd.h>
#include <weft/checkpoint.h>
#include <weft/codec.h>
#include <weft/debug.h>
#include <weft/error.h>
#include <weft/functional.h>
#include <weft/future.h>
#include <weft/group.h>
#include <weft/objects.h>
#include <weft/optim.h>
#include <weft/parallel.h>
#include <weft/rpc.h>
#include <weft/version.h>
