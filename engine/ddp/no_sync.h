// SPDX-License-Identifier: Apache-2.0
// NoSync: the guard that no_sync() of the data-parallel wrappers returns.
#pragma once

namespace weft::parallel {

// While it lives, the backwards of the wrapper's forwards made meanwhile do not average gradients;
// afterwards it is as before. Programs hold it by `auto`, and the wrapper must outlive it.
template <class Wrapper>
class [[nodiscard]] NoSync {
 public:
  // For Weft's own use: programs call no_sync().
  NoSync(Wrapper& wrapper, bool on) : wrapper_(&wrapper), before_(wrapper.is_synchronizing()) {
    if (on) wrapper.set_synchronizing(false);
  }
  ~NoSync() { wrapper_->set_synchronizing(before_); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  Wrapper* wrapper_;
  bool before_;
};

}  // namespace weft::parallel
