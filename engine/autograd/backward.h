// SPDX-License-Identifier: Apache-2.0
// Begins a backward pass at its root, on the worker that has the loss.
#pragma once

#include <memory>
#include <vector>

#include <weft/engine/autograd/autograd_context.h>

namespace weft::autograd {

// See AutogradContext's functions of the same names.
void backward(const std::shared_ptr<call::AgentCore>& core, const std::shared_ptr<Context>& context,
              const std::vector<at::Tensor>& roots, const BackwardOptions& options);
Future<void> backward_async(const std::shared_ptr<call::AgentCore>& core,
                            const std::shared_ptr<Context>& context,
                            const std::vector<at::Tensor>& roots, const BackwardOptions& options);

}  // namespace weft::autograd
