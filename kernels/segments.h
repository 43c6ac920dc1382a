// SPDX-License-Identifier: Apache-2.0
// The one CUDA implementation: a grid over the elements of many tensors, in one launch. The host
// fills a Launch, which is the kernel's only parameter; every block runs run_block. All of it is
// plain code for both host and device, so tests run the same grid on the host.
//
// A segment is one tensor of each array. Segments are cut into chunks of kChunk elements; block b
// takes the chunks b, b + blocks, … and finds each chunk's segment by binary search. Neighbouring
// threads access neighbouring addresses: 16 bytes at a time for the widest array if all addresses
// of the segment are aligned for that, else one element at a time. A thread loads about 64 bytes
// before it uses the first; with 1024 threads a processor, 64 KiB are in flight, about twice the 36
// KiB that cover HBM's latency on an H200 (4.8 TB/s times 1 µs over 132 processors).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include <weft/kernels/elements.h>

#if defined(__CUDACC__)
#define WEFT_UNROLL _Pragma("unroll")
#else
#define WEFT_UNROLL
#endif

namespace weft::kernels {

constexpr unsigned kThreads = 256;  // in a block
// The least number of resident blocks; __launch_bounds__ limits the registers for it.
constexpr unsigned kBlocksPerProcessor = 4;
// A small parameter is copied faster, and drivers before CUDA 12.1 accept no larger one.
constexpr std::size_t kFewBytes = 4096;
// The largest parameter of a kernel since CUDA 12.1 (compute capability 7.0).
constexpr std::size_t kManyBytes = 32764;

template <class Operation, unsigned kCapacity>
struct Launch {
  static constexpr unsigned kArrays = Operation::Arrays::kCount;
  static constexpr unsigned kSegments = kCapacity;

  Operation operation;
  std::uint32_t segments;
  std::uint32_t chunks;                // of all segments
  std::uint32_t chunk_end[kCapacity];  // the number of chunks of segments 0 to i
  std::uint64_t elements[kCapacity];
  void* arrays[kArrays][kCapacity];
};

// Returns how many segments fit a parameter of `bytes` bytes.
template <class Operation>
constexpr unsigned capacity(std::size_t bytes) {
  constexpr std::size_t kPerSegment =
      sizeof(std::uint32_t) + sizeof(std::uint64_t) + Operation::Arrays::kCount * sizeof(void*);
  // With 2 segments the arrays have no padding.
  constexpr std::size_t kFixed = sizeof(Launch<Operation, 2>) - 2 * kPerSegment;
  return static_cast<unsigned>((bytes - kFixed) / kPerSegment) & ~1u;
}
template <class Operation>
using SingleLaunch = Launch<Operation, 1>;
template <class Operation>
using FewLaunch = Launch<Operation, capacity<Operation>(kFewBytes)>;
template <class Operation>
using ManyLaunch = Launch<Operation, capacity<Operation>(kManyBytes)>;

// The elements of one array that a thread moves at once.
template <class T, unsigned kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T values[kCount];
};

template <class Operation, class List, class Indices>
struct Block;

template <class Operation, class... Arrays, std::size_t... I>
struct Block<Operation, ArrayList<Arrays...>, std::index_sequence<I...>> {
  static constexpr std::size_t kWidest = [] {
    std::size_t widest = 1;
    ((widest =
          sizeof(typename Arrays::Element) > widest ? sizeof(typename Arrays::Element) : widest),
     ...);
    return widest;
  }();
  // In elements. For 1-byte elements, 16 bytes would not fit the registers.
  static constexpr unsigned kVector = kWidest == 1 ? 8 : 16 / kWidest;
  static constexpr unsigned kReads = (0u + ... + (Arrays::kRead ? 1u : 0u));
  // The number of vectors that a thread loads before it uses one.
  static constexpr unsigned kUnroll = kReads >= 4 ? 1 : 4 / kReads;
  // The same in single elements, for a segment that is not aligned; more than 16 would not fit the
  // registers.
  static constexpr unsigned kSingles =
      kUnroll * kVector < 16 / kReads ? kUnroll * kVector : 16 / kReads;
  static constexpr unsigned kChunk = kThreads * kVector * 4;  // elements

  // One thread's share of one array; a distinct type for each array.
  template <std::size_t kIndex, class Array, unsigned kCount>
  struct Share {
    Vector<typename Array::Element, kCount> vector;
  };
  template <unsigned kCount>
  struct Shares : Share<I, Arrays, kCount>... {};

