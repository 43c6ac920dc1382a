// SPDX-License-Identifier: Apache-2.0
// Errors of calls and references beyond weft::Error, usable without the rest of RPC.
#pragma once

#include <string>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/export.h>

namespace weft::rpc {

// The called function threw.
class WEFT_API RemoteError : public Error {
 public:
  // For Weft's own use.
  RemoteError(std::string worker, std::string function, std::string text,
              const std::vector<int>& ranks = {});
  // The name of the worker on which the function threw.
  const std::string& worker() const noexcept { return worker_; }
  // The name of the function.
  const std::string& function() const noexcept { return function_; }
  // The exception's own text, cut if long.
  const std::string& text() const noexcept { return text_; }

 private:
  std::string worker_;
  std::string function_;
  std::string text_;
};

// An RRef whose creation failed. blame() is that of the first cause, which text() names. If a
// function threw, blame() is Remote and text() is that of its RemoteError.
class WEFT_API CreationError : public Error {
 public:
  // For Weft's own use.
  using Error::Error;
  explicit CreationError(const Error& error) : Error(error) {}
};

}  // namespace weft::rpc
