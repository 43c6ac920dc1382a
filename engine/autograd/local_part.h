// SPDX-License-Identifier: Apache-2.0
// The part of a backward pass that runs on this worker: the gradients that other workers have yet
// to bring, the nodes that these and the roots make ready, and the number of all that has still to
// run. It schedules nodes and does not run them.
//
// Owned by the pass, which counts once before anything arrives. Usable from every thread; nothing
// here blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include <c10/core/Stream.h>

#include <weft/base/mutex.h>
#include <weft/engine/autograd/graph.h>
#include <weft/engine/autograd/ids.h>
#include <weft/engine/autograd/nodes.h>
#include <weft/engine/tensor/torch_releases.h>

namespace weft::autograd {

class LocalPart {
 public:
  // `begins_here`: this worker is the pass's root.
  explicit LocalPart(bool begins_here) : begins_here_(begins_here) {}

  // Counts the nodes that take part; called before the pass starts. `roots`: the roots' edges, on
  // the root worker.
  void expect(std::vector<NodePtr<SendNode>> sends,
              const std::vector<torch::autograd::Edge>& roots = {});
  // At the root: delivers the roots' gradients; returns the nodes that they make ready.
  std::vector<Ready> start(const std::vector<torch::autograd::Edge>& roots,
                           variable_list gradients);
  // Called when the gradients of a message have come. False if they are not expected, or have come
  // already; otherwise the caller runs the message's node.
  bool take(const MessageId& message);
  // Delivers the outputs of a node, computed on `stream`; adds the nodes that they make ready to
  // the heap `ready` (ordered by runs_later).
  void deliver(const Node& node, variable_list outputs, const std::optional<c10::Stream>& stream,
               std::vector<Ready>& ready);
  // Called when a node has run or was skipped, and when the root has started. True if nothing is
  // left to run.
  bool end_one() { return --left_ == 0; }

  // Runs `callback` on this worker after all local nodes; an exception of it fails the pass.
  void at_end(std::function<void()> callback);
  std::vector<std::function<void()>> take_callbacks();
  // Called when the pass has failed: expects no gradient any more.
  void stop();

  // The messages whose gradients the pass has expected.
  std::vector<MessageId> messages() const;
  struct Missing {
    bool has_counted = false;      // expect() has been called
    std::map<int, int> gradients;  // their number, by the worker that should send them
  };
  Missing missing() const;

 private:
  const bool begins_here_;
  std::atomic<std::int64_t> left_{1};  // expected gradients, ready or running nodes, and the start
  mutable Mutex mutex_;
  bool has_counted_ WEFT_GUARDED_BY(mutex_) = false;
  Graph graph_ WEFT_GUARDED_BY(mutex_);
  std::vector<NodePtr<SendNode>> sends_ WEFT_GUARDED_BY(mutex_);  // keeps their graphs alive
  // With the rank that the message was sent to.
  std::map<MessageId, int> expected_ WEFT_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> at_end_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::autograd
