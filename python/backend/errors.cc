// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <deque>
#include <map>
#include <mutex>

#include <weft/python/backend/errors.h>

namespace weft::python {

namespace {

// The latest failures, by text.
class Recent {
 public:
  void add(const std::string& text, Facts facts) {
    constexpr std::size_t kMost = 64;
    const std::lock_guard lock(mutex_);
    failures_.emplace_front(text, std::move(facts));
    if (failures_.size() > kMost) failures_.pop_back();
  }
  std::optional<Facts> find(const std::string& text) {
    const std::lock_guard lock(mutex_);
    for (const auto& [known, facts] : failures_) {
      if (known == text) return facts;
    }
    return std::nullopt;
  }

 private:
  std::mutex mutex_;
  std::deque<std::pair<std::string, Facts>> failures_;
};

Recent& recent() {
  static auto* const failures = new Recent;  // outlives the interpreter
  return *failures;
}

// The name of a class of torch_weft/errors.py.
const char* class_name(Blame blame) {
  switch (blame) {
    case Blame::PeerLost: return "PeerLost";
    case Blame::Timeout: return "Timeout";
    case Blame::Caller: return "CallerError";
    case Blame::Unsupported: return "Unsupported";
    default: return "Error";
  }
}

// Maps names to classes, which are kept for ever. They are looked up once, because importing a
// module runs Python code, which would raise the KeyboardInterrupt of a Ctrl-C in place of the
// error.
std::map<std::string, PyObject*>& classes() {
  static auto* const all = new std::map<std::string, PyObject*>;  // outlives the interpreter
  return *all;
}

// The text begins with the operation, even if a broken group has refused it. Programs over c10d
// look for the word " timeout " in the text.
std::string text_for_python(const Error& error, const std::string& operation) {
  const bool is_named = error.text().find(operation) != std::string::npos;
  return (is_named ? "" : operation + ": ") + error.text() +
         (error.blame() == Blame::Timeout ? " (the timeout has passed)" : "");
}

}  // namespace

Failure::Failure(const Error& error, std::string operation)
    : torch::PyTorchError(text_for_python(error, operation)), blame_(error.blame()) {
  recent().add(msg, {error.ranks(), std::move(operation)});
}

void load_classes() {
  const py::module_ module = py::module_::import("torch_weft.errors");
  for (const Blame blame :
       {Blame::PeerLost, Blame::Timeout, Blame::Caller, Blame::Unsupported, Blame::Cancelled}) {
    const char* const name = class_name(blame);
    classes()[name] = py::object(module.attr(name)).release().ptr();
  }
}

PyObject* Failure::python_type() {
  const auto found = classes().find(class_name(blame_));
  return found == classes().end() ? PyExc_RuntimeError : found->second;
}

std::optional<Facts> facts_of(const std::string& text) { return recent().find(text); }

std::exception_ptr failure_of(const Error& error, const std::string& operation) {
  return std::make_exception_ptr(Failure(error, operation));
}

}  // namespace weft::python
