// SPDX-License-Identifier: Apache-2.0
#include <ATen/autocast_mode.h>

#include <weft/base/error.h>
#include <weft/engine/training/autocast.h>

namespace weft {

namespace {

c10::DeviceType checked(c10::DeviceType device, c10::ScalarType dtype) {
  if (!at::autocast::is_autocast_available(device)) {
    throw Error(Blame::Unsupported, "AutocastGuard: libtorch has no autocast for the device type " +
                                        c10::DeviceTypeName(device, /*lower_case=*/true));
  }
  if (dtype != at::kBFloat16 && dtype != at::kHalf) {
    throw Error(Blame::Caller, std::string("AutocastGuard: ") + c10::toString(dtype) +
                                   " is no dtype of autocast; use torch::kBFloat16 or "
                                   "torch::kHalf, or AutocastGuard(device, dtype, false) for a "
                                   "region that computes in its inputs' dtypes");
  }
  return device;
}

}  // namespace

AutocastGuard::AutocastGuard(c10::DeviceType device, c10::ScalarType dtype, bool on)
    : device_(checked(device, dtype)),
      was_on_(at::autocast::is_autocast_enabled(device)),
      dtype_before_(at::autocast::get_autocast_dtype(device)) {
  at::autocast::increment_nesting();
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::set_autocast_enabled(device, on);
}

AutocastGuard::~AutocastGuard() {
  // The cache holds copies of parameters; the optimizer changes these before the next region.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_on_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
}

}  // namespace weft
