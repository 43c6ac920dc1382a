// weft::encode, weft::decode, WEFT_FIELDS, weft::state_of.
#pragma once

// clang-format off
// First, since a compiler prints through which files it came to the sentence of an error.
#include <weft/engine/codec/refusals.h>
// clang-format on

#include <weft/engine/codec/codec.h>
#include <weft/engine/codec/module_state.h>
#include <weft/error.h>
