// What calls and references throw beyond weft::Error, without the rest of RPC.
#pragma once

#include <string>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/export.h>

namespace weft::rpc {

// The called function threw.
class WEFT_API RemoteError : public Error {
 public:
  RemoteError(std::string worker, std::string function, std::string text,
              const std::vector<int>& ranks = {});
  const std::string& worker() const noexcept { return worker_; }
  const std::string& function() const noexcept { return function_; }
  const std::string& text() const noexcept { return text_; }  // what() of what it threw

 private:
  std::string worker_;
  std::string function_;
  std::string text_;
};

// An RRef whose creation failed. blame() is that of the first cause, which text() names: of a
// function that threw, Remote and the text of its RemoteError.
class WEFT_API CreationError : public Error {
 public:
  using Error::Error;
  explicit CreationError(const Error& error) : Error(error) {}
};

}  // namespace weft::rpc
