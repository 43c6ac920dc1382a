// SPDX-License-Identifier: Apache-2.0
// Differences between the libtorch releases that Weft supports (docs/compatibility.md has the
// range). No other file tests TORCH_VERSION_*. Each difference names the release that made it.
#pragma once

#include <memory>
#include <utility>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

#define WEFT_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||       \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// Weft calls const_data_ptr() without a type. at::Tensor::const_data_ptr<T>() of 2.11 is a template
// that clang 18 and later mangles differently from g++, which libtorch is built with, so the linker
// does not find it.

namespace weft {

// Pointers that own nodes of the autograd graph, as torch::autograd::Edge holds them. 2.13 counts
// references inside the node; earlier releases use std::shared_ptr.
#if WEFT_TORCH_AT_LEAST(2, 13)
template <class Node>
using NodePtr = c10::intrusive_ptr<Node>;
template <class Node>
using WeakNodePtr = c10::weak_intrusive_ptr<Node>;

template <class Node, class... Arguments>
NodePtr<Node> make_node(Arguments&&... arguments) {
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}
#else
template <class Node>
using NodePtr = std::shared_ptr<Node>;
template <class Node>
using WeakNodePtr = std::weak_ptr<Node>;

template <class Node, class... Arguments>
NodePtr<Node> make_node(Arguments&&... arguments) {
  return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
}
#endif

}  // namespace weft
