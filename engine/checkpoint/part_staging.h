// SPDX-License-Identifier: Apache-2.0
// Saves and stages the parts that load themselves: optimizers, and objects with save() and load().
// Internal; for checkpoint_parts.cc.
#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include <weft/engine/checkpoint/checkpoint_parts.h>

namespace weft::checkpoint {

std::string in_quotes(const std::string& name);
// "Float [2, 3]"
std::string form_of(const at::Tensor& tensor);
std::string form_of(c10::ScalarType dtype, at::IntArrayRef sizes);
// The same with the whole shape of a parameter of which the tensor is this rank's rows.
std::string whole_form_of(const at::Tensor& tensor);
[[noreturn]] void differs(const std::string& what, const std::string& in_file,
                          const std::string& here);

Commit stage_optimizer(const std::shared_ptr<torch::serialize::InputArchive>& archive,
                       torch::optim::Optimizer& optimizer);
Commit stage_archived(const std::shared_ptr<torch::serialize::InputArchive>& archive,
                      const detail::Archived& object);

at::Tensor tensor_of(const detail::Numbers& numbers);
Commit stage_numbers(const at::Tensor& value, const detail::Numbers& numbers);

}  // namespace weft::checkpoint
