// Ranges and marks of threads, for Nsight Systems (NVTX domain "weft", one category per layer) and for the timeline
// (timeline.h). Without a tool and without a timeline a range costs two calls that look and return; with WEFT_TRACE=OFF it
// is an empty object and nothing is called. What begins on one thread and ends on another is an Operation (operation.h).
//
//   constinit trace::Name kAllReduce{trace::Layer::Transport, "all_reduce"};
//   trace::Range range(kAllReduce, {.bytes = slice.bytes, .rank = rank, .ranks = ranks});
//
// Everything may be used from every thread; a Range begins and ends on one thread and shows the host's time there, not the
// device's. Nothing here blocks or throws.
#pragma once

#include <atomic>
#include <cstdint>

namespace weft::trace {

// Which row of the timeline a name belongs to. The numbers are NVTX category ids.
enum class Layer : std::uint32_t { Base = 1, Cuda, Kernels, Transport, Engine, User };

// Two spellings of the same types, so that a program may mix objects that were compiled with and without tracing.
#if WEFT_TRACE_ENABLED
inline namespace enabled {

// A name of ranges and marks, registered with the tool when it is first used. Has static lifetime.
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

// What an operation is about. NCCL's own domain calls these "Message size [bytes]", "Reduction operation", "Rank",
// "No. of ranks" and "CUDA device"; ours are called the same, so that Nsight's tables join. -1: not known.
struct Payload {
  std::uint64_t bytes = 0;
  Name* operation = nullptr;
  std::int32_t rank = -1;
  std::int32_t ranks = -1;
  std::int32_t device = -1;
};

// A range of this thread, from construction to destruction. Ranges of one thread nest.
class [[nodiscard]] Range {
 public:
  explicit Range(Name& name) noexcept;
  Range(Name& name, const Payload& payload) noexcept;
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

// A point in time of this thread.
void mark(Name& name) noexcept;
void mark(Name& name, const Payload& payload) noexcept;

}  // namespace enabled
#else
inline namespace disabled {

class Name {
 public:
  constexpr Name(Layer, const char*) {}
};

struct Payload {
  std::uint64_t bytes = 0;
  Name* operation = nullptr;
  std::int32_t rank = -1;
  std::int32_t ranks = -1;
  std::int32_t device = -1;
};

class [[nodiscard]] Range {
 public:
  constexpr explicit Range(Name&) noexcept {}
  constexpr Range(Name&, const Payload&) noexcept {}
  constexpr ~Range() {}
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

constexpr void mark(Name&) noexcept {}
constexpr void mark(Name&, const Payload&) noexcept {}

}  // namespace disabled
#endif

}  // namespace weft::trace
