// SPDX-License-Identifier: Apache-2.0
// Makes the backend of a process group of torch.distributed.
#pragma once

#include <optional>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <weft/python/backend/backend.h>

namespace weft::python {

// Blocks until all ranks of the group have called it.
c10::intrusive_ptr<Backend> create(const c10d::DistributedBackendOptions& options);

// Joins the ranks that meet at the store.
weft::ProcessGroup join(const c10::intrusive_ptr<c10d::Store>& store, const Place& place,
                        std::optional<c10::Device> gpu);

// Later groups are made of the world. If `first` is the world, `second` takes its place.
void follow_world(const Backend& first, const c10::intrusive_ptr<Backend>& second);

}  // namespace weft::python
