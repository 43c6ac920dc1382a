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

// Every program serves operators, so none may do more than compute: neither read and write files nor skip the checks of
// what it is given, as many of libtorch's internal ones do.
void check_served(std::string_view text) {
  const char* why = nullptr;
  if (!text.starts_with("aten::")) {
    why = "only operators of aten are";
  } else if (text.starts_with("aten::_")) {
    why = "it is internal to libtorch, as the '_' in front says";
  }
  if (why == nullptr) return;
  throw Error(Blame::Caller,
              "'" + std::string(text) + "' is not called by name: " + why + "; call a function that calls it");
}

void check_served(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.name() != "filename" && argument.name() != "file") continue;
    throw Error(Blame::Caller, schema.name() + " is not called by name: it opens files; call a function that calls it");
  }
}

// Asked before libtorch is, which keeps every name that it was ever asked for: peers give them.
bool is_known(const std::string& name) {
  static const auto& names = *new std::unordered_set<std::string>([] {
    std::unordered_set<std::string> all;
    for (const auto& one : torch::jit::getAllOperators()) all.insert(one->schema().name());
    return all;
  }());
  return names.contains(name);
}

// "aten::add", or one overload of it, "aten::add.Scalar". Throws Caller for what is none, or is not served.
struct Name {
  explicit Name(const std::string& text) {
    const auto colons = text.find("::");
    if (colons == std::string::npos) {
      throw Error(Blame::Caller, "'" + text + "' is no operator's name; they are written \"aten::add\"");
    }
    const auto dot = text.find('.', colons);
    const std::string name = text.substr(0, dot);
    check_served(name);
    if (!is_known(name)) {
      throw Error(Blame::Caller, "libtorch has no operator '" + text + "'; its name is as torch.ops has it, \"aten::add\"");
    }
    symbol = c10::Symbol::fromQualString(name);
    if (dot != std::string::npos) overload = text.substr(dot + 1);
  }
  c10::Symbol symbol;
  std::optional<std::string> overload;
};

// As C++ programs leave out a `Tensor?`.
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

// Whether an overload takes them, which adds what they leave out. Schemas do not count a bool as a number, and operators
// do.
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

// The first overload whose schema takes the arguments, as torch's own lookup by name has it.
c10::IValue run(const std::string& name, const std::vector<OperatorValue>& arguments) {
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
      stack.push_back(is_left_out(argument, overload->schema(), stack.size()) ? c10::IValue()
                                                                              : detail::to_ivalue(argument));
    }
    if (!takes(overload->schema(), stack)) {
      tried += "\n  " + c10::toString(overload->schema());
      continue;
    }
    check_served(overload->schema());
    overload->getOperation()(stack);
    if (stack.size() == 1) return std::move(stack.front());
    return c10::ivalue::Tuple::create(std::move(stack));
  }
  throw Error(Blame::Caller, "no overload of " + name + " takes these " + std::to_string(arguments.size()) +
                                 " arguments; there are:" + tried);
}

}  // namespace

at::Tensor run_operator(std::string name, std::vector<OperatorValue> arguments) {
  const c10::IValue result = run(name, arguments);
  if (!result.isTensor()) {
    throw Error(Blame::Caller, name + " gives no single tensor but " + result.tagKind() +
                                   "; call rpc::run_operator_for_list for several, or a function of the program's own");
  }
  return result.toTensor();
}

std::vector<at::Tensor> run_operator_for_list(std::string name, std::vector<OperatorValue> arguments) {
  const c10::IValue result = run(name, arguments);
  if (result.isTensor()) return {result.toTensor()};
  if (result.isTensorList()) return result.toTensorVector();
  std::vector<at::Tensor> all;
  if (result.isTuple()) {
    for (const auto& one : result.toTupleRef().elements()) {
      if (one.isTensor()) all.push_back(one.toTensor());
    }
    if (all.size() == result.toTupleRef().elements().size()) return all;
  }
  throw Error(Blame::Caller,
              name + " gives no tensors but " + result.tagKind() + "; call a function of the program's own that calls it");
}

}  // namespace weft::rpc
