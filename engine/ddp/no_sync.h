// SPDX-License-Identifier: Apache-2.0
// NoSync: the guard that no_sync() of the data-parallel wrappers returns.
#pragma once

#include <functional>
#include <memory>

namespace weft::parallel {

// While it lives, the backwards of the wrapper's forwards made meanwhile do not average gradients;
// afterwards it is as before. Programs hold it by `auto`. The wrapper may be moved meanwhile.
class [[nodiscard]] NoSync {
 public:
  // For Weft's own use: programs call no_sync(). `model` stays the same when its wrapper is moved.
  template <class Model>
  NoSync(const std::shared_ptr<Model>& model, bool on)
      : restore_([weak = std::weak_ptr<Model>(model), before = model->is_synchronizing()] {
          if (const auto same = weak.lock()) same->set_synchronizing(before);
        }) {
    if (on) model->set_synchronizing(false);
  }
  ~NoSync() { restore_(); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  const std::function<void()> restore_;
};

}  // namespace weft::parallel
