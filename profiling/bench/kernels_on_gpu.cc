// SPDX-License-Identifier: Apache-2.0
#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/retire.h>
#include <weft/kernels/cuda_kernels.h>
#include <weft/profiling/bench/kernels_on_gpu.h>

namespace weft::bench {
namespace {

// Launches between two synchronizations, so that the host's share of the time vanishes.
constexpr int kLaunches = 20;

// One device with the memory of the present case.
class Gpu {
 public:
  Gpu(Report& report, std::shared_ptr<cuda::Device> device)
      : report_(report), device_(std::move(device)), stream_(*device_), kernels_(device_) {}

  void bench(std::size_t elements) {
    for (const Lie lie : {Lie::Even, Lie::Odd, Lie::Unaligned}) {
      bench_pack(elements, Dtype::Float32, Dtype::Float32, lie);
      bench_pack(elements, Dtype::Float32, Dtype::BFloat16, lie);
      bench_unpack(elements, Dtype::Float32, Dtype::Float32, lie);
      bench_unpack(elements, Dtype::BFloat16, Dtype::Float32, lie);
    }
    bench_pack(elements, Dtype::BFloat16, Dtype::BFloat16, Lie::Even);
    bench_reduce(elements, Dtype::Float32);
    bench_reduce(elements, Dtype::BFloat16);
    bench_sgd(elements);
    bench_adamw(elements, Dtype::Float32);
    bench_adamw(elements, Dtype::BFloat16);
  }

 private:
  // Fills memory with 0.0115, in float32 and in bfloat16. (With zeros, AdamW would take a root of
  // zero and divide by it, in the slow branches of both.)
  Slice allocate(std::size_t bytes) {
    memory_.emplace_back(stream_, bytes);
    cuda::fill(stream_, memory_.back().slice(), 0x3c);
    return memory_.back().slice();
  }

  // How a network's tensors lie in a block of memory, a weight and a bias in turn.
  enum class Lie {
    // All of a multiple of 256 bytes, as in layers with such widths; so are their offsets in a
    // bucket.
    Even,
    // 16 bytes less, so that their offsets in a bucket are multiples of four elements.
    Odd,
    Unaligned,  // as Odd, and the tensors one element off their alignment
  };
  static std::vector<Slice> scattered(Slice whole, std::size_t element_bytes, Lie lie) {
    std::vector<Slice> tensors;
    const std::size_t weight = (whole.bytes / 64 + 255) / 256 * 256;
    for (std::size_t offset = 0; offset + weight <= whole.bytes;) {
      const std::size_t bytes = tensors.size() % 2 == 0 ? weight : 256;
      const std::size_t skewed = lie == Lie::Unaligned ? element_bytes : 0;
      tensors.push_back(whole.part(offset + skewed, lie == Lie::Even ? bytes : bytes - 16));
      offset += bytes;
    }
    return tensors;
  }
  static std::string adjective_of(Lie lie) {
    if (lie == Lie::Even) return {};
    return lie == Lie::Odd ? "odd " : "unaligned ";
  }

  static std::size_t total(const std::vector<Slice>& slices) {
    std::size_t bytes = 0;
    for (const Slice& slice : slices) bytes += slice.bytes;
    return bytes;
  }

  template <class Enqueue>
  Peer peer(std::string name, Enqueue enqueue) {
    return {std::move(name), [this, enqueue] {
              for (int i = 0; i < kLaunches; ++i) enqueue();
              if (!cuda::record(stream_).synchronize())
                broken("a fence without a deadline timed out");
            }};
  }

  // One launch reads and writes `bytes`; the copy reads half of them and writes half.
  template <class Enqueue>
  void compare(const std::string& name, std::size_t bytes, Enqueue enqueue) {
    if (report_.wants(name)) {
      const Slice from = allocate(bytes / 2);
      const Slice to = allocate(bytes / 2);
      const auto copy = [this, from, to] { cuda::copy(stream_, to, from); };
      const std::vector<Peer> peers = {peer("weft", enqueue), peer("device copy", copy)};
      const auto samples = measure(peers, report_.runs());
      for (std::size_t i = 0; i < peers.size(); ++i) {
        Row row = bandwidth_row(name, peers[i].name, bytes * kLaunches, samples[i]);
        row.bytes = bytes;  // bytes of one launch
        report_.add(row);
      }
    }
    memory_.clear();
  }

