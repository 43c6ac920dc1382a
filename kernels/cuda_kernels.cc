// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include <weft/base/error.h>
#include <weft/cuda/retire.h>
#include <weft/cuda/span.h>
#include <weft/kernels/cuda_kernels.h>
#include <weft/kernels/kernel_image.h>
#include <weft/kernels/kernel_list.h>
#include <weft/kernels/operations.h>
#include <weft/kernels/segments.h>

namespace weft::kernels {

namespace {

// The kernels' indices in the vector of loaded kernels, and their names.
#define WEFT_INDEX_SINGLE(name, ...) k_##name,
#define WEFT_INDEX_BOTH(name, ...) k_##name, k_##name##_many,
enum KernelIndex : unsigned {
  WEFT_CAST_KERNELS(WEFT_INDEX_BOTH) WEFT_OPTIMIZER_KERNELS(WEFT_INDEX_BOTH)
      WEFT_REDUCE_KERNELS(WEFT_INDEX_SINGLE)
};

#define WEFT_NAME_SINGLE(name, ...) "weft_" #name,
#define WEFT_NAME_BOTH(name, ...) "weft_" #name, "weft_" #name "_many",
constexpr auto kNames = std::to_array<const char*>({WEFT_CAST_KERNELS(
    WEFT_NAME_BOTH) WEFT_OPTIMIZER_KERNELS(WEFT_NAME_BOTH) WEFT_REDUCE_KERNELS(WEFT_NAME_SINGLE)});

// The kernels of an operation: one for few segments, one for many.
template <class Operation>
struct KernelsOf;
#define WEFT_KERNELS_SINGLE(name, ...)                                 \
  template <>                                                          \
  struct KernelsOf<__VA_ARGS__> {                                      \
    using Small = SingleLaunch<__VA_ARGS__>;                           \
    using Large = Small;                                               \
    static constexpr KernelIndex kSmall = k_##name, kLarge = k_##name; \
  };
#define WEFT_KERNELS_BOTH(name, ...)                                          \
  template <>                                                                 \
  struct KernelsOf<__VA_ARGS__> {                                             \
    using Small = FewLaunch<__VA_ARGS__>;                                     \
    using Large = ManyLaunch<__VA_ARGS__>;                                    \
    static constexpr KernelIndex kSmall = k_##name, kLarge = k_##name##_many; \
  };
WEFT_CAST_KERNELS(WEFT_KERNELS_BOTH)
WEFT_OPTIMIZER_KERNELS(WEFT_KERNELS_BOTH)
WEFT_REDUCE_KERNELS(WEFT_KERNELS_SINGLE)

}  // namespace

// Collects tensors into launches on a stream.
class CudaKernels::Executor {
 public:
  Executor(const std::vector<cuda::Kernel>& kernels, const cuda::StreamRef& stream)
      : kernels_(kernels), stream_(stream) {}

  // The launches of one call, for the timeline.
  class Launches {
   public:
    Launches(const Executor& executor, const trace::Name& name, std::size_t bytes)
        : stream_(executor.stream_),
          span_(cuda::Span::begin(stream_, name.text(), name.layer(), bytes)) {}
    ~Launches() { span_.end(stream_); }
    Launches(const Launches&) = delete;
    Launches& operator=(const Launches&) = delete;

   private:
    const cuda::StreamRef& stream_;
    cuda::Span span_;
  };

  Device device() const { return stream_.device().id(); }
  Launches launches(const trace::Name& name, std::size_t bytes) const {
    return {*this, name, bytes};
  }

  template <class Operation>
  class Batch {
    using Small = typename KernelsOf<Operation>::Small;
    using Large = typename KernelsOf<Operation>::Large;

   public:
    Batch(const Executor& executor, const Operation& operation) : executor_(executor) {
      launch_.operation = operation;
      clear();
    }

    void add(std::size_t elements, std::initializer_list<void*> arrays) {
      if (elements == 0) return;
      if (launch_.segments == Large::kSegments) launch();
      const std::uint32_t i = launch_.segments++;
      launch_.chunks += static_cast<std::uint32_t>(chunks_of<Operation>(elements));
      launch_.chunk_end[i] = launch_.chunks;
      launch_.elements[i] = elements;
      for (std::size_t array = 0; array < arrays.size(); ++array)
        launch_.arrays[array][i] = arrays.begin()[array];
    }

