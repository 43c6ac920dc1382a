// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>

#include <ATen/ops/view_as_real.h>

#include <weft/base/deadline.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/ddp/parameter_check.h>
#include <weft/engine/group/access.h>
#include <weft/engine/store/store.h>

namespace weft::parallel {

namespace {

constexpr std::uint32_t kOften = 1024;  // from here on, sums are compared every kOften steps

constexpr std::int64_t kPieceElements = 1 << 16;
constexpr double kRounding = 1e-6;  // relative to the magnitudes

// The name of the parameter at `index` among the sums, which cover CPU parameters only.
std::string name_of(const std::vector<ParameterCheck::Parameter>& parameters, std::size_t index) {
  for (const auto& parameter : parameters) {
    if (parameter.tensor.is_cpu() && index-- == 0) return parameter.name;
  }
  return "a parameter";
}

}  // namespace

ParameterCheck::ParameterCheck(ProcessGroup group, std::uint32_t model)
    : group_(std::move(group)), model_(model) {}

bool ParameterCheck::is_due(std::uint32_t step) const {
  return !is_over_ && group_.size() > 1 && (left_in_ != 0 || step >= next_);
}

void ParameterCheck::look(std::uint32_t step, const std::vector<Parameter>& parameters) noexcept {
  if (!is_due(step)) return;
  try {
    if (left_in_ != 0 && step > left_in_) compare(parameters);
    if (!is_over_ && left_in_ == 0 && step >= next_) leave(step, parameters);
  } catch (const std::exception& error) {
    is_over_ = true;
    log::debug(std::string("DistributedDataParallel stops comparing the ranks' parameters: ") +
               error.what());
  }
}

std::string ParameterCheck::key_of(int rank) const {
  return "parameters" + std::to_string(model_) + "/" + std::to_string(left_in_) + "/" +
         std::to_string(rank);
}

ParameterCheck::Sums ParameterCheck::sums_of(const at::Tensor& tensor) {
  const at::Tensor values =
      tensor.is_complex() ? at::view_as_real(tensor.detach()) : tensor.detach();
  Sums sums{0, 0};
  // libtorch converts what it adds to double, which in pieces that fit a cache takes a tenth of the
  // time.
  for (const at::Tensor& piece : values.reshape({-1}).split(kPieceElements)) {
    at::Tensor part = piece.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
    sums.values += part.sum().item<double>();
    sums.magnitudes += part.abs_().sum().item<double>();
  }
  return sums;
}

bool ParameterCheck::differ(const Sums& one, const Sums& other) {
  using Bits = std::array<std::uint64_t, 2>;  // equal bits: NaN too
  static_assert(sizeof(Bits) == sizeof(Sums));
  if (std::bit_cast<Bits>(one) == std::bit_cast<Bits>(other)) return false;
  const double most = kRounding * std::max(one.magnitudes, other.magnitudes);
  // Written with ! so that sums that are NaN differ as well.
  return !(std::abs(one.values - other.values) <= most &&
           std::abs(one.magnitudes - other.magnitudes) <= most);
}

void ParameterCheck::leave(std::uint32_t step, const std::vector<Parameter>& parameters) {
  mine_.clear();
  for (const Parameter& parameter : parameters) {
    if (parameter.tensor.is_cpu()) mine_.push_back(sums_of(parameter.tensor));
  }
  left_in_ = step;
  next_ = step < kOften ? 2 * step : step + kOften;
  const auto bytes = std::as_bytes(std::span(mine_));
  if (group_.rank() != 0)
    group::store_of(group_).set(key_of(group_.rank()), {bytes.begin(), bytes.end()});
}

void ParameterCheck::compare(const std::vector<Parameter>& parameters) {
  std::vector<int> ranks;
  std::string first;
  for (int rank = 1; rank < group_.size() && group_.rank() == 0; ++rank) {
    auto& store = group::store_of(group_);
    const std::string key = key_of(rank);
    if (!store.exists(key)) continue;  // that rank has run out of inputs
    const auto bytes = store.get(key, Deadline::in(std::chrono::seconds(1)));
    store.erase(key);
    std::vector<Sums> theirs(mine_.size());
    if (bytes.size() != theirs.size() * sizeof(Sums)) continue;
    std::memcpy(theirs.data(), bytes.data(), bytes.size());
    const auto found =
        std::mismatch(mine_.begin(), mine_.end(), theirs.begin(), std::not_fn(&differ)).first;
    if (found == mine_.end()) continue;
    ranks.push_back(rank);
    if (first.empty()) first = name_of(parameters, static_cast<std::size_t>(found - mine_.begin()));
  }
  if (!ranks.empty()) warn(ranks, first);
  left_in_ = 0;
}

void ParameterCheck::warn(const std::vector<int>& ranks, const std::string& first) {
  is_over_ = true;
  log::warn("DistributedDataParallel: " + std::string(kWarning) + ": before step " +
            std::to_string(left_in_) + " '" + first + "' of " + ranks_text(ranks) +
            " differed from rank 0's. Something changes parameters on one rank alone: an optimizer "
            "with other options or another state, weights that are set or loaded there, gradients "
            "that are changed after backward, or a comm hook that does not average");
}

}  // namespace weft::parallel
