// SPDX-License-Identifier: Apache-2.0
// With WEFT_DEBUG=detail: remembers the state of a message's tensors when it was packed, to find
// those that the program changes while their bytes are being sent. The receiver would get old and
// new bytes in one tensor.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/codec/tensors.h>

namespace weft::codec {

// Filled by the thread that packs. changed() may be called once, on any thread, when the bytes have
// been sent.
class SentBytes {
 public:
  // Notes the tensor's version counter, which operations in place raise.
  void add(const at::Tensor& tensor);
  // Notes a checksum of the bytes in host memory, for changes that raise no counter: through
  // .data(), or to memory given to from_blob.
  void add(const std::vector<Part>& parts);
  // Describes the first change; nullopt if there is none.
  std::optional<std::string> changed() const;

 private:
  struct Versioned {
    at::Tensor tensor;
    std::uint32_t version = 0;
  };
  struct Summed {
    Part part;
    std::size_t sum = 0;
  };
  std::vector<Versioned> versions_;
  std::vector<Summed> sums_;
};

}  // namespace weft::codec
