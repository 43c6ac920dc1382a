// msgpack-cxx as Weft uses it, and the packer that all of its adaptors write to.
#pragma once

#ifndef MSGPACK_NO_BOOST
#define MSGPACK_NO_BOOST
#endif
#include <msgpack.hpp>

#include <weft/engine/codec/buffer.h>

namespace weft::codec {

using Packer = msgpack::packer<Buffer>;

}  // namespace weft::codec
