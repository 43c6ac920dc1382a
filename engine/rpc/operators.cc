// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <weft/base/error.h>
#include <weft/engine/rpc/operators.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::rpc {

c10::IValue detail::to_ivalue(const OperatorValue& value) {
  return std::visit(
      []<class T>(const T& held) {
        if constexpr (std::is_same_v<T, std::monostate>) {
          return c10::IValue();
        } else {
          return c10::IValue(held);
        }
      },
      value);
}

namespace {

// Names of operators that libtorch calls itself, and of some libraries' operators, begin so. They
// trust the caller to have checked.
constexpr const char* kInternal[] = {"aten::native_", "aten::cudnn_",  "aten::miopen_",
                                     "aten::mkldnn_", "aten::fbgemm_", "aten::quantized_"};

// Every program serves operators, so none may do more than compute. None may read or write files,
// change how later calls compute, or skip the checks of its arguments, as many internal operators
// of libtorch do.
void check_served(std::string_view text) {
  const char* why = nullptr;
  const auto begins = [&](const char* one) { return text.starts_with(one); };
  if (!text.starts_with("aten::")) {
    why = "only operators of aten can be";
  } else if (text.starts_with("aten::_")) {
    why = "it is internal to libtorch, as the '_' in front says";
  } else if (std::any_of(std::begin(kInternal), std::end(kInternal), begins) ||
             text.find("_backward") != std::string_view::npos) {
    why = "it is libtorch's own step, which does not check what it is given";
  } else if (text.starts_with("aten::sparse_") && text.find("_tensor") != std::string_view::npos) {
    why = "it does not check the indices (a sparse tensor that is sent is checked)";
  } else if (text.find("unsafe") != std::string_view::npos) {
    why = "it skips checks, as its name says";
  }
  if (why == nullptr) return;
  throw Error(Blame::Caller, "'" + std::string(text) + "' cannot be called by name: " + why +
                                 "; call a function that calls it");
}

void check_served(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    const char* why = nullptr;
    if (argument.name() == "filename" || argument.name() == "file") {
      why = "it opens files";
    } else if (argument.name() == "unsafe") {
      why = "it skips checks, as an argument's name says";
    }
    if (why == nullptr) continue;
    throw Error(Blame::Caller, schema.name() + " cannot be called by name: " + why +
                                   "; call a function that calls it");
  }
}

// libtorch's registry of operators is in torch::jit, but neither compiles nor runs TorchScript.
// c10's dispatcher has the same operators, but does not keep the order of overloads, and the first
// overload that takes the arguments is called.
//
// This is asked before libtorch is, which keeps every name that it was ever asked for: peers choose
// the names.
bool is_known(const std::string& name) {
  static const auto& names = *new std::unordered_set<std::string>([] {
    std::unordered_set<std::string> all;
    for (const auto& one : torch::jit::getAllOperators()) all.insert(one->schema().name());
    return all;
  }());
  return names.contains(name);
}

// "aten::add", or one overload of it, "aten::add.Scalar". Throws Caller if there is no such
// operator, or if it is not served.
struct Name {
  explicit Name(const std::string& text) {
    const auto colons = text.find("::");
    if (colons == std::string::npos) {
      throw Error(Blame::Caller,
                  "'" + text + "' is not an operator's name; names are written \"aten::add\"");
    }
    const auto dot = text.find('.', colons);
    const std::string name = text.substr(0, dot);
    check_served(name);
    if (!is_known(name)) {
      throw Error(Blame::Caller, "libtorch has no operator '" + text +
                                     "'; names are those of torch.ops, \"aten::add\"");
    }
    symbol = c10::Symbol::fromQualString(name);
    if (dot != std::string::npos) overload = text.substr(dot + 1);
  }
  c10::Symbol symbol;
  std::optional<std::string> overload;
};

// Whether an undefined tensor stands for a `Tensor?` that is left out, as in C++ programs.
bool is_left_out(const OperatorValue& value, const c10::FunctionSchema& schema, std::size_t place) {
  const auto* tensor = std::get_if<at::Tensor>(&value);
  return tensor != nullptr && !tensor->defined() && place < schema.arguments().size() &&
         schema.arguments()[place].type()->kind() == c10::TypeKind::OptionalType;
}

bool takes_number(const c10::Argument& argument) {
  const c10::TypePtr& type = argument.type();
  const auto optional = type->cast<c10::OptionalType>();
  return (optional ? optional->getElementType() : type)->kind() == c10::TypeKind::NumberType;
}

// Whether an overload takes the arguments; adds those that they leave out. Schemas do not count a
// bool as a number, but operators do.
bool takes(const c10::FunctionSchema& schema, std::vector<c10::IValue>& stack) {
  std::map<std::size_t, bool> bools;
  for (std::size_t place = 0; place < std::min(stack.size(), schema.arguments().size()); ++place) {
    if (!stack[place].isBool() || !takes_number(schema.arguments()[place])) continue;
    bools[place] = stack[place].toBool();
    stack[place] = std::int64_t{0};
  }
  try {
    schema.checkAndNormalizeInputs(stack);
  } catch (const std::exception&) {
    return false;
  }
  for (const auto& [place, value] : bools) stack[place] = value;
  return true;
}

