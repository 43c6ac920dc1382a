// With WEFT_DEBUG=detail: what a message's tensors were when it was packed, to find those that
// somebody changes while their bytes are being sent. The receiver gets old and new bytes in one
// tensor then.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/codec/tensors.h>

namespace weft::codec {

// Filled by the thread that packs; changed() may be called once on any other, when the bytes have
// been sent.
class SentBytes {
 public:
  // Notes its version counter, which operations in place raise.
  void add(const at::Tensor& tensor);
  // Notes a checksum of the bytes in host memory, for what raises no counter: .data(), memory given
  // to from_blob.
  void add(const std::vector<Part>& parts);
  // Says which of them is not as it was; nothing where all are.
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
