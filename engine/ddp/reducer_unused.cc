// Parameters that a pass does not use: fills zeros in for their gradients, and restores
// their gradients at the end.
#include <algorithm>

#include <weft/engine/ddp/reducer.h>

namespace weft::parallel {

void Reducer::mark_unused() {
  if (unused_marked_) return;
  unused_marked_ = true;
  for (const std::size_t parameter : unused_) {
    if (buckets_.is_filled(parameter)) continue;
    const at::Tensor& gradient = gradient_of(parameters_[parameter].tensor);
    kept_[parameter] = gradient.defined() ? gradient.clone() : at::Tensor();
    fill(parameter);
  }
}

// Parameters that were frozen on all ranks (take_over_trained) after their buckets were made are
// treated as unused by every rank.
void Reducer::leave_out_frozen() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_.is_trained(i) || !buckets_.hold(i) ||
        std::find(unused_.begin(), unused_.end(), i) != unused_.end())
      continue;
    unused_.push_back(i);
    unused_marked_ = false;
  }
}

// Parameters behind outputs that the loss leaves out are unused, although the forward used them.
void Reducer::leave_out_what_is_missing() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!buckets_.hold(i) || buckets_.is_filled(i) ||
        std::find(unused_.begin(), unused_.end(), i) != unused_.end())
      continue;
    unused_.push_back(i);
  }
  unused_marked_ = false;
  mark_unused();
}

// A parameter that no rank used gets back the gradient it had, or none. One that another rank used
// keeps the average.
void Reducer::restore_unused() {
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

}  // namespace weft::parallel
