// SPDX-License-Identifier: Apache-2.0
// The backward that runs, as the reducer knows it: whether it is to synchronise, and which
// gradients it brought before that was known. libtorch does not say when a backward begins, and it
// says nothing at all when an exception ends one: the reducer learns both from an object that
// lives as long as the backward.
//
// The reducer owns it, and the reducer's mutex guards it. Nothing here blocks.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace weft::parallel {

class RunningBackward {
 public:
  enum class Kind { Unknown, Local, Synchronized };
  // A gradient without a forward of the wrapper.
  struct Direct {
    std::size_t parameter = 0;
    int graph_task = -1;  // libtorch's number
  };
  // A gradient that came before its backward was known to synchronise.
  struct Early {
    std::size_t parameter = 0;
    std::optional<c10::Stream> stream;  // CUDA: on which it was computed
  };

  // True if this thread runs the backward of the last begin(), which has not ended.
  bool is_known() const;
  // Notes that a backward begins on this thread. The caller destroys the result when libtorch's
  // graph task ends.
  std::shared_ptr<void> begin();
  // True while it brings gradients of a pass. An exception may have ended it since.
  bool is_reducing() const { return !ended_ && kind_ == Kind::Synchronized; }
  // The backward has ended by an exception.
  void abandon();
  // The backward has run to its end. Returns its kind.
  Kind end();

  Kind kind() const { return kind_; }
  void set_kind(Kind kind) { kind_ = kind; }
  // The pass of an AutogradContext that runs it, to tell passes apart; null outside of contexts.
  const void* context_pass() const { return context_pass_.get(); }
  void note_early(std::size_t parameter, const c10::Device& device);
  std::vector<Early> take_early() { return std::exchange(early_, {}); }
  // Keeps the first one until take_direct().
  void note_direct(std::size_t parameter);
  bool has_direct() const { return direct_.has_value(); }
  std::optional<Direct> take_direct() { return std::exchange(direct_, std::nullopt); }

 private:
  Kind kind_ = Kind::Unknown;
  bool ended_ = true;
  std::weak_ptr<void> graph_task_;                         // lives as long as libtorch's graph task
  std::shared_ptr<const std::atomic<bool>> context_pass_;  // Pass::failure()
  std::vector<Early> early_;
  std::optional<Direct> direct_;
};

}  // namespace weft::parallel
