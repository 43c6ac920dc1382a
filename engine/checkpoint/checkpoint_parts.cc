// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <weft/engine/checkpoint/checkpoint_parts.h>
#include <weft/engine/checkpoint/part_contents.h>
#include <weft/engine/checkpoint/part_rows.h>
#include <weft/engine/checkpoint/part_staging.h>
#include <weft/engine/ddp/join.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/shard/fully_shard.h>
#include <weft/engine/shard/whole_optimizer.h>
#include <weft/engine/zero/zero.h>

namespace weft::checkpoint {

namespace {

using group::error_of;
using parallel::ShardedOptimizer;
using torch::optim::Optimizer;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// --- kinds and names of parts

// Names that libtorch's archive writes but cannot read again: it is TorchScript, where they would
// become names of attributes.
constexpr std::string_view kReserved[] = {
    "Ellipsis", "False", "None",   "NoneType", "True",   "and",   "as",
    "assert",   "break", "class",  "continue", "def",    "del",   "elif",
    "else",     "for",   "global", "if",       "import", "in",    "is",
    "not",      "or",    "pass",   "raise",    "return", "while", "with"};

// Calls `each` for the tensors of a module and of its serializable children, the ones that
// torch::nn::Module::save() writes.
using Visit =
    std::function<void(const std::string& name, const char* kind, const at::Tensor& tensor)>;
void visit(const torch::nn::Module& module, const std::string& prefix, const Visit& each) {
  for (const auto& item : module.named_parameters(false))
    each(prefix + item.key(), "parameter", item.value());
  for (const auto& item : module.named_buffers(false))
    each(prefix + item.key(), "buffer", item.value());
  for (const auto& item : module.named_children()) {
    if (item.value()->is_serializable()) visit(*item.value(), prefix + item.key() + ".", each);
  }
}

// --- saving

// The tensor on the host, without other values of a shared storage.
at::Tensor saved(const at::Tensor& tensor, Copies copies) {
  if (!tensor.defined()) throw Error(Blame::Caller, "a tensor is undefined");
  const bool is_alone =
      tensor.layout() != at::kStrided || tensor.storage().nbytes() <= tensor.nbytes();
  if (copies == Copies::None || (tensor.is_cpu() && is_alone)) return tensor;
  const c10::AutoGradMode no_grad(false);
  at::Tensor copy = tensor.is_cpu() ? tensor.detach().clone() : tensor.detach().cpu();
  return copy.set_requires_grad(tensor.requires_grad());
}

void save_module(OutputArchive& archive, const torch::nn::Module& module, Copies copies) {
  for (const auto& item : module.named_parameters(false))
    archive.write(key_of(item.key()), saved(item.value(), copies));
  for (const auto& item : module.named_buffers(false))
    archive.write(key_of(item.key()), saved(item.value(), copies), true);
  for (const auto& item : module.named_children()) {
    if (!item.value()->is_serializable()) continue;
    OutputArchive child(archive.compilation_unit());
    save_module(child, *item.value(), copies);
    archive.write(key_of(item.key()), child);
  }
}

c10::IValue value_of(const detail::Variable& variable) {
  const auto value = variable.get(variable.place);
  if (!value) throw Error(Blame::Caller, "its value exceeds the largest signed 64-bit integer");
  return std::visit([](const auto& some) { return c10::IValue(some); }, *value);
}

// --- loading

// Copies a value into existing memory.
Commit stage_copy(const std::string& what, const at::Tensor& target, const at::Tensor& value) {
  if (form_of(target) != form_of(value)) differs(what, form_of(value), form_of(target));
  if (target.layout() == at::kStrided && at::has_internal_overlap(target) == at::MemOverlap::Yes) {
    throw Error(Blame::Caller,
                what + " is expanded here: its elements share memory, so it cannot be written");
  }
  if (target.is_inference() && !c10::InferenceMode::is_enabled()) {
    throw Error(Blame::Caller,
                what + " was made in inference mode, outside of which it cannot be written");
  }
  const bool is_there = target.has_storage() && value.has_storage() && target.is_alias_of(value) &&
                        target.const_data_ptr() == value.const_data_ptr();
  return [target, value, is_there] {
    const c10::AutoGradMode no_grad(false);
    if (is_there) {
      target.unsafeGetTensorImpl()->bump_version();  // it was read to its place
    } else {
      target.copy_(value);
    }
  };
}

// Collects all tensors of an archive by their dotted names.
void flatten(InputArchive& archive, const std::string& prefix,
             std::map<std::string, at::Tensor>& tensors) {
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    archive.read(key, value);
    if (value.isTensor()) {
      tensors.emplace(prefix + name_of(key), value.toTensor());
    } else if (value.isModule()) {
      InputArchive inner;
      archive.read(key, inner);
      flatten(inner, prefix + name_of(key) + ".", tensors);
    }
  }
}

// "; it has 'first.bias', 'first.weight', …", for a module whose parts have other names.
std::string some_of(const std::map<std::string, at::Tensor>& tensors) {
  constexpr std::size_t kShown = 4;
  std::string text;
  std::size_t count = 0;
  for (const auto& [name, tensor] : tensors) {
    if (count++ == kShown) return text + ", …";
    text += (text.empty() ? "; it has " : ", ") + in_quotes(name);
  }
  return text;
}

Commit stage_module(InputArchive& archive, const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> in_file;
  flatten(archive, "", in_file);
  std::vector<Commit> copies;
  visit(module, "", [&](const std::string& name, const char* kind, const at::Tensor& tensor) {
    const std::string what = std::string(kind) + " " + in_quotes(name);
    const auto found = in_file.find(name);
    if (found == in_file.end())
      throw Error(Blame::Caller, "the file has no " + what + some_of(in_file));
    copies.push_back(stage_copy(what, tensor, found->second));
    in_file.erase(found);
  });
  if (!in_file.empty()) {
    throw Error(Blame::Caller, "the file has a parameter or buffer " +
                                   in_quotes(in_file.begin()->first) +
                                   ", which the module here does not have");
  }
  return [copies] {
    for (const Commit& copy : copies) copy();
  };
}

// The result is a leaf as well: autograd does not see the copy.
at::Tensor moved(const at::Tensor& value, c10::Device device) {
  return value.detach().to(device).set_requires_grad(value.requires_grad());
}

Commit stage_tensor(at::Tensor* target, const at::Tensor& value, c10::Device device) {
  if (target->defined()) return stage_copy("it", *target, value);
  return [target, there = moved(value, device)] { *target = there; };
}

Commit stage_tensors(InputArchive& archive, std::vector<at::Tensor>* target, c10::Device device) {
  std::map<std::string, at::Tensor> in_file;
  flatten(archive, "", in_file);
  if (!target->empty() && target->size() != in_file.size()) {
    differs("it", std::to_string(in_file.size()) + " tensors", std::to_string(target->size()));
  }
  const auto values = std::make_shared<std::vector<at::Tensor>>(in_file.size());
  std::vector<Commit> copies;
  for (std::size_t i = 0; i < in_file.size(); ++i) {
    const auto found = in_file.find(std::to_string(i));
    if (found == in_file.end())
      throw Error(Blame::Caller, "it is not a list of tensors in the file");
    if (!target->empty()) {
      at::Tensor& own = (*target)[i];
      copies.push_back(own.defined() ? stage_copy("tensor " + std::to_string(i), own, found->second)
                                     : stage_tensor(&own, found->second, device));
    } else {
      (*values)[i] = moved(found->second, device);
    }
  }
  return [target, values, copies] {
    if (target->empty()) *target = *values;
    for (const Commit& copy : copies) copy();
  };
}

std::string kind_of(const c10::IValue& value) {
  if (value.isBool()) return "a bool";
  if (value.isInt()) return "the integer " + std::to_string(value.toInt());
  if (value.isDouble()) return "a floating-point number";
  if (value.isString()) return "a string";
  if (value.isTensor()) return "a tensor";
  return "a module, an optimizer or a list of tensors";
}

Commit stage_variable(const c10::IValue& value, const detail::Variable& variable) {
  detail::Scalar scalar;
  if (value.isBool()) {
    scalar = value.toBool();
  } else if (value.isInt()) {
    scalar = value.toInt();
  } else if (value.isDouble()) {
    scalar = value.toDouble();
  } else if (value.isString()) {
    scalar = value.toStringRef();
  } else {
    differs("it", kind_of(value), "a variable");
  }
  if (!variable.set(variable.place, scalar, false)) {
    const auto own = variable.get(variable.place);
    differs("it", kind_of(value),
            own && own->index() == scalar.index() ? "of a type that cannot hold it"
                                                  : "of another type");
  }
  return [variable, scalar] { variable.set(variable.place, scalar, true); };
}

Commit stage_part(InputArchive& archive, const Part& part, c10::Device device) {
  if (Contents::is_constant(part))
    throw Error(Blame::Caller, "it is a constant or a temporary here; load() needs a variable");
  c10::IValue value;
  if (!archive.try_read(key_of(part.name()), value)) {
    std::string names;
    for (const std::string& key : archive.keys())
      names += (names.empty() ? "" : ", ") + in_quotes(name_of(key));
    throw Error(Blame::Caller, "the file has no part of that name; it has " +
                                   (names.empty() ? "no parts" : names));
  }
  const auto& content = Contents::of(part);
  if (const auto* const variable = std::get_if<detail::Variable>(&content))
    return stage_variable(value, *variable);
  if (const auto* const tensor = std::get_if<at::Tensor*>(&content)) {
    if (!value.isTensor()) differs("it", kind_of(value), "a tensor");
    return stage_tensor(*tensor, value.toTensor(), device);
  }
  if (const auto* const numbers = std::get_if<detail::Numbers>(&content)) {
    if (!value.isTensor()) differs("it", kind_of(value), "a list of numbers");
    return stage_numbers(value.toTensor(), *numbers);
  }
  if (!value.isModule())
    differs("it", kind_of(value), "a module, an optimizer or a list of tensors");
  const auto inner = std::make_shared<InputArchive>();
  archive.read(key_of(part.name()), *inner);
  if (const auto* const module = std::get_if<torch::nn::Module*>(&content))
    return stage_module(*inner, **module);
  if (const auto* const optimizer = std::get_if<Optimizer*>(&content))
    return stage_optimizer(inner, **optimizer);
  if (const auto* const archived = std::get_if<detail::Archived>(&content))
    return stage_archived(inner, *archived);
  return stage_tensors(*inner, std::get<std::vector<at::Tensor>*>(content), device);
}

// The type in which a variable is stored, in words that follow "a variable".
std::string type_of(const detail::Variable& variable) {
  constexpr const char* kTypes[] = {"a bool", "an integer", "a float or double", "a string"};
  const auto value = variable.get(variable.place);
  return std::string(" (") + (value ? kTypes[value->index()] : "an integer") + ")";
}

}  // namespace

