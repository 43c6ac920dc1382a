// SPDX-License-Identifier: Apache-2.0
// remote_parameters(): references to the parameters of a module that lives on another worker.
//
//   const auto table = agent.remote<Table>("ps0", rows);
//   weft::DistributedOptimizer<torch::optim::SGD> optimizer(weft::remote_parameters(table),
//   options);
#pragma once

#include <vector>

#include <weft/engine/rref/rref.h>

namespace weft {

// The parameters of a remote module, in the order of its parameters(); one that several layers
// share comes once. T is a module, its holder, a std::shared_ptr to it, or a type with a function
// parameters() of its own. The references keep the parameters, and not the module, alive. Waits for
// the owner; blocks until the module exists, and throws as RRef::sync() does; Caller for an empty
// reference, RemoteError if the holder or the pointer is null.
//
// The owner's program contains this call for a T as well, or exposes (rpc::expose()) a function or
// constructor that gives a T.
template <class T>
std::vector<RRef<at::Tensor>> remote_parameters(const RRef<T>& module) {
  static_assert(rref::detail::HasParameters<T> || rref::detail::PointsToParameters<T>,
                "remote_parameters takes a reference to a module, a module holder, or a "
                "std::shared_ptr to a module, with a function parameters()");
  if constexpr (rref::detail::HasParameters<T> || rref::detail::PointsToParameters<T>) {
    return module.template sync<&rref::detail::parameters_of<T>>();
  } else {
    return {};
  }
}
// With a time limit of its own: remote_parameters(module.timeout(2s)).
template <class T>
std::vector<RRef<at::Tensor>> remote_parameters(const rref::Timed<T>& module) {
  return module.template sync<&rref::detail::parameters_of<T>>();
}

}  // namespace weft
