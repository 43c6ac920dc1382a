// SPDX-License-Identifier: Apache-2.0
// The certificate and key that a process shows its peers over TLS 1.3, and the authorities that it
// trusts. It accepts a peer's certificate if one of these has signed it and its subjectAltName has
// the IP address at the other end of the connection, or a DNS name that this process's own
// certificate has too. Both ends of a connection check that. Thread-safe.
#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/tls_files.h>

struct ssl_ctx_st;
struct x509_st;

namespace weft::transport::tls {

struct Limits {
  // A sender takes a new key after so many bytes. AES-GCM is safe for about 400 GB under one.
  std::uint64_t key_bytes = std::uint64_t{64} << 30;
  // The time at which certificates have to be valid, if not that of the clock. For tests.
  std::optional<std::time_t> time;
};

class Credentials {
 public:
  // Throws Caller, naming the variable, its file and the fault.
  explicit Credentials(const TlsFiles& files, const Limits& limits = {});
  ~Credentials();
  Credentials(const Credentials&) = delete;
  Credentials& operator=(const Credentials&) = delete;

  // Whether the certificate names the numeric address, or a name of this process's own certificate.
  bool names(const x509_st& certificate, const std::string& address) const;
  // The DNS names of this process's own certificate: "train.example", or "no DNS name".
  std::string own_names() const;
  const Limits& limits() const { return limits_; }
  ssl_ctx_st* context() const { return context_.get(); }

 private:
  struct Free {
    void operator()(ssl_ctx_st* context) const noexcept;
  };
  const Limits limits_;
  std::unique_ptr<ssl_ctx_st, Free> context_;
  std::vector<std::string> names_;
};

// Returns the credentials that the environment names; null if it names none. Each call may throw
// the errors of the constructor and of config().
std::shared_ptr<const Credentials> credentials();

// The names and addresses of a certificate, for messages: "train.example, 10.0.0.7".
std::string names_of(const x509_st& certificate);

}  // namespace weft::transport::tls
