// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <weft/base/log.h>
#include <weft/engine/autograd/lost_gradients.h>

namespace weft::autograd {

namespace {

std::atomic<bool> has_warned{false};

// A type of its own, so that is_computed() recognises the hook.
class GradientsEndHere final : public torch::autograd::FunctionPreHook {
 public:
  GradientsEndHere(std::string worker, std::string function)
      : worker_(std::move(worker)), function_(std::move(function)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    if (!has_warned.exchange(true)) {
      log::warn("a backward pass ends at the result of " + function_ + ", which " + worker_ +
                " has computed from tensors that require grad: the call was made outside of an "
                "AutogradContext, so no "
                "gradient goes there, and neither the call's arguments nor the tensors of " +
                worker_ +
                " get any. Make an AutogradContext on the thread that makes the calls, and use "
                "context.backward({loss}) and DistributedOptimizer::step(context), since gradients "
                "are then in the context; detach() the result where gradients are to end there "
                "(logged once in a process)");
    }
    return gradients;
  }

 private:
  const std::string worker_;
  const std::string function_;
};

}  // namespace

// Warns in a backward pass and not when the result arrives, because a program that only evaluates a
// model or fetches weights runs no backward pass through it.
void warn_where_gradients_end(const at::Tensor& result, const std::string& worker,
                              const std::string& function) {
  if (!has_warned)
    torch::autograd::impl::add_hook(result, std::make_unique<GradientsEndHere>(worker, function));
}

bool is_computed(const at::Tensor& tensor) {
  const auto ends_here = [](const auto& hook) {
    return dynamic_cast<const GradientsEndHere*>(hook.get()) != nullptr;
  };
  return !tensor.is_leaf() || std::ranges::any_of(torch::autograd::impl::hooks(tensor), ends_here);
}

}  // namespace weft::autograd
