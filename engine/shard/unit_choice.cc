// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>

#include <weft/base/error.h>
#include <weft/engine/ddp/flat.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/unit_choice.h>

namespace weft::shard {

namespace {

using torch::nn::Module;

std::string joined(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

bool is_container(const Module& module) {
  return dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr;
}

void add_children(const Module& module, const std::string& path,
                  std::vector<std::pair<const Module*, std::string>>& units) {
  for (const auto& child : module.named_children()) {
    const std::string name = joined(path, child.key());
    if (is_container(*child.value())) {
      add_children(*child.value(), name, units);
    } else if (!child.value()->parameters().empty()) {
      units.emplace_back(child.value().get(), name);
    }
  }
}

void add_named(const Module& module, const std::string& path, const FullyShardOptions& options,
               std::vector<std::pair<const Module*, std::string>>& units) {
  for (const auto& child : module.named_children()) {
    const std::string name = joined(path, child.key());
    if (options.units(name, *child.value())) units.emplace_back(child.value().get(), name);
    add_named(*child.value(), name, options, units);
  }
}

// Walks a module's tree and notes, for each parameter, its places and the innermost unit around all
// of them.
class Walk {
 public:
  explicit Walk(const std::vector<std::pair<const Module*, std::string>>& units) {
    chosen.push_back({});
    for (const auto& [module, name] : units) {
      if (numbers_.emplace(module, chosen.size()).second) chosen.push_back({name, {}});
    }
  }

  // `around`: the units around the module, from the root inwards.
  void visit(Module& module, const std::shared_ptr<Module>& holder, const std::string& path,
             std::vector<std::size_t> around) {
    if (const auto found = numbers_.find(&module); found != numbers_.end())
      around.push_back(found->second);
    for (const auto& item : module.named_parameters(/*recurse=*/false))
      add({holder, &module, item.key(), joined(path, item.key()), item.value()}, around);
    for (const auto& child : module.named_children())
      visit(*child.value(), child.value(), joined(path, child.key()), around);
  }

  std::vector<ChosenUnit> units() {
    for (Parameter& parameter : parameters_) {
      ChosenUnit& unit = chosen[parameter.around.back()];
      unit.parameters.push_back({std::move(parameter.places)});
    }
    std::erase_if(chosen, [](const ChosenUnit& unit) { return unit.parameters.empty(); });
    return std::move(chosen);
  }

  std::vector<ParameterPlace> places;  // each module's once

 private:
  struct Parameter {
    std::vector<ParameterPlace> places;
    std::vector<std::size_t> around;  // what the units around all places have in common
  };

  void add(ParameterPlace place, const std::vector<std::size_t>& around) {
    const void* const key = place.tensor.unsafeGetTensorImpl();
    const auto [found, is_new] = by_tensor_.emplace(key, parameters_.size());
    if (is_new) parameters_.push_back({{}, around});
    Parameter& parameter = parameters_[found->second];
    const auto common = std::ranges::mismatch(parameter.around, around).in1;
    parameter.around.erase(common, parameter.around.end());
    const auto is_same = [&](const ParameterPlace& other) {
      return other.module == place.module && other.key == place.key;
    };
    if (std::ranges::any_of(parameter.places, is_same)) return;  // a module with two paths
    places.push_back(place);
    parameter.places.push_back(std::move(place));
  }

  std::vector<ChosenUnit> chosen;
  std::unordered_map<const Module*, std::size_t> numbers_;
  std::unordered_map<const void*, std::size_t> by_tensor_;
  std::vector<Parameter> parameters_;
};

[[noreturn]] void refuse(const ParameterPlace& place, const std::string& why) {
  throw Error(Blame::Caller, "parameter '" + place.name + "' cannot be sharded: " + why);
}

void require_usable_module(const ParameterPlace& place) {
  const auto sparse = [&](const auto* embedding) {
    if (embedding == nullptr) return;
    if (embedding->options.sparse())
      refuse(place, "its embedding has sparse gradients; leave out sparse(true)");
    if (embedding->options.max_norm())
      refuse(place,
             "its embedding renormalises rows in place during forward (max_norm), which would be "
             "lost; leave out max_norm");
  };
  sparse(dynamic_cast<const torch::nn::EmbeddingImpl*>(place.module));
  sparse(dynamic_cast<const torch::nn::EmbeddingBagImpl*>(place.module));
  if (dynamic_cast<const torch::nn::ParameterListImpl*>(place.module) != nullptr ||
      dynamic_cast<const torch::nn::ParameterDictImpl*>(place.module) != nullptr) {
    refuse(place,
           "a ParameterList or ParameterDict gives forward its parameters() themselves, which are "
           "this rank's rows; register it in the module that uses it (register_parameter), and "
           "keep the tensor as a member");
  }
}

void require_usable(const ChosenParameter& parameter) {
  const ParameterPlace& first = parameter.places.front();
  for (const ParameterPlace& place : parameter.places) require_usable_module(place);
  if (is_shell(first.tensor)) {
    refuse(first,
           "a module that was passed to fully_shard() uses the same tensor and has divided it "
           "already, but a parameter belongs to the innermost unit that contains all its uses; "
           "call fully_shard() on a module that contains both, or leave that one out: "
           "FullyShardedDataParallel divides it then");
  }
  if (!first.tensor.is_leaf())
    refuse(first, "it is the result of an operator, not a leaf; detach() it");
  if (has_hooks(first.tensor)) {
    refuse(first,
           "it has a hook, which would be called with no gradient; register hooks on "
           "model->parameters() after sharding");
  }
  parallel::require_flat(first.tensor, "parameter '" + first.name + "'");
}

// Leaves with common memory are one value to a program that is not sharded, and would be two.
void refuse_common_memory(const std::vector<ChosenUnit>& units) {
  std::map<std::uintptr_t, std::pair<std::uintptr_t, const ParameterPlace*>> ranges;
  for (const ChosenUnit& unit : units) {
    for (const ChosenParameter& parameter : unit.parameters) {
      const ParameterPlace& place = parameter.places.front();
      if (place.tensor.is_meta() || place.tensor.numel() == 0) continue;
      const auto begin = reinterpret_cast<std::uintptr_t>(place.tensor.const_data_ptr());
      const auto end = begin + place.tensor.nbytes();
      const auto after = ranges.lower_bound(end);
      const auto before = after == ranges.begin() ? ranges.end() : std::prev(after);
      if (before != ranges.end() && before->second.first > begin) {
        refuse(place, "it has memory in common with parameter '" + before->second.second->name +
                          "', which is another tensor; register one tensor in both places");
      }
      ranges[begin] = {end, &place};
    }
  }
}

std::vector<ChosenUnit> checked(std::vector<ChosenUnit> units) {
  const at::Tensor* any = nullptr;
  for (ChosenUnit& unit : units) {
    std::erase_if(unit.parameters, [](const ChosenParameter& parameter) {
      return owner_of(parameter.places.front().tensor).unit != nullptr;
    });
    for (const ChosenParameter& parameter : unit.parameters) {
      require_usable(parameter);
      const at::Tensor& tensor = parameter.places.front().tensor;
      if (any == nullptr) any = &tensor;
      if (tensor.device() != any->device()) {
        refuse(
            parameter.places.front(),
            "it is on " + tensor.device().str() + " and others are on " + any->device().str() +
                "; a sharded model lies on one device of each rank" +
                (tensor.is_meta() || any->is_meta() ? ": build all of it under weft::OnMeta, or "
                                                      "call weft::materialize(model, seed) before"
                                                    : ""));
      }
    }
  }
  std::erase_if(units, [](const ChosenUnit& unit) { return unit.parameters.empty(); });
  refuse_common_memory(units);
  return units;
}

}  // namespace

std::vector<ParameterPlace> places_in(Module& root) {
  Walk walk({});
  walk.visit(root, nullptr, "", {0});
  return std::move(walk.places);
}

std::vector<std::shared_ptr<Unit>> units_in(Module& root) {
  std::vector<std::shared_ptr<Unit>> units;
  std::unordered_set<const Unit*> seen;
  for (const ParameterPlace& place : places_in(root)) {
    auto unit = owner_of(place.tensor).unit;
    if (unit && seen.insert(unit.get()).second) units.push_back(std::move(unit));
  }
  return units;
}

std::vector<ChosenUnit> choose_units(const std::shared_ptr<Module>& root,
                                     const FullyShardOptions& options) {
  std::vector<std::pair<const Module*, std::string>> units;
  if (options.units) {
    add_named(*root, "", options, units);
  } else {
    add_children(*root, "", units);
  }
  Walk walk(units);
  walk.visit(*root, root, "", {0});
  return checked(walk.units());
}

ChosenUnit whole_unit(const std::shared_ptr<Module>& root, std::string name) {
  Walk walk({});
  walk.visit(*root, root, "", {0});
  auto units = checked(walk.units());
  ChosenUnit unit = units.empty() ? ChosenUnit{} : std::move(units.front());
  unit.name = std::move(name);
  return unit;
}

}  // namespace weft::shard
