// SPDX-License-Identifier: Apache-2.0
// Compares a whole step of the fused optimizers with libtorch's own: through step() of the
// optimizer, over the parameters of a network with large weights and small biases; bytes read and
// written per second. On one thread of the CPU, in turns; and on a GPU, if there is one, also with
// a device copy that moves as many bytes. (./dev bench kernels measures the kernels alone, without
// optimizer and libtorch.)
#include <string>
#include <vector>

#include <torch/torch.h>

#include <weft/engine/tensor/tensor.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/optim.h>
#include <weft/profiling/bench/report.h>

namespace weft::bench {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

// Makes parameters with `elements` elements in all, with gradients.
std::vector<at::Tensor> network(std::int64_t elements, at::ScalarType dtype, at::Device device) {
  std::vector<at::Tensor> parameters;
  for (std::int64_t left = elements, i = 0; left > 0; ++i) {
    const std::int64_t size =
        std::min(left, i % 2 == 1 ? std::int64_t{64} + i : elements / 16 + 3 * i);
    at::Tensor parameter = at::randn({size}, device).to(dtype).requires_grad_();
    parameter.mutable_grad() = at::randn({size}, device).to(dtype);
    parameters.push_back(std::move(parameter));
    left -= size;
  }
  return parameters;
}

std::string case_of(const std::string& what, std::int64_t elements, at::ScalarType dtype) {
  const bool is_mebi = elements % (1 << 20) == 0;
  return what + " " + std::string(weft::name(tensor::dtype_of(dtype))) + " " +
         (is_mebi ? std::to_string(elements >> 20) + "Mi" : std::to_string(elements >> 10) + "Ki");
}

// `passes`: how often one step reads or writes memory of the parameters' size, if it passes over
// each of them once.
template <class Fused, class Plain, class Options>
void compare(Report& report, const std::string& what, std::int64_t elements, at::ScalarType dtype,
             std::size_t passes, const Options& options) {
  const std::string name = case_of(what, elements, dtype);
  if (!report.wants(name)) return;
  Fused fused(network(elements, dtype, at::kCPU), options);
  Plain plain(network(elements, dtype, at::kCPU), options);
  const auto samples = measure(
      {{"weft", [&] { fused.step(); }}, {"libtorch", [&] { plain.step(); }}}, report.runs());
  const std::size_t bytes = passes * static_cast<std::size_t>(elements) * c10::elementSize(dtype);
  report.add(bandwidth_row(name, "weft", bytes, samples[0]));
  report.add(bandwidth_row(name, "libtorch", bytes, samples[1]));
}

// The same on the GPU. The host waits for the device only once in kSteps steps, so that its wake-up
// does not count.
template <class Fused, class Plain, class Options>
void compare_on_gpu(Report& report, const std::string& what, std::int64_t elements,
                    at::ScalarType dtype, std::size_t passes, const Options& options) {
  constexpr int kSteps = 20;
  const std::string name = "gpu step: " + case_of(what, elements, dtype);
  if (!report.wants(name)) return;
  const at::Device gpu(at::kCUDA, 0);
  Fused fused(network(elements, dtype, gpu), options);
  Plain plain(network(elements, dtype, gpu), options);
  // Half of the bytes are read, half are written.
  const std::size_t bytes = passes * static_cast<std::size_t>(elements) * c10::elementSize(dtype);
  const at::Tensor from =
      at::zeros({static_cast<std::int64_t>(bytes / 2)}, at::TensorOptions(gpu).dtype(at::kByte));
  at::Tensor to = at::empty_like(from);
  const auto steps = [](auto enqueue) {
    return [enqueue] {
      for (int i = 0; i < kSteps; ++i) enqueue();
      torch::cuda::synchronize();
    };
  };
  const std::vector<Peer> peers{{"weft", steps([&] { fused.step(); })},
                                {"libtorch", steps([&] { plain.step(); })},
                                {"device copy", steps([&] { to.copy_(from); })}};
  const auto samples = measure(peers, report.runs());
  for (std::size_t i = 0; i < peers.size(); ++i) {
    Row row = bandwidth_row(name, peers[i].name, bytes * kSteps, samples[i]);
    row.bytes = bytes;  // of one step
    report.add(row);
  }
}

constexpr std::int64_t kSmall = 256 << 10;    // elements: 1 MiB of fp32, in cache
constexpr std::int64_t kLarge = 25 * kSmall;  // in memory
constexpr std::int64_t kHuge = 64 << 20;      // past the caches of a GPU

void run_on_gpu(Report& report) {
  if (tensor::cuda_device_count() == 0)
    return report.note("steps on a GPU are not measured: there is none");
  try {
    for (const std::int64_t elements : {kLarge, kHuge}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        compare_on_gpu<FusedSGD, torch::optim::SGD>(
            report, "sgd momentum", elements, dtype, 5,
            SGDOptions(1e-3).momentum(0.9).weight_decay(1e-4));
        compare_on_gpu<FusedAdamW, torch::optim::AdamW>(report, "adamw", elements, dtype, 7,
                                                        AdamWOptions(1e-3));
      }
    }
  } catch (const Error& error) {
    report.note(std::string("steps on the GPU are not measured: ") + error.what());
  }
}

void run(Report& report) {
  torch::set_num_threads(1);
  for (const std::int64_t elements : {kSmall, kLarge}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      compare<FusedSGD, torch::optim::SGD>(report, "sgd", elements, dtype, 3, SGDOptions(1e-3));
      compare<FusedSGD, torch::optim::SGD>(report, "sgd momentum", elements, dtype, 5,
                                           SGDOptions(1e-3).momentum(0.9).weight_decay(1e-4));
      compare<FusedAdamW, torch::optim::AdamW>(report, "adamw", elements, dtype, 7,
                                               AdamWOptions(1e-3));
    }
  }
  run_on_gpu(report);
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::bench::Report report("optim", argc, argv, 21);
  weft::bench::run(report);
  return report.finish();
}
