// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/autograd/sent_gradients.h>

namespace weft::autograd {

void SentGradients::sent(int rank) {
  ++open_;
  MutexLock lock(mutex_);
  reached_.insert(rank);
  unanswered_.insert(rank);
}

void SentGradients::answered(int rank) {
  MutexLock lock(mutex_);
  const auto one = unanswered_.find(rank);
  if (one != unanswered_.end()) unanswered_.erase(one);
}

bool SentGradients::reached(int rank) const {
  MutexLock lock(mutex_);
  return reached_.contains(rank);
}

std::set<int> SentGradients::unanswered() const {
  MutexLock lock(mutex_);
  return {unanswered_.begin(), unanswered_.end()};
}

}  // namespace weft::autograd