bool is_of(const c10::Argument& argument, c10::TypeKind kind, const char* name) {
  c10::TypePtr type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == kind ||
         (type->kind() == c10::TypeKind::IntType && argument.name() == name);
}

// libtorch uses these numbers as indices of tables and does not check their range.
void check_numbers(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& stack) {
  const auto check = [&](const c10::Argument& argument, std::int64_t number, c10::TypeKind kind,
                         const char* name, std::int64_t count) {
    if (!is_of(argument, kind, name) || (number >= 0 && number < count)) return;
    throw Error(Blame::Caller, schema.name() + ": " + argument.name() + " is " +
                                   std::to_string(number) + "; libtorch has " +
                                   std::to_string(count) + " of them, from 0");
  };
  for (std::size_t place = 0; place < std::min(stack.size(), schema.arguments().size()); ++place) {
    if (!stack[place].isInt()) continue;
    const c10::Argument& argument = schema.arguments()[place];
    const std::int64_t number = stack[place].toInt();
    check(argument, number, c10::TypeKind::ScalarTypeType, "dtype",
          static_cast<std::int64_t>(at::ScalarType::Undefined));
    check(argument, number, c10::TypeKind::LayoutType, "layout",
          static_cast<std::int64_t>(at::Layout::NumOptions));
    check(argument, number, c10::TypeKind::MemoryFormatType, "memory_format",
          static_cast<std::int64_t>(at::MemoryFormat::NumOptions));
  }
}

enum class Gives { Tensor, Tensors };

bool gives(const c10::FunctionSchema& schema, Gives wanted) {
  const auto& returns = schema.returns();
  const auto is_tensor = [](const c10::Argument& one) {
    return one.type()->kind() == c10::TypeKind::TensorType;
  };
  if (wanted == Gives::Tensor) return returns.size() == 1 && is_tensor(returns[0]);
  if (returns.size() == 1 && returns[0].type()->isSubtypeOf(*c10::ListType::ofTensors()))
    return true;
  return !returns.empty() && std::all_of(returns.begin(), returns.end(), is_tensor);
}

// Checked before the operator runs, so that an operator that is refused has done nothing.
void check_gives(const c10::FunctionSchema& schema, Gives wanted) {
  if (gives(schema, wanted)) return;
  const std::string name = schema.name();
  if (wanted == Gives::Tensor && gives(schema, Gives::Tensors)) {
    throw Error(Blame::Caller, name + " returns no single tensor; call rpc::run_operator_for_list");
  }
  throw Error(Blame::Caller, name + " returns no tensors: " + c10::toString(schema) +
                                 "; call a function of the program's own that calls it");
}

// Runs the first overload whose schema takes the arguments, as torch's own lookup by name does.
c10::IValue run(const std::string& name, const std::vector<OperatorValue>& arguments, Gives what) {
  const Name wanted(name);
  const auto& overloads = torch::jit::getAllOperatorsFor(wanted.symbol);
  std::string tried;
  for (const auto& overload : overloads) {
    if (wanted.overload && overload->schema().overload_name() != *wanted.overload) {
      tried += "\n  " + c10::toString(overload->schema());
      continue;
    }
    std::vector<c10::IValue> stack;
    for (const auto& argument : arguments) {
      stack.push_back(is_left_out(argument, overload->schema(), stack.size())
                          ? c10::IValue()
                          : detail::to_ivalue(argument));
    }
    if (!takes(overload->schema(), stack)) {
      tried += "\n  " + c10::toString(overload->schema());
      continue;
    }
    check_served(overload->schema());
    check_gives(overload->schema(), what);
    check_numbers(overload->schema(), stack);
    overload->getOperation()(stack);
    if (stack.size() == 1) return std::move(stack.front());
    return c10::ivalue::Tuple::create(std::move(stack));
  }
  throw Error(Blame::Caller, "no overload of " + name + " takes these " +
                                 std::to_string(arguments.size()) +
                                 " arguments; there are:" + tried);
}

}  // namespace

at::Tensor run_operator(std::string name, std::vector<OperatorValue> arguments) {
  return run(name, arguments, Gives::Tensor).toTensor();
}

std::vector<at::Tensor> run_operator_for_list(std::string name,
                                              std::vector<OperatorValue> arguments) {
  const c10::IValue result = run(name, arguments, Gives::Tensors);
  if (result.isTensor()) return {result.toTensor()};
  if (result.isTensorList()) return result.toTensorVector();
  std::vector<at::Tensor> all;
  for (const auto& one : result.toTupleRef().elements()) all.push_back(one.toTensor());
  return all;
}

}  // namespace weft::rpc
