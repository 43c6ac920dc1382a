// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/autograd/graph_task.h>

#include <weft/engine/autograd/pass.h>
#include <weft/engine/ddp/running_backward.h>
#include <weft/engine/tensor/cuda_devices.h>

namespace weft::parallel {

bool RunningBackward::is_known() const {
  const auto* const pass = autograd::Pass::current();
  return pass ? context_pass_ == pass->ending().failure()
              : context_pass_ == nullptr && !graph_task_.expired();
}

std::shared_ptr<void> RunningBackward::begin() {
  auto task = std::make_shared<char>();
  const auto* const pass = autograd::Pass::current();
  graph_task_ = task;
  context_pass_ = pass ? pass->ending().failure() : nullptr;
  kind_ = Kind::Unknown;
  early_.clear();
  ended_ = false;
  return task;
}

void RunningBackward::abandon() {
  graph_task_.reset();
  context_pass_.reset();
  ended_ = true;
}

RunningBackward::Kind RunningBackward::end() {
  abandon();
  early_.clear();
  return std::exchange(kind_, Kind::Unknown);
}

void RunningBackward::note_early(std::size_t parameter, const c10::Device& device) {
  early_.push_back({parameter, device.is_cpu()
                                   ? std::nullopt
                                   : std::optional(tensor::CudaDevices::current_stream(device))});
}

void RunningBackward::note_direct(std::size_t parameter) {
  if (!direct_) direct_ = Direct{parameter, torch::autograd::get_current_graph_task_id()};
}

}  // namespace weft::parallel
