// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/engine/autograd/pass.h>
#include <weft/engine/ddp/model_state.h>
#include <weft/engine/ddp/trained_parameters.h>

namespace weft::parallel {

at::Tensor& gradient_of(const at::Tensor& parameter) {
  if (auto* pass = autograd::Pass::current()) return pass->gradients().of(parameter);
  return parameter.mutable_grad();
}

TrainedParameters::TrainedParameters(std::vector<ReducerParameter> parameters, ProcessGroup group)
    : parameters_(std::move(parameters)), group_(std::move(group)) {
  for (const ReducerParameter& parameter : parameters_) layouts_.emplace_back(parameter.tensor);
  trained_ = compared_ = ever_trained_ = trained_now();
}

bool TrainedParameters::contain(const at::Tensor& parameter) const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [&](const auto& one) { return one.tensor.is_same(parameter); });
}

std::string TrainedParameters::names_of(const std::vector<std::size_t>& parameters) const {
  constexpr std::size_t kShown = 20;
  std::string text = parameters.size() == 1 ? "parameter " : "parameters ";
  for (std::size_t i = 0; i < std::min(parameters.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(parameters[i]) + " (" +
            parameters_[parameters[i]].name + ")";
  }
  if (parameters.size() > kShown)
    text += " and " + std::to_string(parameters.size() - kShown) + " more";
  return text + " on rank " + std::to_string(group_.rank());
}

std::vector<bool> TrainedParameters::trained_now() const {
  std::vector<bool> trained;
  for (const ReducerParameter& parameter : parameters_)
    trained.push_back(parameter.tensor.requires_grad());
  return trained;
}

void TrainedParameters::note_trained() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].tensor.requires_grad()) ever_trained_[i] = true;
  }
}

bool TrainedParameters::keeps_layout(std::size_t parameter) const {
  return layouts_[parameter] == Layout(parameters_[parameter].tensor);
}

void TrainedParameters::set_layout(std::size_t parameter) {
  layouts_[parameter] = Layout(parameters_[parameter].tensor);
}

void TrainedParameters::compare(const std::vector<std::size_t>& changed) {
  std::vector<NamedTensor> named;
  for (const ReducerParameter& parameter : parameters_) {
    named.push_back(
        {parameter.name + (parameter.tensor.requires_grad() ? "" : " (frozen)"), parameter.tensor});
  }
  announce_change(group_, names_of(changed));
  on_all_ranks(group_, "DistributedDataParallel", "the comparison of frozen parameters", [&] {
    try {
      check_same_model(group_, named);
    } catch (const Error& error) {
      throw explained_by_changes(group_, error);
    }
  });
  withdraw_change(group_);
  compared_ = trained_now();
}

void TrainedParameters::compare_changes(const std::vector<std::size_t>& bucket) {
  std::vector<std::size_t> changed;
  for (const std::size_t parameter : bucket) {
    if (parameters_[parameter].tensor.requires_grad() != compared_[parameter])
      changed.push_back(parameter);
  }
  if (!changed.empty()) compare(changed);
}

}  // namespace weft::parallel