// A name's key in the archive: mostly the name itself. No TorchScript name contains '%'.
std::string key_of(const std::string& name) {
  std::string key;
  for (const char letter : name) {
    const auto code = static_cast<unsigned char>(letter);
    if (code >= ' ' && code != 0x7f && letter != '"' && letter != '\\' && letter != '%') {
      key += letter;
    } else {
      constexpr std::string_view kHex = "0123456789abcdef";
      key += {'%', kHex[code / 16], kHex[code % 16]};
    }
  }
  const bool is_reserved =
      name.starts_with("__") || std::ranges::find(kReserved, name) != std::end(kReserved);
  return is_reserved ? key + "%" : key;
}

std::string name_of(const std::string& key) {
  std::string name;
  for (std::size_t i = 0; i < key.size(); ++i) {
    if (key[i] != '%') {
      name += key[i];
    } else if (i + 2 < key.size()) {
      name += static_cast<char>(std::strtol(key.substr(i + 1, 2).c_str(), nullptr, 16));
      i += 2;
    }
  }
  return name;
}

std::vector<std::string> check_names(const std::vector<Part>& parts) {
  constexpr const char* kKinds[] = {"a module",          "an optimizer", "a tensor",
                                    "a list of tensors", "a variable",   "a list of numbers",
                                    "an object"};
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const Part& part : parts) {
    if (part.name().empty()) throw Error(Blame::Caller, "a part of the checkpoint has no name");
    if (!seen.insert(part.name()).second) {
      throw Error(Blame::Caller,
                  "two parts of the checkpoint have the name " + in_quotes(part.name()));
    }
    const auto& content = Contents::of(part);
    const auto* const module = std::get_if<torch::nn::Module*>(&content);
    const auto* const optimizer = std::get_if<Optimizer*>(&content);
    const auto* const archived = std::get_if<detail::Archived>(&content);
    if ((module != nullptr && *module == nullptr) ||
        (optimizer != nullptr && *optimizer == nullptr) ||
        (archived != nullptr && archived->place == nullptr)) {
      throw Error(Blame::Caller, "part " + in_quotes(part.name()) +
                                     " of the checkpoint is a null pointer; make the object first");
    }
    if (optimizer != nullptr && parallel::detail::JoinScope::is_on_this_thread() &&
        has_shards(part)) {
      throw Error(Blame::Caller,
                  "part " + in_quotes(part.name()) +
                      " of the checkpoint is the optimizer of a sharded model, which has one more "
                      "parameter inside of weft::join; save and load it before or after the join");
    }
    const auto* const variable = std::get_if<detail::Variable>(&content);
    names.push_back(in_quotes(part.name()) + ", " + kKinds[content.index()] +
                    (variable != nullptr ? type_of(*variable) : "") +
                    (Contents::is_per_rank(part) ? ", each rank's own" : ""));
  }
  return names;
}

