// SPDX-License-Identifier: Apache-2.0
// The parts of mesh_fuzz.cc that its test uses.
#pragma once

#include <cstddef>

#include <weft/transport/mesh/wire.h>

namespace weft::transport::mesh {

constexpr std::size_t kRecordBytes = 4 + kHeaderBytes;

// How the operations that the input issued have ended.
struct Outcome {
  std::size_t done = 0;
  std::size_t failed = 0;
  std::size_t pending = 0;  // until the communicator was destroyed
};

Outcome fuzz_mesh(Bytes input);

}  // namespace weft::transport::mesh
