// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <set>

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <weft/base/error.h>
#include <weft/engine/checkpoint/checkpoint_parts.h>
#include <weft/engine/checkpoint/part_contents.h>
#include <weft/engine/checkpoint/part_values.h>
#include <weft/engine/checkpoint/safetensors.h>
#include <weft/engine/tensor/private_members.h>
#include <weft/engine/zero/zero.h>

namespace weft::checkpoint {

// libtorch's archives are modules of TorchScript, which they do not show.
namespace {
struct OfOutput;
struct OfInput;
}  // namespace

}  // namespace weft::checkpoint

template struct weft::tensor::Reveal<weft::checkpoint::OfOutput,
                                     &torch::serialize::OutputArchive::module_>;
template struct weft::tensor::Reveal<weft::checkpoint::OfInput,
                                     &torch::serialize::InputArchive::module_>;

namespace weft::checkpoint {

namespace {

using torch::optim::Optimizer;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

const torch::jit::Module& module_of(const OutputArchive& archive) {
  return archive.*tensor::revealed<OfOutput>();
}

// --- kinds of values

constexpr const char* kBool = "bool";
constexpr const char* kInteger = "integer";
constexpr const char* kReal = "real";
constexpr const char* kReals = "reals";
constexpr const char* kText = "text";
constexpr const char* kTexts = "texts";
constexpr const char* kNothing = "nothing";
constexpr const char* kTensors = "tensors";  // their number; each has a name of its own

at::Tensor bytes_of_text(const std::string& text) {
  at::Tensor bytes =
      at::empty({static_cast<std::int64_t>(text.size())}, at::TensorOptions(at::kByte));
  if (!text.empty()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::string text_of_bytes(const at::Tensor& bytes) {
  if (bytes.scalar_type() != at::kByte || bytes.dim() != 1)
    throw Error(Blame::Caller, "a text in it is not of bytes");
  return {static_cast<const char*>(bytes.const_data_ptr()),
          static_cast<std::size_t>(bytes.numel())};
}

// The value of a tensor of one element.
template <class T>
T only_in(const at::Tensor& tensor, at::ScalarType dtype) {
  if (tensor.scalar_type() != dtype || tensor.dim() != 0)
    throw Error(Blame::Caller, "a value in it has another dtype or shape than its kind");
  return tensor.item<T>();
}

Value value_of_tensor(std::string name, const at::Tensor& tensor) {
  if (!tensor.defined()) throw Error(Blame::Caller, "a tensor is undefined");
  if (tensor.is_meta()) {
    throw Error(Blame::Caller, "'" + name +
                                   "' has no values yet: it is on the meta device; call "
                                   "weft::materialize(model, seed) first");
  }
  if (tensor.layout() != at::kStrided || tensor.is_quantized()) {
    throw Error(Blame::Caller, "'" + name +
                                   "' is sparse or quantized, which safetensors files cannot "
                                   "hold; use checkpoint::save, or make it dense");
  }
  Value value{std::move(name), tensor.detach(), "", Writer::First, {}};
  if (tensor.scalar_type() == at::kComplexDouble) {
    value.tensor = at::view_as_real(value.tensor.resolve_conj());
    value.kind = kComplex;
  } else if (safetensors_name(tensor.scalar_type()).empty()) {
    throw Error(Blame::Caller, "'" + value.name + "' is of dtype " +
                                   c10::toString(tensor.scalar_type()) +
                                   ", which safetensors files cannot hold; use checkpoint::save");
  } else if (tensor.requires_grad()) {
    value.kind = kRequiresGrad;
  }
  return value;
}

std::string name_of_step(const std::string& step) {
  std::string name;
  for (std::size_t i = 0; i < step.size(); ++i) {
    const bool is_dot = step.compare(i, 3, "%2e") == 0;
    if (!is_dot && step.compare(i, 3, "%25") != 0) {
      name += step[i];
      continue;
    }
    name += is_dot ? '.' : '%';
    i += 2;
  }
  return name;
}

// --- from an archive to values

class Walk {
 public:
  explicit Walk(std::vector<Value>& values) : values_(values) {}

  // All of a module of the archive. Parameters are written by `parameters`.
  void all(const torch::jit::Module& module, const std::string& prefix, Writer parameters) {
    std::set<std::string> named;
    for (const auto& parameter : module.named_parameters(false)) named.insert(parameter.name);
    for (const auto& attribute : module.named_attributes(false)) {
      const std::string name = prefix + step_of(name_of(attribute.name));
      if (attribute.value.isModule()) {
        all(attribute.value.toModule(), name + ".", parameters);
      } else {
        add(name, attribute.value, named.contains(attribute.name) ? parameters : Writer::First);
      }
    }
  }

  // An optimizer's archive as libtorch's classes write it; parameters are numbered instead of named
  // by their addresses. Returns false for one that is laid out in another way.
  bool optimizer(const torch::jit::Module& module, const std::string& prefix, Writer states) {
    if (!module.hasattr("state") || !module.hasattr("param_groups")) return false;
    const auto groups = module.attr("param_groups").toModule();
    const std::int64_t count = groups.attr("param_groups/size").toTensor().item<std::int64_t>();
    // A parameter that is listed twice has two numbers; its state has the first.
    std::map<std::string, std::int64_t> indices;
    std::int64_t next = 0;
    for (std::int64_t g = 0; g < count; ++g) {
      const auto group = groups.attr("param_groups/" + std::to_string(g)).toModule();
      const std::string name = prefix + "param_groups." + std::to_string(g) + ".";
      std::vector<std::int64_t> own;
      const std::int64_t size = group.attr("params/size").toTensor().item<std::int64_t>();
      for (std::int64_t i = 0; i < size; ++i) {
        indices.emplace(group.attr("params/" + std::to_string(i)).toStringRef(), next);
        own.push_back(next++);
      }
      values_.push_back({name + "params", at::tensor(own, at::kLong), "", Writer::First, {}});
      all(group.attr("options").toModule(), name, Writer::First);
    }
    for (const auto& state : module.attr("state").toModule().named_attributes(false)) {
      const auto found = indices.find(state.name);
      if (found == indices.end() || !state.value.isModule()) continue;
      const std::string name = prefix + "state." + std::to_string(found->second) + ".";
      for (const auto& attribute : state.value.toModule().named_attributes(false))
        add(name + step_of(attribute.name), attribute.value, states);
    }
    add(prefix + kParameters, module.attr(kParameters), Writer::First);
    return true;
  }

  void add(const std::string& name, const c10::IValue& value, Writer writer) {
    const at::TensorOptions host(at::kCPU);
    if (value.isTensor()) {
      values_.push_back(value_of_tensor(name, value.toTensor()));
    } else if (value.isBool()) {
      put(name, at::scalar_tensor(value.toBool(), host.dtype(at::kBool)), kBool);
    } else if (value.isInt()) {
      put(name, at::scalar_tensor(value.toInt(), host.dtype(at::kLong)), kInteger);
    } else if (value.isDouble()) {
      put(name, at::scalar_tensor(value.toDouble(), host.dtype(at::kDouble)), kReal);
    } else if (value.isString()) {
      put(name, bytes_of_text(value.toStringRef()), kText);
    } else if (value.isNone()) {
      put(name, at::empty({0}, host.dtype(at::kByte)), kNothing);
    } else if (!add_list(name, value, writer)) {
      throw Error(Blame::Caller, "'" + name + "' is of the type " + value.tagKind() +
                                     ", which save_async cannot write; use checkpoint::save");
    }
    values_.back().writer = writer;
  }

 private:
  void put(const std::string& name, const at::Tensor& tensor, const char* kind) {
    values_.push_back({name, tensor, kind, Writer::First, {}});
  }

  bool add_list(const std::string& name, const c10::IValue& value, Writer writer) {
    if (value.isTensorList()) {
      const auto tensors = value.toTensorVector();
      for (std::size_t i = 0; i < tensors.size(); ++i)
        add(name + "." + std::to_string(i), tensors[i], writer);
      put(name, at::scalar_tensor(static_cast<std::int64_t>(tensors.size()), at::kLong), kTensors);
      return true;
    }
    if (value.isList()) return add_lines(name, value);
    if (!value.isTuple()) return false;
    const std::vector<c10::IValue> elements = value.toTupleRef().elements().vec();
    if (!std::ranges::all_of(elements, [](const auto& one) { return one.isDouble(); }))
      return false;
    std::vector<double> reals;
    for (const auto& one : elements) reals.push_back(one.toDouble());
    put(name, at::tensor(reals, at::kDouble), kReals);
    return true;
  }

  // Returns false for a list that would come back as another value: one of another type, also if it
  // is empty, and one with a text of several lines.
  bool add_lines(const std::string& name, const c10::IValue& list) {
    if (list.toList().elementType()->kind() != c10::TypeKind::StringType) return false;
    std::string lines;
    for (const c10::IValue& one : list.toListRef()) {
      if (one.toStringRef().find('\n') != std::string::npos) return false;
      lines += one.toStringRef() + '\n';
    }
    put(name, bytes_of_text(lines), kTexts);
    return true;
  }

  std::vector<Value>& values_;
};

// The optimizer of a rank's part of the state, as a plain one.
std::unique_ptr<Optimizer> local_of(const parallel::ShardedOptimizer& sharded) {
  auto plain = sharded.plain();
  plain->state().clear();
  for (const Optimizer* const local : sharded.local_optimizers()) {
    // state() has no const form in all releases of libtorch.
    for (const auto& [parameter, state] : const_cast<Optimizer*>(local)->state())
      plain->state()[parameter] = state->clone();  // copies handles of tensors
  }
  return plain;
}

// --- from values to an archive

using Values = std::map<std::string, Value>;

c10::IValue ivalue_of(const Value& value) {
  const at::Tensor& tensor = value.tensor;
  if (value.kind == kBool) return only_in<bool>(tensor, at::kBool);
  if (value.kind == kInteger) return only_in<std::int64_t>(tensor, at::kLong);
  if (value.kind == kReal) return only_in<double>(tensor, at::kDouble);
  if (value.kind == kText) return text_of_bytes(tensor);
  if (value.kind == kNothing) return {};
  if (value.kind == kTexts) {
    c10::List<std::string> lines;
    const std::string text = text_of_bytes(tensor);
    for (std::size_t from = 0; from < text.size();) {
      const std::size_t to = std::min(text.find('\n', from), text.size());
      lines.push_back(text.substr(from, to - from));
      from = to + 1;
    }
    return lines;
  }
  if (value.kind == kReals) {
    if (tensor.scalar_type() != at::kDouble || tensor.dim() != 1)
      throw Error(Blame::Caller, "'" + value.name + "' is no list of numbers in it");
    std::vector<c10::IValue> reals;
    const auto* const data = static_cast<const double*>(tensor.const_data_ptr());
    for (std::int64_t i = 0; i < tensor.numel(); ++i) reals.emplace_back(data[i]);
    return c10::ivalue::Tuple::create(std::move(reals));
  }
  if (value.kind == kComplex) {
    if (tensor.scalar_type() != at::kDouble || tensor.dim() == 0 || tensor.size(-1) != 2)
      throw Error(Blame::Caller, "'" + value.name + "' is no complex tensor in it");
    return at::view_as_complex(tensor);
  }
  if (value.kind == kRequiresGrad)
    return at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type())
               ? tensor.detach().set_requires_grad(true)
               : tensor;
  return tensor;
}

void put(OutputArchive& archive, const std::string& key, const c10::IValue& value) {
  if (value.isTensor()) {
    archive.write(key, value.toTensor(), true);
  } else {
    archive.write(key, value);
  }
}

// The values whose names begin so: the first one, and the one behind the last.
std::pair<Values::const_iterator, Values::const_iterator> below(const Values& values,
                                                                const std::string& prefix) {
  auto end = values.lower_bound(prefix);
  const auto begin = end;
  while (end != values.end() && end->first.starts_with(prefix)) ++end;
  return {begin, end};
}

// Writes all values whose names begin with `prefix`, which ends with a dot.
void write_tree(OutputArchive& archive, const Values& values, const std::string& prefix) {
  auto [at, end] = below(values, prefix);
  while (at != end) {
    const std::string& name = at->first;
    const std::size_t dot = name.find('.', prefix.size());
    const std::string step = name.substr(prefix.size(), dot - prefix.size());
    const std::string key = key_of(name_of_step(step));
    if (dot == std::string::npos) {
      if (at->second.kind == kTensors) {
        c10::List<at::Tensor> list;
        const auto count = only_in<std::int64_t>(at->second.tensor, at::kLong);
        for (std::int64_t i = 0; i < count; ++i) {
          const auto found = values.find(name + "." + std::to_string(i));
          if (found == values.end())
            throw Error(Blame::Caller, "'" + name + "." + std::to_string(i) + "' is missing in it");
          list.push_back(found->second.tensor);
        }
        archive.write(key, c10::IValue(list));
        while (at != end && (at->first == name || at->first.starts_with(name + "."))) ++at;
        continue;
      }
      put(archive, key, ivalue_of(at->second));
      ++at;
      continue;
    }
    const std::string inner_prefix = name.substr(0, dot + 1);
    OutputArchive inner(archive.compilation_unit());
    write_tree(inner, values, inner_prefix);
    archive.write(key, inner);
    while (at != end && at->first.starts_with(inner_prefix)) ++at;
  }
}

at::Tensor size_tensor(std::size_t size) {
  return at::tensor(std::vector<std::int64_t>{static_cast<std::int64_t>(size)}, at::kLong);
}

// The reverse of Walk::optimizer(): libtorch's layout, with numbers in place of addresses.
void write_optimizer(OutputArchive& archive, const Values& values, const std::string& prefix) {
  const auto id_of = [](std::int64_t index) { return std::to_string(index + 1); };
  archive.write("pytorch_version", c10::IValue("1.5.0"));
  OutputArchive groups(archive.compilation_unit());
  OutputArchive states(archive.compilation_unit());
  std::size_t g = 0;
  for (;; ++g) {
    const std::string name = prefix + "param_groups." + std::to_string(g) + ".";
    const auto params = values.find(name + "params");
    if (params == values.end()) break;
    const at::Tensor& indices = params->second.tensor;
    if (indices.scalar_type() != at::kLong || indices.dim() != 1)
      throw Error(Blame::Caller, "'" + name + "params' is no list of integers in it");
    OutputArchive group(archive.compilation_unit());
    group.write("params/size", size_tensor(static_cast<std::size_t>(indices.numel())));
    const auto* const all = static_cast<const std::int64_t*>(indices.const_data_ptr());
    for (std::int64_t i = 0; i < indices.numel(); ++i) {
      const std::int64_t index = all[i];
      group.write("params/" + std::to_string(i), c10::IValue(id_of(index)));
      const std::string state_name = prefix + "state." + std::to_string(index) + ".";
      const auto [begin, end] = below(values, state_name);
      if (begin == end) continue;
      OutputArchive state(archive.compilation_unit());
      write_tree(state, values, state_name);
      states.write(id_of(index), state);
    }
    OutputArchive options(archive.compilation_unit());
    Values own(below(values, name).first, below(values, name).second);
    own.erase(name + "params");
    write_tree(options, own, name);
    group.write("options", options);
    groups.write("param_groups/" + std::to_string(g), group);
  }
  groups.write("param_groups/size", size_tensor(g));
  archive.write("state", states);
  archive.write("param_groups", groups);
  const auto parameters = values.find(prefix + kParameters);
  if (parameters != values.end()) archive.write(kParameters, ivalue_of(parameters->second));
}

// A number or flag of a file that does not say which kind of value it stands for.
c10::IValue scalar_of(const at::Tensor& tensor) {
  if (tensor.dim() != 0) return tensor;
  if (tensor.scalar_type() == at::kBool) return tensor.item<bool>();
  if (at::isIntegralType(tensor.scalar_type(), false)) return tensor.item<std::int64_t>();
  if (at::isFloatingType(tensor.scalar_type())) return tensor.item<double>();
  return tensor;
}

}  // namespace

std::string step_of(const std::string& name) {
  std::string step;
  for (const char letter : name)
    step += letter == '.' ? "%2e" : letter == '%' ? "%25" : std::string(1, letter);
  return step;
}

std::string prefix_of(const Part& part, int rank) {
  if (!Contents::is_per_rank(part)) return part.name();
  return part.name() + ".rank" + std::to_string(rank);
}

bool is_value_of(const std::string& name, const std::string& prefix) {
  return name.starts_with(prefix) && (name.size() == prefix.size() || name[prefix.size()] == '.');
}

bool is_needed(const Part& part, const std::string& prefix, const std::string& name, int rank) {
  if (!is_value_of(name, prefix)) return false;
  const auto* const sharded = sharded_optimizer_of(part);
  const std::string states = prefix + ".state.";
  if (sharded == nullptr || !name.starts_with(states)) return true;
  const std::size_t index = std::strtoull(name.c_str() + states.size(), nullptr, 10);
  std::size_t first = 0;
  for (const auto& group : const_cast<parallel::ShardedOptimizer*>(sharded)->param_groups()) {
    if (index - first < group.params().size())
      return sharded->owner(group.params()[index - first]) == rank;
    first += group.params().size();
  }
  return true;  // another number of parameters, which load() reports
}

std::vector<Value> values_of(const Part& part, int rank, int ranks) {
  std::vector<Value> values;
  Walk walk(values);
  const std::string prefix = prefix_of(part, rank);
  OutputArchive archive;
  const auto& content = Contents::of(part);
  const auto* const sharded = sharded_optimizer_of(part);
  if (sharded != nullptr) {
    save_optimizer(archive, *local_of(*sharded));
    const Writer states = ranks == 1 ? Writer::Any : Writer::Own;
    walk.optimizer(module_of(archive), prefix + ".", states);
  } else {
    save_part(archive, part, Copies::None);
    const auto root = module_of(archive).attr(key_of(part.name()));
    if (!root.isModule()) {
      walk.add(prefix, root, Writer::First);
    } else if (!std::holds_alternative<Optimizer*>(content) ||
               !walk.optimizer(root.toModule(), prefix + ".", Writer::Any)) {
      const bool is_module = std::holds_alternative<torch::nn::Module*>(content);
      walk.all(root.toModule(), prefix + ".", is_module ? Writer::Any : Writer::First);
    }
  }
  const PartRows rows(part, prefix);
  for (Value& value : values) {
    if (Contents::is_per_rank(part)) value.writer = Writer::Own;
    rows.mark(value);
  }
  return values;
}

void write_part(OutputArchive& archive, const Part& part, const std::string& prefix,
                const std::map<std::string, Value>& values) {
  const std::string key = key_of(part.name());
  const auto& content = Contents::of(part);
  if (const auto found = values.find(prefix); found != values.end()) {
    const bool is_plain_variable =
        found->second.kind.empty() && std::holds_alternative<detail::Variable>(content);
    return put(archive, key,
               is_plain_variable ? scalar_of(found->second.tensor) : ivalue_of(found->second));
  }
  OutputArchive inner(archive.compilation_unit());
  if (std::holds_alternative<Optimizer*>(content) &&
      values.contains(prefix + ".param_groups.0.params")) {
    write_optimizer(inner, values, prefix + ".");
  } else {
    write_tree(inner, values, prefix + ".");
  }
  archive.write(key, inner);
}

void reopen(const OutputArchive& from, InputArchive& to) {
  to.*tensor::revealed<OfInput>() = module_of(from);
}

}  // namespace weft::checkpoint
