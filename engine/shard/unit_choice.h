// SPDX-License-Identifier: Apache-2.0
// Decides which parameters of a module form a unit. Touches no values.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/engine/shard/fully_shard_options.h>
#include <weft/engine/shard/unit.h>

namespace weft::shard {

// An entry of a module's own parameters. A parameter that modules share has several.
struct ParameterPlace {
  std::shared_ptr<torch::nn::Module> holder;  // owns the module; null for the root of places_in()
  torch::nn::Module* module = nullptr;
  std::string key, name;  // in the module, and in the root
  at::Tensor tensor;
};

struct ChosenParameter {
  std::vector<ParameterPlace> places;
};

struct ChosenUnit {
  std::string name;  // the path of its module; "" for the root
  std::vector<ChosenParameter> parameters;
};

// All entries below `root`, each module once, in the order of named_parameters().
std::vector<ParameterPlace> places_in(torch::nn::Module& root);

// The units of all shards below `root`, in the order of its parameters.
std::vector<std::shared_ptr<Unit>> units_in(torch::nn::Module& root);

// The units of the root in the order of its modules, without those that have no parameters. A
// parameter belongs to the innermost unit that contains all its places. Leaves out shards. Throws
// Caller for parameters that cannot be sharded, and for a parameter that one of its places has lost
// to a unit which does not contain the other.
std::vector<ChosenUnit> choose_units(const std::shared_ptr<torch::nn::Module>& root,
                                     const FullyShardOptions& options);
// The same with all parameters in one unit, of that name.
ChosenUnit whole_unit(const std::shared_ptr<torch::nn::Module>& root, std::string name);

}  // namespace weft::shard