  static std::string text(const std::string& what, std::size_t elements) {
    return "gpu " + what + " " + std::to_string(elements >> 20) + "Mi";
  }
  static std::string text(const std::string& what, Dtype dtype, std::size_t elements) {
    return text(what + " " + std::string(name(dtype)), elements);
  }

  void bench_pack(std::size_t elements, Dtype from, Dtype to, Lie lie) {
    const auto tensors = scattered(allocate(elements * size_of(from)), size_of(from), lie);
    const Slice flat = allocate(elements * size_of(to));
    const std::size_t read = total(tensors);
    const std::string types = std::string(name(from)) + "->" + std::string(name(to));
    compare(text(adjective_of(lie) + "pack " + types, elements),
            read + read / size_of(from) * size_of(to),
            [=, this] { kernels_.pack(tensors, from, flat, to, 0.5, stream_); });
  }

  void bench_unpack(std::size_t elements, Dtype from, Dtype to, Lie lie) {
    const auto tensors = scattered(allocate(elements * size_of(to)), size_of(to), lie);
    const Slice flat = allocate(elements * size_of(from));
    const std::size_t written = total(tensors);
    const std::string types = std::string(name(from)) + "->" + std::string(name(to));
    compare(text(adjective_of(lie) + "unpack " + types, elements),
            written + written / size_of(to) * size_of(from), [=, this] {
              kernels_.unpack(flat.part(0, written / size_of(to) * size_of(from)), from, tensors,
                              to, 0.5, stream_);
            });
  }

  void bench_reduce(std::size_t elements, Dtype dtype) {
    const Slice a = allocate(elements * size_of(dtype));
    const Slice b = allocate(elements * size_of(dtype));
    const Slice out = allocate(elements * size_of(dtype));
    compare(text("reduce sum", dtype, elements), 3 * out.bytes,
            [=, this] { kernels_.reduce(out, a, b, dtype, ReduceOp::Sum, stream_); });
  }

  void bench_sgd(std::size_t elements) {
    const std::size_t bytes = elements * sizeof(float);
    const auto parameters = scattered(allocate(bytes), sizeof(float), Lie::Even);
    const auto gradients = scattered(allocate(bytes), sizeof(float), Lie::Even);
    const auto buffers = scattered(allocate(bytes), sizeof(float), Lie::Even);
    std::vector<kernels::SgdTensor> tensors;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      tensors.push_back({parameters[i], gradients[i], buffers[i]});
    compare(text("sgd momentum", Dtype::Float32, elements), 5 * total(parameters), [=, this] {
      kernels_.sgd_step(tensors, Dtype::Float32, Dtype::Float32,
                        {.momentum = 0.9, .weight_decay = 1e-4}, stream_);
    });
  }

  void bench_adamw(std::size_t elements, Dtype dtype) {
    const std::size_t bytes = elements * size_of(dtype);
    const auto parameters = scattered(allocate(bytes), size_of(dtype), Lie::Even);
    const auto gradients = scattered(allocate(bytes), size_of(dtype), Lie::Even);
    const auto exp_avg = scattered(allocate(bytes), size_of(dtype), Lie::Even);
    const auto exp_avg_sq = scattered(allocate(bytes), size_of(dtype), Lie::Even);
    std::vector<kernels::AdamWTensor> tensors;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      tensors.push_back({parameters[i], gradients[i], exp_avg[i], exp_avg_sq[i]});
    }
    compare(text("adamw", dtype, elements), 7 * total(parameters),
            [=, this] { kernels_.adamw_step(tensors, dtype, dtype, {}, stream_); });
  }

  Report& report_;
  std::shared_ptr<cuda::Device> device_;
  cuda::Stream stream_;
  kernels::CudaKernels kernels_;
  std::vector<cuda::DeviceMemory> memory_;  // used by the present case
};

}  // namespace

void bench_on_gpu(Report& report) {
  auto driver = cuda::Driver::open();
  if (!driver.ok()) return report.note("no GPU cases: " + driver.error().text());
  if (cuda::Device::count(*driver.value()) == 0)
    return report.note("no GPU cases: the driver sees no GPU");
  auto device = cuda::Device::open(driver.value(), 0);
  report.note("GPU cases on " + device->properties().name);
  {
    Gpu gpu(report, device);
    // Elements: the size of a bucket of DistributedDataParallel, and larger.
    for (const std::size_t mebi : {6, 64, 256}) gpu.bench(mebi << 20);
  }
  if (!device->retirement().reclaim_all(Deadline::never()))
    broken("a fence without a deadline timed out");
}

}  // namespace weft::bench
