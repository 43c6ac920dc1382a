// weft::encode, weft::decode, WEFT_FIELDS, weft::state_of.
#pragma once

#include <weft/engine/codec/codec.h>
#include <weft/engine/codec/module_state.h>
#include <weft/error.h>