ShardedOptimizer* sharded_optimizer_of(const Part& part) {
  const auto* const optimizer = std::get_if<Optimizer*>(&Contents::of(part));
  return optimizer == nullptr ? nullptr : dynamic_cast<ShardedOptimizer*>(*optimizer);
}

void save_part(OutputArchive& archive, const Part& part, Copies copies) {
  const auto& content = Contents::of(part);
  OutputArchive inner(archive.compilation_unit());
  if (const auto* const module = std::get_if<torch::nn::Module*>(&content)) {
    save_module(inner, **module, copies);
  } else if (const auto* const optimizer = std::get_if<Optimizer*>(&content)) {
    save_optimizer(inner, **optimizer);
  } else if (const auto* const list = std::get_if<std::vector<at::Tensor>*>(&content)) {
    for (std::size_t i = 0; i < (*list)->size(); ++i)
      inner.write(std::to_string(i), saved((**list)[i], copies), true);
  } else if (const auto* const archived = std::get_if<detail::Archived>(&content)) {
    archived->save(archived->place.get(), inner);
  } else if (const auto* const single = std::get_if<at::Tensor*>(&content)) {
    return archive.write(key_of(part.name()), saved(**single, copies), true);
  } else if (const auto* const numbers = std::get_if<detail::Numbers>(&content)) {
    return archive.write(key_of(part.name()), tensor_of(*numbers), true);
  } else {
    return archive.write(key_of(part.name()), value_of(std::get<detail::Variable>(content)));
  }
  archive.write(key_of(part.name()), inner);
}

