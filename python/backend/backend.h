// SPDX-License-Identifier: Apache-2.0
// torch.distributed's backend "weft": the operations of c10d, each by one of a weft::ProcessGroup.
#pragma once

#include <vector>

#include <weft/python/backend/group_backend.h>

namespace weft::python {

class Backend final : public GroupBackend {
 public:
  using GroupBackend::GroupBackend;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;
};

}  // namespace weft::python
