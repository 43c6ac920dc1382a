// Collectives that autograd sees: they give new tensors, and their backward passes communicate as
// well, so that a loss on one rank reaches what other ranks have put in. Semantics of
// torch.distributed.nn.functional.
//
//   const auto everywhere = weft::functional::all_gather(embedding, group);   // one of each rank
//   loss_of(torch::cat(everywhere)).backward();                               // of every rank's
//   loss, to every embedding
//
// What a gradient is: of the sum of all ranks' losses. Every rank runs the backward pass, and the
// calls are the same on all, as those of the group itself: a rank whose loss leaves out a result
// that others use would keep them waiting, until the group's timeout. So that either all ranks
// communicate in backward or none does, results require a gradient on every rank while gradients
// are enabled (the dtype permitting), whether the inputs on this rank do or not.
//
// CUDA: the current stream waits, the host does not; else the calls block. Inputs need not be
// contiguous. Backward passes can be differentiated again. What the group's own calls refuse is
// refused here, and as Caller what has no gradient: operators other than Sum and Avg.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace weft::functional {

// root's values. Backward: their gradient is the sum of all ranks', on root; the others' inputs, of
// which only the shape counts, have zeros.
WEFT_API at::Tensor broadcast(const at::Tensor& tensor, int root, ProcessGroup group);
// On root; zeros on the others, whose gradients count nothing.
WEFT_API at::Tensor reduce(const at::Tensor& tensor, int root, ProcessGroup group,
                           ReduceOp op = ReduceOp::Sum);
WEFT_API at::Tensor all_reduce(const at::Tensor& tensor, ProcessGroup group,
                               ReduceOp op = ReduceOp::Sum);
// Of rank r at [r]; all of one shape.
WEFT_API std::vector<at::Tensor> all_gather(const at::Tensor& tensor, ProcessGroup group);
// On root; zeros on the others, whose gradients count nothing.
WEFT_API std::vector<at::Tensor> gather(const at::Tensor& tensor, int root, ProcessGroup group);
// root's tensors[rank]. The others give as many, of which only the shape counts.
WEFT_API at::Tensor scatter(const std::vector<at::Tensor>& tensors, int root, ProcessGroup group);
// The sum, or the average, of all ranks' tensors[rank].
WEFT_API at::Tensor reduce_scatter(const std::vector<at::Tensor>& tensors, ProcessGroup group,
                                   ReduceOp op = ReduceOp::Sum);
// What rank r gives for this rank at [r]; all tensors of one shape.
WEFT_API std::vector<at::Tensor> all_to_all(const std::vector<at::Tensor>& tensors,
                                            ProcessGroup group);

}  // namespace weft::functional
