// SPDX-License-Identifier: Apache-2.0
// The SHA-256 of a sequence of bytes. One thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

struct evp_md_ctx_st;

namespace weft::codec {

class Digest {
 public:
  Digest();
  void add(const void* data, std::size_t bytes);
  // In hexadecimal. add() must not be called afterwards.
  std::string text();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

}  // namespace weft::codec
