// SPDX-License-Identifier: Apache-2.0
// Makes the backend of a process group of torch.distributed.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <weft/python/backend/backend.h>

namespace weft::python {

// Blocks until all ranks of the group have called it.
c10::intrusive_ptr<Backend> create(const c10d::DistributedBackendOptions& options);

}  // namespace weft::python
