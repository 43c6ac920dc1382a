// SPDX-License-Identifier: Apache-2.0

#include <c10/core/StreamGuard.h>
#include <torch/csrc/jit/api/module.h>

#include <weft/base/fork_mutex.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/incoming_call.h>
#include <weft/engine/rpc/agent.h>
#include <weft/engine/rpc/script.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::rpc {

namespace {

using torch::jit::CompilationUnit;
using torch::jit::Module;

using Script = std::variant<std::shared_ptr<CompilationUnit>, Module>;

// One table per process, as for functions and for the same reason: it lists the code that exists,
// which must be known before an agent is asked for it. It is apart from the table of functions,
// which knows those of the compiler by two numbers. Scripts come later, have only names, and are
// called through run_script(), which is in that table.
struct Scripts {
  ForkMutex mutex{ForkOrder::Engine};
  std::map<std::string, Script> scripts WEFT_GUARDED_BY(mutex);
};

Scripts& scripts() {
  // Never destroyed: agents, and a GPU's tensors in modules, may outlive static objects.
  static auto* const the_scripts = new Scripts;
  return *the_scripts;
}

bool is_same(const Script& a, const Script& b) {
  if (a.index() != b.index()) return false;
  const auto* module = std::get_if<Module>(&a);
  return module != nullptr ? module->_ivalue() == std::get<Module>(b)._ivalue()
                           : std::get<0>(a) == std::get<0>(b);
}

template <class... R>
void expose_results() {
  (expose<&run_script<R>>(), ...);
}

void enter(const std::string& name, const Script& script) {
  if (name.empty() || name.find('.') != std::string::npos) {
    throw Error(Blame::Caller,
                "'" + name +
                    "' is not a name for scripts: a name is the part before the '.' in \"" +
                    (name.empty() ? "math" : name.substr(0, name.find('.'))) +
                    ".function\", and must not be empty");
  }
  // For calls of other programs.
  expose_results<void, at::Tensor, bool, int, std::int64_t, double, std::string, ScriptValue,
                 std::vector<at::Tensor>, std::vector<int>, std::vector<std::int64_t>,
                 std::vector<double>, std::vector<std::string>>();
  Scripts& all = scripts();
  MutexLock lock(all.mutex);
  const auto [place, fresh] = all.scripts.try_emplace(name, script);
  if (fresh || is_same(place->second, script)) return;
  throw Error(Blame::Caller,
              "other scripts are exposed as '" + name + "' already; give these another name");
}

// A function, and the module that it is called on, if any.
struct Callable {
  torch::jit::Function* function = nullptr;
  std::optional<c10::IValue> self;
};

std::vector<torch::jit::Function*> functions_of(const Script& script) {
  const auto* module = std::get_if<Module>(&script);
  return module != nullptr ? module->type()->methods() : std::get<0>(script)->get_functions();
}

std::string name_of(const Script& script, const torch::jit::Function& function) {
  return std::holds_alternative<Module>(script) ? function.name()
                                                : function.qualname().qualifiedName();
}

std::string list_of(const Script& script, const std::string& prefix) {
  std::string list;
  for (const auto* function : functions_of(script)) {
    if (function == nullptr) continue;  // was removed from its unit
    list += (list.empty() ? "" : ", ") + prefix + name_of(script, *function);
  }
  return list.empty() ? "none" : list;
}

std::optional<Callable> find_in(const Script& script, std::string_view name) {
  for (auto* function : functions_of(script)) {
    if (function == nullptr || name_of(script, *function) != name) continue;
    Callable found{function, std::nullopt};
    if (const auto* module = std::get_if<Module>(&script)) found.self = module->_ivalue();
    return found;
  }
  return std::nullopt;
}

Callable find_exposed(const std::string& name) {
  Scripts& all = scripts();
  MutexLock lock(all.mutex);
  const auto dot = std::min(name.find('.'), name.size());
  const auto place = all.scripts.find(name.substr(0, dot));
  if (place != all.scripts.end() && dot < name.size()) {
    if (auto found = find_in(place->second, std::string_view(name).substr(dot + 1)))
      return *std::move(found);
  }
  std::string exposed;
  for (const auto& [prefix, script] : all.scripts)
    exposed += "\n  " + list_of(script, prefix + ".");
  throw Error(Blame::Caller, "no script is exposed here as '" + name + "'; " +
                                 (exposed.empty() ? "none is exposed: call rpc::expose_script()"
                                                  : "there are:" + exposed));
}

c10::IValue to_ivalue(const ScriptValue& given, const c10::TypePtr& type);

// Converts an element of a List, a Tuple or a Dict, none of which checks its elements.
c10::IValue to_element(const ScriptValue& given, const c10::TypePtr& type) {
  c10::IValue element = to_ivalue(given, type);
  const c10::TypePtr own =
      element.isTensor() ? c10::TensorType::get() : element.type();  // even of an undefined tensor
  if (own->isSubtypeOf(*type)) return element;
  throw Error(Blame::Caller, "it holds a " + own->annotation_str() + " where a " +
                                 type->annotation_str() + " is expected");
}

c10::IValue to_ivalue(const std::vector<ScriptValue>& given, const c10::TypePtr& type) {
  if (const auto list_type = type->cast<c10::ListType>()) {
    c10::impl::GenericList list(list_type->getElementType());
    for (const auto& one : given) list.push_back(to_element(one, list_type->getElementType()));
    return list;
  }
  if (const auto tuple = type->cast<c10::TupleType>();
      tuple && tuple->elements().size() == given.size()) {
    std::vector<c10::IValue> elements;
    for (const auto& one : given)
      elements.push_back(to_element(one, tuple->elements()[elements.size()]));
    return c10::ivalue::Tuple::createNamed(std::move(elements), tuple);
  }
  if (const auto dict_type = type->cast<c10::DictType>()) {
    c10::impl::GenericDict dict(dict_type->getKeyType(), dict_type->getValueType());
    for (const auto& one : given) {
      const auto* pair = std::get_if<std::vector<ScriptValue>>(&one.value);
      if (pair == nullptr || pair->size() != 2)
        throw Error(Blame::Caller, "a Dict is a list of pairs");
      dict.insert_or_assign(to_element((*pair)[0], dict_type->getKeyType()),
                            to_element((*pair)[1], dict_type->getValueType()));
    }
    return dict;
  }
  throw Error(Blame::Caller, "a list of " + std::to_string(given.size()) + " is given where a " +
                                 type->annotation_str() + " is expected");
}

// Converts a value to the type that the schema has there. A value that does not fit is left for the
// schema to refuse.
c10::IValue to_ivalue(const ScriptValue& given, const c10::TypePtr& type) {
  if (const auto* list = std::get_if<std::vector<ScriptValue>>(&given.value)) {
    const auto optional = type->cast<c10::OptionalType>();
    return to_ivalue(*list, optional ? optional->getElementType() : type);
  }
  c10::IValue value = detail::to_ivalue(std::get<OperatorValue>(given.value));
  if (value.isInt() && c10::FloatType::get()->isSubtypeOf(*type) &&
      !c10::IntType::get()->isSubtypeOf(*type)) {
    return static_cast<double>(value.toInt());
  }
  if (value.isIntList() && c10::ListType::ofFloats()->isSubtypeOf(*type)) {
    const auto numbers = value.toIntVector();
    return std::vector<double>(numbers.begin(), numbers.end());
  }
  return value;
}

torch::jit::Stack checked(const Callable& called, const std::string& name,
                          const ScriptArguments& arguments) {
  const auto& schema = called.function->getSchema();
  const auto type_of = [&](std::optional<std::size_t> place) -> c10::TypePtr {
    if (!place || *place >= schema.arguments().size()) return c10::AnyType::get();
    return schema.arguments()[*place].type();
  };
  try {
    torch::jit::Stack stack;
    if (called.self) stack.push_back(*called.self);
    for (const auto& argument : arguments.positional)
      stack.push_back(to_ivalue(argument, type_of(stack.size())));
    torch::jit::Kwargs keywords;
    for (const auto& [keyword, argument] : arguments.keywords) {
      const auto place = schema.argumentIndexWithName(keyword);
      if (place && static_cast<std::size_t>(*place) < stack.size()) {
        throw Error(
            Blame::Caller,
            "argument '" + keyword + "' is given twice, by position and by keyword; leave one out");
      }
      keywords.emplace(keyword, to_ivalue(argument, type_of(place)));
    }
    schema.checkAndNormalizeInputs(stack, keywords);
    return stack;
  } catch (const std::exception& error) {
    const auto* own = dynamic_cast<const Error*>(&error);
    throw Error(Blame::Caller, name + " does not take these arguments: it is " +
                                   c10::toString(schema) + "; " +
                                   (own != nullptr ? own->text() : tensor::text_of(error)));
  }
}

ScriptValue from_ivalue(const c10::IValue& value) {
  const auto list_of = [](const auto& all) {
    std::vector<ScriptValue> list;
    for (const auto& one : all) list.push_back(from_ivalue(one));
    return ScriptValue{std::move(list)};
  };
  if (value.isNone()) return {};
  if (value.isTensor()) return {OperatorValue(value.toTensor())};
  if (value.isBool()) return {OperatorValue(value.toBool())};
  if (value.isInt()) return {OperatorValue(value.toInt())};
  if (value.isDouble()) return {OperatorValue(value.toDouble())};
  if (value.isString()) return {OperatorValue(value.toStringRef())};
  if (value.isComplexDouble()) return {OperatorValue(c10::Scalar(value.toComplexDouble()))};
  if (value.isDevice()) return {OperatorValue(value.toDevice())};
  if (value.isList()) return list_of(value.toListRef());
  if (value.isTuple()) return list_of(value.toTupleRef().elements());
  if (value.isGenericDict()) {
    std::vector<ScriptValue> pairs;
    for (const auto& pair : value.toGenericDict()) {
      pairs.push_back(
          {std::vector<ScriptValue>{from_ivalue(pair.key()), from_ivalue(pair.value())}});
    }
    return {std::move(pairs)};
  }
  throw Error(Blame::Caller, "it returns a " + value.type()->annotation_str() +
                                 ", which cannot be sent: return its contents");
}

// Passes the result of the script's own future to `to`; if that is a future again, the result of
// that one.
void complete(c10::ivalue::Future& future, const std::string& name,
              const detail::ScriptCompletion& to) {
  future.addCallback([name, to](c10::ivalue::Future& done) {
    try {
      const c10::IValue& value = done.value();  // throws its error
      if (value.isFuture()) return complete(*value.toFuture(), name, to);
      if (to.take(to.type == typeid(void) ? ScriptValue() : from_ivalue(value))) return;
      throw Error(Blame::Caller,
                  name + " returns a " + value.type()->annotation_str() + ", but a " +
                      call::spelled(to.type) +
                      " is asked for: call it with another result, sync_script<R>(…)");
    } catch (...) {
      to.fail(std::current_exception());
    }
  });
}

// Runs the tasks that a script forks, and their continuations, on libtorch's threads. The call's
// streams are current there, so the tasks' work comes after the work that the script has enqueued.
torch::jit::TaskLauncher launcher() {
  return [streams = call::current_call("a script").call().streams](std::function<void()> task) {
    at::launch([streams, task = std::move(task)] {
      const c10::MultiStreamGuard current(streams);
      task();
    });
  };
}

void start(const Callable& called, const std::string& name, const ScriptArguments& arguments,
           const detail::ScriptCompletion& to) {
  auto stack = checked(called, name, arguments);
  complete(*called.function->runAsync(stack, launcher()), name, to);
}

}  // namespace

