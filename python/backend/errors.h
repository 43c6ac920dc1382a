// SPDX-License-Identifier: Apache-2.0
// Weft's errors as exceptions of Python: torch_weft.PeerLost, Timeout, CallerError, …
#pragma once

#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/Exceptions.h>

#include <weft/error.h>

namespace weft::python {

// Becomes the exception of its Python class wherever libtorch hands a C++ exception to Python: in
// the bindings of c10d, in a future's wait(), at the end of a backward pass.
class Failure final : public torch::PyTorchError {
 public:
  Failure(const Error& error, std::string operation);
  PyObject* python_type() override;

 private:
  Blame blame_;
};

// Looks up the classes of torch_weft/errors.py. Called with the GIL, when the module is imported.
void load_classes();

// The attributes of a Python exception of Weft.
struct Facts {
  std::vector<int> ranks;
  std::string operation;
};

// The facts of a recent Failure with this text. libtorch makes some exceptions of Python from a
// class and a text alone, so the class asks here for the rest.
std::optional<Facts> facts_of(const std::string& text);

// The error as an exception for Python, to be kept or thrown later.
std::exception_ptr failure_of(const Error& error, const std::string& operation);

// Calls the function. An Error that it throws becomes a Failure.
template <class Function>
auto translated(const char* operation, Function&& function) -> decltype(function()) {
  try {
    return std::forward<Function>(function)();
  } catch (const Error& error) {
    throw Failure(error, operation);
  }
}

}  // namespace weft::python
