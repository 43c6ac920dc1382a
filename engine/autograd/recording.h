// SPDX-License-Identifier: Apache-2.0
// Records, on one worker and for one autograd context, the messages that the worker has sent in the
// context and the workers that the context was passed to.
//
// Owned by the context. Usable from every thread; nothing here blocks.
#pragma once

#include <map>
#include <set>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/mutex.h>
#include <weft/engine/autograd/ids.h>
#include <weft/engine/autograd/nodes.h>
#include <weft/engine/tensor/torch_releases.h>

namespace weft::autograd {

class Recording {
 public:
  using Sends = std::vector<NodePtr<SendNode>>;

  // `owner`: the rank of the worker that made the context.
  explicit Recording(int owner) : owner_(owner) {}

  // --- workers
  // Notes that a worker takes part: it was called from here, or has called here.
  void add_worker(int rank);
  // Called when the worker has ended the context by itself, so it need not be told.
  void remove_worker(int rank);
  std::set<int> workers() const;
  // Called when a worker cannot be reached, until it is heard of again. True if it took part and
  // was not lost before.
  bool worker_lost(int rank);
  bool has_lost(int rank) const;
  // True if the worker takes part, as far as is known here, or has made the context, and is not
  // lost.
  bool concerns(int rank) const;

  // --- messages
  // Records a message with these tensors to that worker, which takes part from now on. Without
  // tensors only the worker is noted.
  void sent(const MessageId& message, int to, const std::vector<at::Tensor>& tensors);
  void forget(const MessageId& message);
  // Null if the message is not recorded.
  NodePtr<SendNode> send_of(const MessageId& message) const;
  // In the same order. Throws Caller if a message is not recorded.
  Sends sends_of(const std::vector<MessageId>& messages) const;
  // Returns the recorded ones among these messages, and leaves out the others.
  Sends sends_among(const std::set<MessageId>& messages) const;
  Sends all() const;
  // Drops these messages; the caller destroys their graphs.
  [[nodiscard]] Sends take(const std::vector<MessageId>& messages);
  // Drops all messages and records none from now on.
  void close();

 private:
  const int owner_;
  mutable Mutex mutex_;
  bool closed_ WEFT_GUARDED_BY(mutex_) = false;
  std::set<int> workers_ WEFT_GUARDED_BY(mutex_);
  std::set<int> lost_ WEFT_GUARDED_BY(mutex_);  // a part of workers_
  std::map<MessageId, NodePtr<SendNode>> sends_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::autograd