void ScriptArguments::add(Keyword argument) {
  const auto [place, fresh] =
      keywords.try_emplace(std::move(argument.name), std::move(argument.value));
  if (!fresh)
    throw Error(Blame::Caller, "the keyword argument '" + place->first + "' is given twice");
}

void expose_script(const std::string& name,
                   std::shared_ptr<torch::jit::CompilationUnit> functions) {
  if (!functions)
    throw Error(Blame::Caller,
                "there are no functions to expose as '" + name + "': the pointer is null");
  enter(name, std::move(functions));
}

void expose_script(const std::string& name, const torch::jit::Module& module) {
  enter(name, module);
}

namespace detail {

void start_script(const std::string& name, const ScriptArguments& arguments,
                  const ScriptCompletion& completion) {
  start(find_exposed(name), name, arguments, completion);
}

void start_method(const torch::jit::Module& module, const std::string& method,
                  const ScriptArguments& arguments, const ScriptCompletion& completion) {
  const auto found = find_in(module, method);
  if (!found) {
    throw Error(Blame::Caller, "a module of the type " + module.type()->annotation_str() +
                                   " has no method '" + method +
                                   "'; it has: " + list_of(module, ""));
  }
  start(*found, method, arguments, completion);
}

}  // namespace detail
}  // namespace weft::rpc
