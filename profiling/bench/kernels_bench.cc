// SPDX-License-Identifier: Apache-2.0
// Measures how near the kernels come to the memory's speed, on one thread: bytes read and written
// per second, compared with memcpy of as many bytes and with the same work by libtorch. With a GPU,
// also compares the CUDA kernels with a device copy.

#include <cstring>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <weft/kernels/kernels.h>
#include <weft/profiling/bench/kernels_on_gpu.h>
#include <weft/profiling/bench/report.h>

namespace weft::bench {
namespace {

Slice slice_of(const at::Tensor& tensor) {
  return {tensor.data_ptr(), tensor.nbytes(), Device::host()};
}

std::vector<Slice> slices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Slice> slices;
  for (const at::Tensor& tensor : tensors) slices.push_back(slice_of(tensor));
  return slices;
}

at::ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::Float16: return at::kHalf;
    case Dtype::BFloat16: return at::kBFloat16;
    case Dtype::Float64: return at::kDouble;
    case Dtype::Int64: return at::kLong;
    default: return at::kFloat;
  }
}

// Makes tensors as a network has them, large weights and small biases, with `elements` elements in
// all.
std::vector<at::Tensor> network(std::int64_t elements, Dtype dtype) {
  std::vector<at::Tensor> tensors;
  for (std::int64_t left = elements, i = 0; left > 0; ++i) {
    const std::int64_t size =
        std::min(left, i % 2 == 1 ? std::int64_t{64} + i : elements / 16 + 3 * i);
    tensors.push_back(at::randn({size}, at::kFloat).to(scalar_type(dtype)));
    left -= size;
  }
  return tensors;
}

// Returns the parts of a flat tensor that hold the tensors back to back.
std::vector<at::Tensor> parts_of(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  std::int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    parts.push_back(flat.slice(0, offset, offset + tensor.numel()));
    offset += tensor.numel();
  }
  return parts;
}

void compare(Report& report, const std::string& name, std::size_t bytes, std::vector<Peer> peers) {
  // The copy reads half of the bytes and writes half.
  const std::vector<char> from(bytes / 2, 1);
  std::vector<char> to(bytes / 2);
  peers.push_back({"memcpy", [&] {
                     std::memcpy(to.data(), from.data(), to.size());
                     // Keeps the copy from being optimized away.
                     asm volatile("" : : "r"(to.data()) : "memory");
                   }});
  const auto samples = measure(peers, report.runs());
  for (std::size_t i = 0; i < peers.size(); ++i)
    report.add(bandwidth_row(name, peers[i].name, bytes, samples[i]));
}

std::string size_name(std::int64_t elements) { return " " + std::to_string(elements >> 10) + "Ki"; }

std::string types_name(Dtype from, Dtype to) {
  return std::string(name(from)) + "->" + std::string(name(to));
}

void bench_pack(Report& report, std::int64_t elements, Dtype from, Dtype to) {
  const std::string out = "pack " + types_name(from, to) + size_name(elements);
  const std::string back = "unpack " + types_name(to, from) + size_name(elements);
  const auto tensors = network(elements, from);
  const at::Tensor flat = at::zeros({elements}, scalar_type(to));
  const auto parts = parts_of(flat, tensors);
  const auto slices = slices_of(tensors);
  const std::size_t bytes = static_cast<std::size_t>(elements) * (size_of(from) + size_of(to));
  constexpr double kScale = 0.5;
  if (report.wants(out)) {
    const auto with_libtorch = [&] {
      if (from == to) {  // as libtorch's DistributedDataParallel fills a bucket
        for (std::size_t i = 0; i < tensors.size(); ++i) {
          at::Tensor part = parts[i];
          at::mul_out(part, tensors[i], at::scalar_tensor(kScale, tensors[i].options()));
        }
      } else {  // as libtorch's compression hooks do
        at::_foreach_copy_(parts, tensors);
        flat.mul_(kScale);
      }
    };
    compare(report, out, bytes,
            {{"weft", [&] { kernels::pack(slices, from, slice_of(flat), to, kScale); }},
             {"libtorch", with_libtorch}});
  }
  if (report.wants(back)) {
    compare(report, back, bytes,
            {{"weft", [&] { kernels::unpack(slice_of(flat), to, slices, from, 1); }},
             {"libtorch", [&] { at::_foreach_copy_(tensors, parts); }}});
  }
}

void bench_reduce(Report& report, std::int64_t elements, Dtype dtype, ReduceOp op) {
  const std::string name =
      std::string(weft::name(op)) + " " + std::string(weft::name(dtype)) + size_name(elements);
  if (!report.wants(name)) return;
  const at::Tensor a = at::randn({elements}, at::kFloat).to(scalar_type(dtype));
  const at::Tensor b = at::randn({elements}, at::kFloat).to(scalar_type(dtype));
  at::Tensor out = at::zeros_like(a);
  const auto with_libtorch = [&] {
    op == ReduceOp::Sum ? at::add_out(out, a, b) : at::maximum_out(out, a, b);
  };
  compare(report, name, 3 * out.nbytes(),
          {{"weft", [&] { kernels::reduce(slice_of(out), slice_of(a), slice_of(b), dtype, op); }},
           {"libtorch", with_libtorch}});
}

