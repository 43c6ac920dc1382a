// weft::encode, weft::decode, WEFT_FIELDS.
#pragma once

#include <weft/engine/codec/codec.h>
#include <weft/error.h>