void require_values(const torch::nn::Module& module, const std::string& part) {
  const auto check = [&](const auto& items) {
    for (const auto& item : items) {
      if (!item.value().defined() || !item.value().is_meta()) continue;
      throw Error(Blame::Caller, "'" + item.key() + "' of the part '" + part +
                                     "' has no values yet: the module was built under "
                                     "weft::OnMeta; call weft::materialize(model, seed) first");
    }
  };
  check(module.named_parameters());
  check(module.named_buffers());
}

std::shared_ptr<void> hold_whole(const Part& part, bool writable) {
  const auto& content = Contents::of(part);
  if (const auto* const module = std::get_if<torch::nn::Module*>(&content)) {
    require_values(**module, part.name());
    return std::make_shared<FullParameters>(**module, writable);
  }
  if (!std::holds_alternative<Optimizer*>(content) || sharded_optimizer_of(part) != nullptr)
    return nullptr;
  return std::make_shared<shard::WholeOptimizer>(*std::get<Optimizer*>(content), writable);
}

std::vector<std::shared_ptr<void>> hold_all_whole(const std::vector<Part>& parts, bool writable,
                                                  ProcessGroup& group) {
  std::vector<std::shared_ptr<void>> whole;
  std::optional<Error> failure;
  for (const Part& part : parts) {
    // Collective: an earlier failure here must not keep this rank from calling it.
    const auto error = error_of([&] { whole.push_back(hold_whole(part, writable)); });
    if (error && !failure) failure = error;
  }
  group::agree(group, failure);
  return whole;
}

void save_parts(OutputArchive& archive, const std::vector<Part>& parts) {
  for (const Part& part : parts) {
    const auto failure = error_of([&] {
      if (Contents::is_per_rank(part)) {
        throw Error(Blame::Caller,
                    "it is per_rank(), and one file has rank 0's values; use save_async");
      }
      save_part(archive, part, Copies::OnHost);
    });
    if (failure)
      throw failure->within("part " + in_quotes(part.name()) +
                            " of the checkpoint cannot be saved");
  }
}

std::vector<Commit> stage_parts(InputArchive& archive, const std::vector<Part>& parts,
                                c10::Device device) {
  std::vector<Commit> commits;
  for (const Part& part : parts) {
    const auto failure = error_of([&] { commits.push_back(stage_part(archive, part, device)); });
    if (failure) throw failure->within("part " + in_quotes(part.name()));
  }
  return commits;
}

}  // namespace weft::checkpoint
