// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/engine/autograd/local_part.h>

namespace weft::autograd {

void LocalPart::expect(std::vector<NodePtr<SendNode>> sends,
                       const std::vector<torch::autograd::Edge>& roots) {
  MutexLock lock(mutex_);
  std::vector<NodePtr<Node>> from;
  for (const auto& send : sends) {
    from.push_back(send);
    expected_.emplace(send->message(), send->to());
  }
  for (const auto& root : roots) {
    from.push_back(root.function);
    graph_.count_edge(root);
  }
  graph_.count_from(from);
  left_ += static_cast<std::int64_t>(sends.size());
  sends_ = std::move(sends);
  has_counted_ = true;
  // Only the root starts; other workers wait for gradients alone.
  if (!begins_here_) --left_;
}

std::vector<Ready> LocalPart::start(const std::vector<torch::autograd::Edge>& roots,
                                    variable_list gradients) {
  std::vector<Ready> ready;
  MutexLock lock(mutex_);
  for (std::size_t i = 0; i < roots.size(); ++i) {
    const auto producer = torch::autograd::InputMetadata(gradients[i]).stream();
    if (auto task = graph_.deliver(roots[i], std::move(gradients[i]), producer))
      ready.push_back(std::move(*task));
  }
  left_ += static_cast<std::int64_t>(ready.size());
  return ready;
}

bool LocalPart::take(const MessageId& message) {
  MutexLock lock(mutex_);
  return expected_.erase(message) != 0;
}

void LocalPart::deliver(const Node& node, variable_list outputs,
                        const std::optional<c10::Stream>& stream, std::vector<Ready>& ready) {
  MutexLock lock(mutex_);
  for (std::size_t i = 0; i < outputs.size() && i < node.num_outputs(); ++i) {
    const auto& edge = node.next_edge(i);
    if (!edge.is_valid()) continue;
    auto next = graph_.deliver(edge, std::move(outputs[i]), stream);
    if (!next) continue;
    ++left_;
    ready.push_back(std::move(*next));
    std::push_heap(ready.begin(), ready.end(), runs_later);
  }
}

void LocalPart::at_end(std::function<void()> callback) {
  MutexLock lock(mutex_);
  at_end_.push_back(std::move(callback));
}

std::vector<std::function<void()>> LocalPart::take_callbacks() {
  MutexLock lock(mutex_);
  return std::exchange(at_end_, {});
}

void LocalPart::stop() {
  MutexLock lock(mutex_);
  expected_.clear();
}

std::vector<MessageId> LocalPart::messages() const {
  std::vector<MessageId> messages;
  MutexLock lock(mutex_);
  for (const auto& send : sends_) messages.push_back(send->message());
  return messages;
}

LocalPart::Missing LocalPart::missing() const {
  Missing missing;
  MutexLock lock(mutex_);
  missing.has_counted = has_counted_;
  for (const auto& [message, to] : expected_) ++missing.gradients[to];
  return missing;
}

}  // namespace weft::autograd
