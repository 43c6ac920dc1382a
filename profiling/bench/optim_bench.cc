// A step of the fused optimizers against libtorch's own, whole: through step() of the optimizer, over the parameters of a
// network with large weights and small biases. On one thread of the CPU, in turns; bytes read and written per second.
// Steps on a GPU, against a copy on the device, are in ./dev bench kernels.
#include <string>
#include <vector>

#include <torch/torch.h>

#include <weft/engine/tensor/tensor.h>
#include <weft/optim.h>
#include <weft/profiling/bench/report.h>

namespace weft::bench {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

// Parameters of so many elements in all, with gradients.
std::vector<at::Tensor> network(std::int64_t elements, at::ScalarType dtype) {
  std::vector<at::Tensor> parameters;
  for (std::int64_t left = elements, i = 0; left > 0; ++i) {
    const std::int64_t size = std::min(left, i % 2 == 1 ? std::int64_t{64} + i : elements / 16 + 3 * i);
    at::Tensor parameter = at::randn({size}).to(dtype).requires_grad_();
    parameter.mutable_grad() = at::randn({size}).to(dtype);
    parameters.push_back(std::move(parameter));
    left -= size;
  }
  return parameters;
}

// `passes`: how often memory of the parameters' size is read or written in a step that passes over it once.
template <class Fused, class Plain, class Options>
void compare(Report& report, const std::string& what, std::int64_t elements, at::ScalarType dtype, std::size_t passes,
             const Options& options) {
  const std::string name =
      what + " " + std::string(weft::name(tensor::dtype_of(dtype))) + " " + std::to_string(elements >> 10) + "Ki";
  if (!report.wants(name)) return;
  Fused fused(network(elements, dtype), options);
  Plain plain(network(elements, dtype), options);
  const auto samples = measure({{"weft", [&] { fused.step(); }}, {"libtorch", [&] { plain.step(); }}}, report.runs());
  const std::size_t bytes = passes * static_cast<std::size_t>(elements) * c10::elementSize(dtype);
  report.add(bandwidth_row(name, "weft", bytes, samples[0]));
  report.add(bandwidth_row(name, "libtorch", bytes, samples[1]));
}

void run(Report& report) {
  torch::set_num_threads(1);
  constexpr std::int64_t kSmall = 256 << 10;    // elements: 1 MiB of fp32, in cache
  constexpr std::int64_t kLarge = 25 * kSmall;  // in memory
  for (const std::int64_t elements : {kSmall, kLarge}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      compare<FusedSGD, torch::optim::SGD>(report, "sgd", elements, dtype, 3, SGDOptions(1e-3));
      compare<FusedSGD, torch::optim::SGD>(report, "sgd momentum", elements, dtype, 5,
                                           SGDOptions(1e-3).momentum(0.9).weight_decay(1e-4));
      compare<FusedAdamW, torch::optim::AdamW>(report, "adamw", elements, dtype, 7, AdamWOptions(1e-3));
    }
  }
  report.note(torch::cuda::is_available() ? "steps on the GPU: ./dev bench kernels"
                                          : "steps on a GPU are not measured: there is none");
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::bench::Report report("optim", argc, argv, 21);
  weft::bench::run(report);
  return report.finish();
}