    // Enqueues the tensors added since the last call.
    void launch() {
      if (launch_.segments == 0) return;
      if (launch_.segments <= Small::kSegments) {
        executor_.enqueue(KernelsOf<Operation>::kSmall, small());
      } else {
        executor_.enqueue(KernelsOf<Operation>::kLarge, launch_);
      }
      clear();
    }

   private:
    void clear() { launch_.segments = launch_.chunks = 0; }

    Small small() const {
      Small small;
      small.operation = launch_.operation;
      small.segments = launch_.segments;
      small.chunks = launch_.chunks;
      std::copy_n(launch_.chunk_end, launch_.segments, small.chunk_end);
      std::copy_n(launch_.elements, launch_.segments, small.elements);
      for (unsigned array = 0; array < Small::kArrays; ++array) {
        std::copy_n(launch_.arrays[array], launch_.segments, small.arrays[array]);
      }
      return small;
    }

    const Executor& executor_;
    Large launch_;  // 32 KiB, of which only the used part is touched
  };

  template <class Operation>
  Batch<Operation> batch(const Operation& operation) const {
    return {*this, operation};
  }

 private:
  template <class Launch>
  void enqueue(KernelIndex kernel, const Launch& launch) const {
    const auto resident =
        static_cast<unsigned>(stream_.device().properties().multiprocessors) * kBlocksPerProcessor;
    const unsigned blocks = std::min(launch.chunks, resident);
    cuda::launch(stream_, kernels_[kernel], {blocks}, {kThreads}, 0, launch);
  }

  const std::vector<cuda::Kernel>& kernels_;
  const cuda::StreamRef& stream_;
};

CudaKernels::CudaKernels(std::shared_ptr<cuda::Device> device)
    : device_(std::move(device)),
      library_(std::make_unique<cuda::Library>(*device_, kernel_image())) {
  for (const char* name : kNames) kernels_.push_back(library_->kernel(name));
  library_->preload(*device_);
}

CudaKernels::~CudaKernels() {
  device_->retirement().retire(Fence(),
                               [library = std::move(library_)]() mutable { library.reset(); });
}

CudaKernels::Executor CudaKernels::on(const cuda::StreamRef& stream) const {
  if (&stream.device() == device_.get()) return {kernels_, stream};
  throw Error(Blame::Caller, "these kernels are loaded on " + describe(device_->id()) +
                                 ", the stream is of " + describe(stream.device().id()) +
                                 "; each device needs its own CudaKernels");
}

void CudaKernels::cast(std::span<const Slice> from, Dtype from_dtype, std::span<const Slice> to,
                       Dtype to_dtype, double scale, const cuda::StreamRef& stream) const {
  kernels::cast(on(stream), from, from_dtype, to, to_dtype, scale);
}

void CudaKernels::pack(std::span<const Slice> from, Dtype from_dtype, Slice to, Dtype to_dtype,
                       double scale, const cuda::StreamRef& stream) const {
  kernels::pack(on(stream), from, from_dtype, to, to_dtype, scale);
}

void CudaKernels::unpack(Slice from, Dtype from_dtype, std::span<const Slice> to, Dtype to_dtype,
                         double scale, const cuda::StreamRef& stream) const {
  kernels::unpack(on(stream), from, from_dtype, to, to_dtype, scale);
}

void CudaKernels::scale(Slice slice, Dtype dtype, double factor,
                        const cuda::StreamRef& stream) const {
  kernels::scale(on(stream), slice, dtype, factor);
}

void CudaKernels::reduce(Slice out, Slice a, Slice b, Dtype dtype, ReduceOp op,
                         const cuda::StreamRef& stream) const {
  kernels::reduce(on(stream), out, a, b, dtype, op);
}

void CudaKernels::reduce(Slice into, Slice with, Dtype dtype, ReduceOp op,
                         const cuda::StreamRef& stream) const {
  kernels::reduce(on(stream), into, into, with, dtype, op);
}

void CudaKernels::sgd_step(std::span<const SgdTensor> tensors, Dtype dtype, Dtype gradient_dtype,
                           const SgdOptions& options, const cuda::StreamRef& stream) const {
  kernels::sgd_step(on(stream), tensors, dtype, gradient_dtype, options);
}

void CudaKernels::adamw_step(std::span<const AdamWTensor> tensors, Dtype dtype,
                             Dtype gradient_dtype, const AdamWOptions& options,
                             const cuda::StreamRef& stream) const {
  kernels::adamw_step(on(stream), tensors, dtype, gradient_dtype, options);
}

}  // namespace weft::kernels
