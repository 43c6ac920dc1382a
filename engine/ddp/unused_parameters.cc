// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/error.h>
#include <weft/engine/ddp/unused_parameters.h>

namespace weft::parallel {

void UnusedParameters::begin_pass(std::vector<std::size_t> unused) {
  unused_ = std::move(unused);
  std::erase_if(unused_, [&](std::size_t parameter) { return !buckets_.hold(parameter); });
  filled_ = false;
}

void UnusedParameters::begin_mirrored_pass(bool is_usage_counted) {
  usage_.forget();
  unused_.clear();
  if (is_usage_counted || usage_.is_shared()) {
    std::fill(kept_.begin(), kept_.end(), at::Tensor());
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (buckets_.hold(i)) unused_.push_back(i);
    }
  }
  add_untrained([](std::size_t) { return true; });
  for (const std::size_t parameter : unused_) {
    const at::Tensor& gradient = gradient_of(parameters_[parameter].tensor);
    if (!parameters_.is_trained(parameter) && gradient.defined())
      kept_[parameter] = gradient.clone();
  }
}

void UnusedParameters::add_frozen() {
  add_untrained([&](std::size_t i) { return !parameters_[i].tensor.requires_grad(); });
}

void UnusedParameters::add_thawed() {
  add_untrained([&](std::size_t i) { return !buckets_.is_filled(i); });
}

void UnusedParameters::add_untrained(const std::function<bool(std::size_t)>& is_meant) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_.is_trained(i) || !buckets_.hold(i) || contain(i) || !is_meant(i)) continue;
    unused_.push_back(i);
    filled_ = false;
  }
}

void UnusedParameters::add_missing() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (buckets_.hold(i) && !buckets_.is_filled(i) && !contain(i)) unused_.push_back(i);
  }
  filled_ = false;
}

bool UnusedParameters::contain(std::size_t parameter) const {
  return std::find(unused_.begin(), unused_.end(), parameter) != unused_.end();
}

void UnusedParameters::keep(std::size_t parameter) {
  const at::Tensor& gradient = gradient_of(parameters_[parameter].tensor);
  kept_[parameter] = gradient.defined() ? gradient.clone() : at::Tensor();
}

bool UnusedParameters::is_used_anywhere(std::size_t parameter) {
  return !contain(parameter) || (usage_.is_shared() && usage_.is_anywhere(parameter));
}

void UnusedParameters::restore() {
  for (const std::size_t parameter : unused_) {
    const bool used_elsewhere = usage_.is_shared() && usage_.is_anywhere(parameter);
    at::Tensor kept = std::exchange(kept_[parameter], {});
    at::Tensor& gradient = gradient_of(parameters_[parameter].tensor);
    if (used_elsewhere) continue;
    if (!kept.defined()) {
      gradient = at::Tensor();
    } else {
      gradient.copy_(kept);
    }
  }
  unused_.clear();
  usage_.forget();
}

void UnusedParameters::drop_pass() {
  static_cast<void>(usage_.take_work());  // it fails with the pass
  std::fill(kept_.begin(), kept_.end(), at::Tensor());
  usage_.forget();
}

void UnusedParameters::require_no_frozen_rest() const {
  std::vector<std::size_t> rests;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].tensor.requires_grad() && usage_.is_here(i)) rests.push_back(i);
  }
  if (rests.empty() || rests.size() == parameters_.size()) return;
  throw Error(
      Blame::Caller,
      "requires_grad was switched off for " + parameters_.names_of(rests) +
          ", whose gradients from no_sync() have not been averaged yet; let a backward synchronise "
          "first, or set them to undefined (zero_grad) and make a new DistributedDataParallel");
}

}  // namespace weft::parallel
