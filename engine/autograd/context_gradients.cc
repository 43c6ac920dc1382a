// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <unordered_map>

#include <weft/engine/autograd/context_gradients.h>

namespace weft::autograd {

void ContextGradients::settle(int root, PassId settled) {
  PassId& before = settled_[root];
  before = std::max(before, settled);
}

bool ContextGradients::is_settled(PassId pass) const {
  const auto settled = settled_.find(root_of(pass));
  return settled != settled_.end() && pass < settled->second;
}

void ContextGradients::add(std::uint64_t order, PassId pass, Gradients&& gradients) {
  fresh_.insert_or_assign(order, Fresh{pass, std::move(gradients)});
}

Gradients ContextGradients::discard(PassId pass) {
  const auto found =
      std::ranges::find_if(fresh_, [&](const auto& one) { return one.second.pass == pass; });
  if (found == fresh_.end()) return {};
  Gradients discarded = std::move(found->second.gradients);
  fresh_.erase(found);
  return discarded;
}

// These are all passes with their root here, which have ended on all other workers, and the passes
// of another root that the root has settled. If a pass that may still fail replaces the sum, the
// passes that began after it wait, since they are added to the sum that it makes.
void ContextGradients::fold() {
  for (auto it = fresh_.begin(); it != fresh_.end();) {
    Fresh& one = it->second;
    if (root_of(one.pass) == self_ || is_settled(one.pass)) {
      sum_.merge(std::move(one.gradients));
      it = fresh_.erase(it);
    } else if (one.gradients.replaces_any()) {
      return;
    } else {
      ++it;
    }
  }
}

bool ContextGradients::may_lose_any() const {
  return std::ranges::any_of(fresh_,
                             [&](const auto& one) { return root_of(one.second.pass) != self_; });
}

at::Tensor ContextGradients::gradient(const at::Tensor& parameter) {
  fold();
  const at::Tensor* found = sum_.find(parameter);
  at::Tensor sum = found == nullptr ? at::Tensor() : *found;
  for (const auto& [order, one] : fresh_) {
    const at::Tensor* more = one.gradients.find(parameter);
    if (more == nullptr || !more->defined()) continue;
    sum = one.gradients.replaces(parameter) ? *more : sum_of(sum, *more);
  }
  return sum;
}

std::vector<std::pair<at::Tensor, at::Tensor>> ContextGradients::all() {
  fold();
  auto all = sum_.all();
  std::unordered_map<const c10::TensorImpl*, std::size_t> places;
  for (const auto& [parameter, gradient] : all)
    places.emplace(parameter.unsafeGetTensorImpl(), places.size());
  for (const auto& [order, one] : fresh_) {
    for (const auto& [parameter, gradient] : one.gradients.all()) {
      const auto [place, is_first] =
          places.try_emplace(parameter.unsafeGetTensorImpl(), all.size());
      if (is_first) {
        all.emplace_back(parameter, gradient);
      } else {
        at::Tensor& sum = all[place->second].second;
        sum = one.gradients.replaces(parameter) ? gradient : sum_of(sum, gradient);
      }
    }
  }
  return all;
}

}  // namespace weft::autograd
