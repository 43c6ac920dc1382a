// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing: a part of a model keeps none of its intermediate results for backward,
// which computes them again. Semantics of torch.utils.checkpoint with use_reentrant=False.
//
//   torch::Tensor forward(torch::Tensor x) {
//     for (Block& block : blocks) x = weft::checkpointed(block, x);
//     return head(x);
//   }
//
// The first forward runs as under torch::NoGradGuard. The second one runs inside of backward, in
// the order of the backward: with the states that the default generators had at the first one (the
// CPU's, and those of the GPUs of arguments and parameters), and its autocast. It must compute the
// same, so no other thread may draw from these generators meanwhile. Running statistics of
// torch::nn's and Weft's normalisation layers are updated once; other side effects happen twice.
// backward() runs once; create_graph is refused, and so is a capture into a CUDA graph, in which
// libtorch does not give the state of a GPU's generator. Works in models that are wrapped by
// DistributedDataParallel and FullyShardedDataParallel, which reach the parameters as usual, and
// nested. Call it in forward, with a part of the model, not with the wrapper.
//
// Parameters get gradients if the module has registered them, and tensors if they are arguments:
// tensors, and tensors in optionals, tuples, containers and structs with WEFT_FIELDS. Arguments are
// copied. Views (at::TensorList, at::IntArrayRef, std::span, std::string_view) and pointers to
// tensors, numbers and texts do not compile, since what they show may be gone in backward: pass a
// std::vector or a std::string, which forward() may take as a view. An object behind a pointer must
// live until backward. The forward must not write to its arguments. Without gradients it is a plain
// call. Nothing here blocks, except what the module's forward does.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <weft/base/export.h>
#include <weft/engine/future/refusal.h>
#include <weft/engine/tensor/each_tensor.h>
#include <weft/engine/training/borrowed.h>

namespace torch::nn {
class Module;
}

namespace weft {

namespace training::detail {

using Tensors = std::vector<at::Tensor>;
using Forward = std::function<Tensors(const Tensors& inputs)>;

// For Weft's own use.
// Calls `first` without gradients, and `again` in backward. Returns the outputs of `first`.
WEFT_API Tensors checkpointed_outputs(const std::shared_ptr<torch::nn::Module>& module,
                                      const Tensors& inputs, const Forward& first,
                                      const Forward& again);
[[noreturn]] WEFT_API void throw_no_module();

template <class T>
constexpr bool kHoldsTensors = std::is_same_v<T, at::Tensor>;
template <class T, class A>
constexpr bool kHoldsTensors<std::vector<T, A>> = kHoldsTensors<T>;
template <class T, std::size_t N>
constexpr bool kHoldsTensors<std::array<T, N>> = kHoldsTensors<T>;
template <class T>
constexpr bool kHoldsTensors<std::optional<T>> = kHoldsTensors<T>;
template <class A, class B>
constexpr bool kHoldsTensors<std::pair<A, B>> = kHoldsTensors<A>&& kHoldsTensors<B>;
template <class... T>
constexpr bool kHoldsTensors<std::tuple<T...>> = (kHoldsTensors<T> && ...);

// The module of a holder, a shared_ptr, a pointer or a reference, which must live until backward.
template <class M>
std::shared_ptr<M> shared_module(const std::shared_ptr<M>& module) {
  return module;
}
template <class Holder>
requires requires { typename Holder::ContainedType; }
std::shared_ptr<typename Holder::ContainedType> shared_module(const Holder& holder) {
  return holder.is_empty() ? nullptr : holder.ptr();
}
template <class M>
requires std::is_base_of_v<torch::nn::Module, M> std::shared_ptr<M> shared_module(M& module) {
  // Shares the ownership if there is one; otherwise the module does not belong to the pointer.
  return {module.weak_from_this().lock(), &module};
}
template <class M>
requires std::is_base_of_v<torch::nn::Module, M> std::shared_ptr<M> shared_module(M* module) {
  return module == nullptr ? nullptr : shared_module(*module);
}

template <class... About>
struct TakesNoModule : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(weft::detail::kNever<About...>,
                  "checkpointed takes a torch::nn module first: its holder, a std::shared_ptr to "
                  "it, or the module itself, which is a part of the model and not a wrapper such "
                  "as FullyShardedDataParallel");
    return false;
  }
};
template <class... About>
struct ForwardTakesOther : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(weft::detail::kNever<About...>,
                  "the module's forward() does not take these arguments, or it has no forward(): "
                  "checkpointed(module, …) passes copies of its arguments on to forward()");
    return false;
  }
};
template <class... About>
struct KeepsAView : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(weft::detail::kNever<About...>,
                  "checkpointed keeps its arguments until backward, when the memory behind a view "
                  "or a pointer (at::TensorList, at::IntArrayRef, std::span, std::string_view, "
                  "std::tie, T*) may be gone; pass a std::vector, a std::string or the values "
                  "themselves, of which forward() may take a view");
    return false;
  }
};
template <class... About>
struct ReturnsOther : weft::detail::Refusal {
  static constexpr bool accept() {
    static_assert(weft::detail::kNever<About...>,
                  "checkpointed takes modules whose forward() returns a torch::Tensor, or a "
                  "std::tuple, std::pair, std::vector, std::array or std::optional of tensors");
    return false;
  }
};

