// SPDX-License-Identifier: Apache-2.0
// Certificates for tests of TLS, made on the spot, in files of a folder of their own.
#pragma once

#include <ctime>
#include <memory>
#include <string>

#include <weft/base/tls_files.h>
#include <weft/tests/harness/folder.h>

struct evp_pkey_st;
struct x509_st;

namespace weft::harness {

// The contents of a certificate. Its holder may connect and listen.
struct CertificateOptions {
  // As OpenSSL writes a subjectAltName.
  std::string names = "IP:127.0.0.1,IP:::1";
  // Seconds from now.
  long valid_from = -3600;
  long valid_until = 86'400;
  std::string usage = "serverAuth,clientAuth";
};

// An authority that signs certificates. Its files live as long as it.
class Authority {
 public:
  explicit Authority(const std::string& name = "authority");
  ~Authority();
  Authority(const Authority&) = delete;
  Authority& operator=(const Authority&) = delete;

  // Makes a certificate and its key. The files trust this authority, or `trusted`.
  TlsFiles issue(const CertificateOptions& options = {}, const Authority* trusted = nullptr);
  // The file with its own certificate.
  std::string file() const;

 private:
  const Folder folder_;
  evp_pkey_st* key_ = nullptr;
  x509_st* certificate_ = nullptr;
  int issued_ = 0;
};

}  // namespace weft::harness
