// SPDX-License-Identifier: Apache-2.0
// Collectives that autograd sees: they return new tensors, and their backward passes communicate
// too, so that a loss on one rank reaches the tensors that other ranks have passed. Semantics of
// torch.distributed.nn.functional.
//
//   const auto everywhere = weft::functional::all_gather(embedding, group);  // one of each rank
//   // The gradient of every rank's loss reaches every embedding.
//   loss_of(torch::cat(everywhere)).backward();
//
// Gradients are those of the sum of all ranks' losses. Every rank runs the backward pass, with the
// same calls on all ranks, as for the group itself: a rank whose loss leaves out a result that
// others use would keep them waiting until the group's timeout. So that either all ranks
// communicate in backward or none does, results require a gradient on every rank while gradients
// are enabled (if the dtype permits), whether or not this rank's inputs do.
//
// On CUDA the current stream waits and the host does not; otherwise the calls block. Inputs need
// not be contiguous. Backward passes can be differentiated again. Refuses everything that the
// group's own calls refuse, and, as Caller, operators without a gradient: all but Sum and Avg.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace weft::functional {

// Returns root's values; only the shape of the other ranks' inputs matters. Backward: the input's
// gradient is the sum of all ranks' gradients on root, and zero on the others.
WEFT_API at::Tensor broadcast(const at::Tensor& tensor, int root, ProcessGroup group);
// Returns the reduction on root, and zeros on the others, whose gradients do not count.
WEFT_API at::Tensor reduce(const at::Tensor& tensor, int root, ProcessGroup group,
                           ReduceOp op = ReduceOp::Sum);
// Returns the reduction on every rank.
WEFT_API at::Tensor all_reduce(const at::Tensor& tensor, ProcessGroup group,
                               ReduceOp op = ReduceOp::Sum);
// Returns rank r's tensor at [r]; all have one shape.
WEFT_API std::vector<at::Tensor> all_gather(const at::Tensor& tensor, ProcessGroup group);
// The same on root; zeros on the others, whose gradients do not count.
WEFT_API std::vector<at::Tensor> gather(const at::Tensor& tensor, int root, ProcessGroup group);
// Returns root's tensors[rank]. The others pass as many tensors, of which only the shape matters.
WEFT_API at::Tensor scatter(const std::vector<at::Tensor>& tensors, int root, ProcessGroup group);
// Returns the sum, or the average, of all ranks' tensors[rank].
WEFT_API at::Tensor reduce_scatter(const std::vector<at::Tensor>& tensors, ProcessGroup group,
                                   ReduceOp op = ReduceOp::Sum);
// Returns at [r] the tensor that rank r passes for this rank; all tensors have one shape.
WEFT_API std::vector<at::Tensor> all_to_all(const std::vector<at::Tensor>& tensors,
                                            ProcessGroup group);

}  // namespace weft::functional