template <class Module, class... Arguments>
consteval auto refusal_of_checkpointed() {
  if constexpr (!requires(Module & module) { shared_module(module); }) {
    return TakesNoModule<Module>();
  } else {
    using M = typename decltype(shared_module(std::declval<Module&>()))::element_type;
    if constexpr (!std::is_base_of_v<torch::nn::Module, M>) {
      return TakesNoModule<Module>();
    } else if constexpr (!requires(M & module, std::decay_t<Arguments> & ... arguments) {
                           module.forward(arguments...);
                         }) {
      return ForwardTakesOther<Module, Arguments...>();
    } else if constexpr ((kIsBorrowed<Arguments> || ...)) {
      return KeepsAView<Module, Arguments...>();
    } else {
      using Output =
          decltype(std::declval<M&>().forward(std::declval<std::decay_t<Arguments>&>()...));
      if constexpr (kHoldsTensors<std::remove_cvref_t<Output>>)
        return weft::detail::Fine();
      else
        return ReturnsOther<Output>();
    }
  }
}

template <class T>
Tensors tensors_in(T& value) {
  Tensors tensors;
  weft::detail::for_each_tensor(value, [&](const at::Tensor& t) { tensors.push_back(t); });
  return tensors;
}
// Replaces the tensors in the value, in order.
template <class T>
void put_tensors(T& value, const Tensors& tensors) {
  std::size_t next = 0;
  weft::detail::for_each_tensor(
      value, [&](const at::Tensor& t) { const_cast<at::Tensor&>(t) = tensors[next++]; });
}

template <class M, class... Kept>
auto run_checkpointed(std::shared_ptr<M> module, std::tuple<Kept...> arguments) {
  using Output = std::remove_cvref_t<decltype(module->forward(std::declval<Kept&>()...))>;
  const auto forward = [module](std::tuple<Kept...>& given) -> Output {
    return std::apply([&](Kept&... each) -> Output { return module->forward(each...); }, given);
  };
  if (!c10::GradMode::is_enabled()) return forward(arguments);
  const Tensors inputs = tensors_in(arguments);
  put_tensors(arguments, Tensors(inputs.size()));  // the graph keeps the tensors
  const auto call = [forward, arguments = std::move(arguments)](const Tensors& tensors) {
    auto given = arguments;
    put_tensors(given, tensors);
    return forward(given);
  };
  std::optional<Output> output;
  const Tensors outputs = checkpointed_outputs(
      module, inputs,
      [&](const Tensors& tensors) {
        output.emplace(call(tensors));
        return tensors_in(*output);
      },
      [call](const Tensors& tensors) {
        const Output again = call(tensors);
        return tensors_in(again);
      });
  put_tensors(*output, outputs);
  return *std::move(output);
}

}  // namespace training::detail

// Returns what module->forward(arguments…) returns. `module` is a module's holder, a shared_ptr or
// pointer to it, or the module. Throws Caller if the module is empty, or if its forward writes to
// an argument. In backward it throws Caller for a second backward, for create_graph, if the second
// forward returns other tensors than the first one, and if a tensor that it has used could get no
// gradient.
template <class Module, class... Arguments>
auto checkpointed(Module&& module, Arguments&&... arguments) {
  if constexpr (decltype(training::detail::refusal_of_checkpointed<std::remove_reference_t<Module>,
                                                                   Arguments...>())::accept()) {
    auto shared = training::detail::shared_module(module);
    if (!shared) training::detail::throw_no_module();
    return training::detail::run_checkpointed(
        std::move(shared),
        std::tuple<std::decay_t<Arguments>...>(std::forward<Arguments>(arguments)...));
  } else {
    return weft::detail::Refused();
  }
}

}  // namespace weft
