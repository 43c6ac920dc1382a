// What the driver of mesh_fuzz.cc needs of it.
#pragma once

#include <cstddef>

#include <weft/transport/mesh/wire.h>

namespace weft::transport::mesh {

constexpr std::size_t kRecordBytes = 4 + kHeaderBytes;

// How the operations ended that the input called.
struct Outcome {
  std::size_t done = 0;
  std::size_t failed = 0;
  std::size_t pending = 0;  // until the communicator went
};

Outcome fuzz_mesh(Bytes input);

}  // namespace weft::transport::mesh