  template <std::size_t kIndex, class Array, unsigned kCount>
  WEFT_HOST_DEVICE static void load(Share<kIndex, Array, kCount>& share, const void* array,
                                    std::uint32_t at) {
    using V = Vector<typename Array::Element, kCount>;
    if constexpr (Array::kRead) share.vector = static_cast<const V*>(array)[at];
  }
  template <std::size_t kIndex, class Array, unsigned kCount>
  WEFT_HOST_DEVICE static void store(const Share<kIndex, Array, kCount>& share, void* array,
                                     std::uint32_t at) {
    using V = Vector<typename Array::Element, kCount>;
    if constexpr (Array::kWritten) static_cast<V*>(array)[at] = share.vector;
  }

  // Runs `count` vectors from the addresses on all threads of the block.
  template <unsigned kCount>
  WEFT_HOST_DEVICE static void run_vectors(const Operation& operation,
                                           void* const (&addresses)[sizeof...(I)],
                                           std::uint32_t count, std::uint32_t thread) {
    constexpr unsigned kAtOnce = kCount == 1 ? kSingles : kUnroll;
    for (std::uint32_t first = thread; first < count; first += kThreads * kAtOnce) {
      Shares<kCount> shares[kAtOnce];
      WEFT_UNROLL
      for (unsigned u = 0; u < kAtOnce; ++u) {
        const std::uint32_t at = first + u * kThreads;
        if (at < count) (load<I, Arrays, kCount>(shares[u], addresses[I], at), ...);
      }
      WEFT_UNROLL
      for (unsigned u = 0; u < kAtOnce; ++u) {
        const std::uint32_t at = first + u * kThreads;
        if (at >= count) break;
        WEFT_UNROLL
        for (unsigned e = 0; e < kCount; ++e) {
          operation(static_cast<Share<I, Arrays, kCount>&>(shares[u]).vector.values[e]...);
        }
        (store<I, Arrays, kCount>(shares[u], addresses[I], at), ...);
      }
    }
  }

  // Runs one chunk: elements [first, first + count) of a segment.
  template <class Launch>
  WEFT_HOST_DEVICE static void run_chunk(const Launch& launch, std::uint32_t segment,
                                         std::uint64_t first, std::uint32_t count,
                                         std::uint32_t thread) {
    void* addresses[] = {static_cast<typename Arrays::Element*>(launch.arrays[I][segment]) +
                         first...};
    const bool aligned = ((reinterpret_cast<std::uintptr_t>(addresses[I]) %
                               (sizeof(typename Arrays::Element) * kVector) ==
                           0) &&
                          ...);
    const std::uint32_t vectors = aligned ? count / kVector : 0;
    run_vectors<kVector>(launch.operation, addresses, vectors, thread);
    void* rest[] = {static_cast<typename Arrays::Element*>(addresses[I]) + vectors * kVector...};
    run_vectors<1>(launch.operation, rest, count - vectors * kVector, thread);
  }
};

template <class Operation>
using BlockOf = Block<Operation, typename Operation::Arrays,
                      std::make_index_sequence<std::size_t{Operation::Arrays::kCount}>>;

// Returns the number of chunks of a segment.
template <class Operation>
constexpr std::uint64_t chunks_of(std::uint64_t elements) {
  return (elements + BlockOf<Operation>::kChunk - 1) / BlockOf<Operation>::kChunk;
}

// Runs thread `thread` of block `block` of `blocks`.
template <class Operation, unsigned kCapacity>
WEFT_HOST_DEVICE void run_block(const Launch<Operation, kCapacity>& launch, std::uint32_t block,
                                std::uint32_t blocks, std::uint32_t thread) {
  constexpr std::uint32_t kChunk = BlockOf<Operation>::kChunk;
  for (std::uint32_t chunk = block; chunk < launch.chunks; chunk += blocks) {
    std::uint32_t low = 0;
    std::uint32_t high = launch.segments - 1;
    while (low < high) {  // the first segment that ends after the chunk
      const std::uint32_t middle = (low + high) / 2;
      if (launch.chunk_end[middle] > chunk) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const std::uint64_t first =
        std::uint64_t{chunk - (low == 0 ? 0 : launch.chunk_end[low - 1])} * kChunk;
    const std::uint64_t left = launch.elements[low] - first;
    const std::uint32_t count = left < kChunk ? static_cast<std::uint32_t>(left) : kChunk;
    BlockOf<Operation>::run_chunk(launch, low, first, count, thread);
  }
}

}  // namespace weft::kernels
