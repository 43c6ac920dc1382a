// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/base/error.h>
#include <weft/engine/autograd/recording.h>

namespace weft::autograd {

void Recording::add_worker(int rank) {
  MutexLock lock(mutex_);
  workers_.insert(rank);
  lost_.erase(rank);
}

void Recording::remove_worker(int rank) {
  MutexLock lock(mutex_);
  workers_.erase(rank);
}

std::set<int> Recording::workers() const {
  MutexLock lock(mutex_);
  return workers_;
}

bool Recording::worker_lost(int rank) {
  MutexLock lock(mutex_);
  return workers_.contains(rank) && lost_.insert(rank).second;
}

bool Recording::has_lost(int rank) const {
  MutexLock lock(mutex_);
  return lost_.contains(rank);
}

bool Recording::concerns(int rank) const {
  MutexLock lock(mutex_);
  return !lost_.contains(rank) && (workers_.contains(rank) || rank == owner_);
}

void Recording::sent(const MessageId& message, int to, const std::vector<at::Tensor>& tensors) {
  auto send = tensors.empty() ? nullptr : make_node<SendNode>(message, to, tensors);
  MutexLock lock(mutex_);
  workers_.insert(to);
  lost_.erase(to);
  if (send && !closed_) sends_.emplace(message, std::move(send));
}

void Recording::forget(const MessageId& message) {
  NodePtr<SendNode> dropped;
  MutexLock lock(mutex_);
  const auto found = sends_.find(message);
  if (found == sends_.end()) return;
  dropped = std::move(found->second);
  sends_.erase(found);
}

NodePtr<SendNode> Recording::send_of(const MessageId& message) const {
  MutexLock lock(mutex_);
  const auto found = sends_.find(message);
  return found == sends_.end() ? nullptr : found->second;
}

Recording::Sends Recording::sends_of(const std::vector<MessageId>& messages) const {
  Sends sends;
  MutexLock lock(mutex_);
  for (const MessageId& message : messages) {
    const auto found = sends_.find(message);
    if (found == sends_.end()) {
      throw Error(Blame::Caller,
                  "an earlier backward has freed this graph: give that one retain_graph, or "
                  "compute the loss again; or the loss was not computed in this context");
    }
    sends.push_back(found->second);
  }
  return sends;
}

Recording::Sends Recording::sends_among(const std::set<MessageId>& messages) const {
  Sends sends;
  MutexLock lock(mutex_);
  for (const auto& [message, send] : sends_) {
    if (messages.contains(message)) sends.push_back(send);
  }
  return sends;
}

Recording::Sends Recording::all() const {
  Sends all;
  MutexLock lock(mutex_);
  for (const auto& [message, send] : sends_) all.push_back(send);
  return all;
}

Recording::Sends Recording::take(const std::vector<MessageId>& messages) {
  Sends taken;
  MutexLock lock(mutex_);
  for (const MessageId& message : messages) {
    const auto found = sends_.find(message);
    if (found == sends_.end()) continue;
    taken.push_back(std::move(found->second));
    sends_.erase(found);
  }
  return taken;
}

void Recording::close() {
  std::map<MessageId, NodePtr<SendNode>> dropped;  // destroyed after the lock
  MutexLock lock(mutex_);
  closed_ = true;
  dropped.swap(sends_);
}

}  // namespace weft::autograd
