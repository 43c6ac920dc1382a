// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdio>

#include <openssl/evp.h>

#include <weft/base/error.h>
#include <weft/engine/codec/digest.h>

namespace weft::codec {

void Digest::Free::operator()(evp_md_ctx_st* context) const { EVP_MD_CTX_free(context); }

Digest::Digest() : context_(EVP_MD_CTX_new()) {
  if (context_ == nullptr || EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) != 1) {
    throw Error(Blame::Unsupported, "this libcrypto has no SHA-256");
  }
}

void Digest::add(const void* data, std::size_t bytes) {
  EVP_DigestUpdate(context_.get(), data, bytes);
}

std::string Digest::text() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> raw{};
  unsigned int bytes = 0;
  EVP_DigestFinal_ex(context_.get(), raw.data(), &bytes);
  std::string text;
  for (unsigned int i = 0; i < bytes; ++i) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", raw[i]);
    text += two;
  }
  return text;
}

}  // namespace weft::codec