std::vector<at::Tensor> zeros_like(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> zeros;
  for (const at::Tensor& tensor : tensors) zeros.push_back(at::zeros_like(tensor));
  return zeros;
}

// Makes parameters with gradients.
std::vector<at::Tensor> parameters(std::int64_t elements) {
  auto tensors = network(elements, Dtype::Float32);
  for (at::Tensor& tensor : tensors) tensor.mutable_grad() = at::randn_like(tensor);
  return tensors;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& tensor : tensors) gradients.push_back(tensor.grad());
  return gradients;
}

void bench_sgd(Report& report, std::int64_t elements) {
  const std::string name = "sgd momentum float32" + size_name(elements);
  if (!report.wants(name)) return;
  const auto ours = parameters(elements);
  const auto buffers = zeros_like(ours);
  std::vector<kernels::SgdTensor> tensors;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    tensors.push_back({slice_of(ours[i]), slice_of(ours[i].grad()), slice_of(buffers[i])});
  }
  const auto fused = parameters(elements);
  const auto fused_gradients = gradients_of(fused);
  const auto fused_buffers = zeros_like(fused);
  torch::optim::SGD optimizer(parameters(elements),
                              torch::optim::SGDOptions(1e-3).momentum(0.9).weight_decay(1e-4));
  compare(report, name, 5 * static_cast<std::size_t>(elements) * sizeof(float),
          {{"weft",
            [&] {
              kernels::sgd_step(tensors, Dtype::Float32, Dtype::Float32,
                                {.momentum = 0.9, .weight_decay = 1e-4});
            }},
           {"libtorch", [&] { optimizer.step(); }},
           {"libtorch fused", [&] {
              at::_fused_sgd_(fused, fused_gradients, fused_buffers, 1e-4, 0.9, 1e-3, 0, false,
                              false, false);
            }}});
}

void bench_adamw(Report& report, std::int64_t elements) {
  const std::string name = "adamw float32" + size_name(elements);
  if (!report.wants(name)) return;
  const auto ours = parameters(elements);
  const auto exp_avg = zeros_like(ours);
  const auto exp_avg_sq = zeros_like(ours);
  std::vector<kernels::AdamWTensor> tensors;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    tensors.push_back({slice_of(ours[i]), slice_of(ours[i].grad()), slice_of(exp_avg[i]),
                       slice_of(exp_avg_sq[i])});
  }
  const auto fused = parameters(elements);
  const auto fused_gradients = gradients_of(fused);
  const auto fused_avg = zeros_like(fused);
  const auto fused_avg_sq = zeros_like(fused);
  const std::vector<at::Tensor> steps(fused.size(), at::ones({}, at::kFloat));
  torch::optim::AdamW optimizer(parameters(elements));
  compare(report, name, 7 * static_cast<std::size_t>(elements) * sizeof(float),
          {{"weft", [&] { kernels::adamw_step(tensors, Dtype::Float32, Dtype::Float32, {}); }},
           {"libtorch", [&] { optimizer.step(); }},
           {"libtorch fused", [&] {
              at::_fused_adamw_(fused, fused_gradients, fused_avg, fused_avg_sq, {}, steps, 1e-3,
                                0.9, 0.999, 1e-2, 1e-8, false, false);
            }}});
}

void bench_on_cpu(Report& report) {
  at::set_num_threads(1);
  const at::NoGradGuard no_gradients;
  // Elements: 1 MiB of fp32, the size of DistributedDataParallel's first bucket.
  constexpr std::int64_t kSmall = 256 << 10;
  constexpr std::int64_t kLarge = 25 * kSmall;  // the size of its later buckets
  for (const std::int64_t elements : {kSmall, kLarge}) {
    bench_pack(report, elements, Dtype::Float32, Dtype::Float32);
    bench_pack(report, elements, Dtype::Float32, Dtype::Float16);
    bench_pack(report, elements, Dtype::Float32, Dtype::BFloat16);
    bench_pack(report, elements, Dtype::Float64, Dtype::Float32);
    bench_reduce(report, elements, Dtype::Float32, ReduceOp::Sum);
    bench_reduce(report, elements, Dtype::Float64, ReduceOp::Sum);
    bench_reduce(report, elements, Dtype::Int64, ReduceOp::Sum);
    bench_reduce(report, elements, Dtype::Float16, ReduceOp::Sum);
    bench_reduce(report, elements, Dtype::BFloat16, ReduceOp::Sum);
    bench_reduce(report, elements, Dtype::Float32, ReduceOp::Max);
    bench_reduce(report, elements, Dtype::Float16, ReduceOp::Max);
    bench_sgd(report, elements);
    bench_adamw(report, elements);
  }
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::bench::Report report("kernels", argc, argv, 31);
  weft::bench::bench_on_cpu(report);
  weft::bench::bench_on_gpu(report);
  return report.finish();
}
