// SPDX-License-Identifier: Apache-2.0
// The names of ranges and marks, and their payloads (trace.h). Everything may be used from
// any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace weft::trace {

// The layer of a name: each has an NVTX domain and is a category of the timeline's events.
enum class Layer : std::uint32_t { Base, Cuda, Kernels, Transport, Engine, User };
constexpr std::size_t kLayers = 6;
const char* name(Layer layer) noexcept;  // "base", "cuda", …

// Two namespaces for the same types, so that a program may mix objects that were compiled with and
// without tracing.
#if WEFT_TRACE_ENABLED
inline namespace enabled {

// A name of ranges and marks, registered with the tool at its first use. Has static lifetime.
class Name {
 public:
  constexpr Name(Layer layer, const char* text) : layer_(layer), text_(text) {}
  Layer layer() const { return layer_; }
  const char* text() const { return text_; }

 private:
  friend struct Attributes;
  Layer layer_;
  const char* text_;
  std::atomic<void*> registered_{nullptr};  // nvtxStringHandle_t
};

// Describes an operation. The fields have the names of NCCL's own domain, "Message size
// [bytes]", "Reduction operation", "Rank", "No. of ranks" and "CUDA device", so that Nsight's
// tables join. -1: not known.
struct Payload {
  std::uint64_t bytes = 0;
  const char* reduction = "";  // "Sum"; has static lifetime
  std::int32_t rank = -1;
  std::int32_t ranks = -1;
  std::int32_t device = -1;
};

}  // namespace enabled
#else
inline namespace disabled {

class Name {
 public:
  constexpr Name(Layer, const char*) {}
  static constexpr Layer layer() { return Layer::User; }
  static constexpr const char* text() { return ""; }
};

struct Payload {
  std::uint64_t bytes = 0;
  const char* reduction = "";
  std::int32_t rank = -1;
  std::int32_t ranks = -1;
  std::int32_t device = -1;
};

}  // namespace disabled
#endif

}  // namespace weft::trace
