// SPDX-License-Identifier: Apache-2.0
// weft::encode, weft::decode, WEFT_FIELDS, weft::state_of.
#pragma once

// clang-format off
// Included first, to keep short the list of including files that a compiler prints above its error.
#include <weft/engine/codec/refusals.h>
// clang-format on

#include <weft/engine/codec/codec.h>
#include <weft/engine/codec/module_state.h>
#include <weft/error.h>
