// SPDX-License-Identifier: Apache-2.0
// The files of TLS, from the environment. Apart from config.h, which every file with a log line
// includes.
#pragma once

#include <functional>
#include <string>

namespace weft {

struct TlsFiles {
  std::string certificate;  // WEFT_TLS_CERT: PEM, the certificate first, then those above it
  std::string key;          // WEFT_TLS_KEY: PEM
  std::string authorities;  // WEFT_TLS_CA: PEM, those that sign the certificates of peers

  bool given() const { return !certificate.empty(); }
  // As Config::from. Throws Caller if only some of the three are set.
  static TlsFiles from(const std::function<const char*(const char*)>& variable);
};

// Returns the files of this process, which are read together with config().
const TlsFiles& tls_files();

}  // namespace weft
