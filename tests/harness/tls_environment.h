// SPDX-License-Identifier: Apache-2.0
// Makes a test program's groups and agents speak TLS. A global object, so that the variables are
// set before anything reads them; forked processes inherit them.
#pragma once

#include <cstdlib>

#include <weft/tests/harness/certificates.h>

namespace weft::harness {

inline void set_environment(const TlsFiles& files) {
  ::setenv("WEFT_TLS_CERT", files.certificate.c_str(), 1);
  ::setenv("WEFT_TLS_KEY", files.key.c_str(), 1);
  ::setenv("WEFT_TLS_CA", files.authorities.c_str(), 1);
}

class TlsEnvironment {
 public:
  TlsEnvironment() { set_environment(authority_.issue()); }
  Authority& authority() { return authority_; }

 private:
  Authority authority_;
};

}  // namespace weft::harness
