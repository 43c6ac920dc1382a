// Starting all ranks from the same model.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/parallel/device_groups.h>

namespace weft::parallel {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// Compares names, shapes, dtypes, layouts and places (the host, the rank's GPU, its second one, …) with rank 0's, and
// `options`, lines of text. Collective. Throws Caller on every rank when one differs; the text names the ranks that do and
// their first difference. So it does where a tensor
// cannot be copied to other ranks, being sparse or expanded. One rank alone compares nothing.
void check_same_model(ProcessGroup& group, const std::vector<NamedTensor>& tensors, const std::string& options = "");

// Copies the values of `root` to all ranks, in flat pieces of at most 250 MiB. Collective; blocks until they are there.
// `model`: as in transport::Training, so that ranks which copy different models are told so.
void broadcast_values(DeviceGroups& groups, const std::vector<at::Tensor>& tensors, int root, std::uint32_t model);

}  // namespace weft::parallel
