// SPDX-License-Identifier: Apache-2.0
// Warns of the first events of a kind that strangers can cause as often as they like, so that they
// cannot fill a disk with the log. Writes later ones at the level debug. Thread-safe.
#pragma once

#include <atomic>
#include <string>

#include <weft/base/log.h>

namespace weft {

class FirstWarnings {
 public:
  static constexpr int kMost = 16;

  void warn(const std::string& text) {
    const int nth = ++count_;
    if (nth > kMost) return log::debug(text);
    log::warn(nth == kMost ? text + " (further ones: WEFT_LOG=debug)" : text);
  }

 private:
  std::atomic<int> count_{0};
};

}  // namespace weft
