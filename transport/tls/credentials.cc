// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <string_view>
#include <utility>

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <arpa/inet.h>

#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/mutex.h>
#include <weft/transport/tls/credentials.h>

namespace weft::transport::tls {

namespace {

constexpr std::size_t kMostNames = 300;  // characters of a message

// Why the last call of OpenSSL on this thread failed.
std::string reason() {
  const unsigned long code = ERR_peek_error();
  const char* const text = ERR_reason_error_string(code);
  if (ERR_SYSTEM_ERROR(code)) return "it cannot be read";
  return text == nullptr ? "OpenSSL gives no reason" : text;
}

[[noreturn]] void refuse(const char* variable, const std::string& file, const std::string& why) {
  throw Error(Blame::Caller,
              "TLS: " + std::string(variable) + " ('" + file + "') cannot be used: " + why);
}

using Names = std::unique_ptr<GENERAL_NAMES, decltype(&GENERAL_NAMES_free)>;

Names alternative_names(const X509& certificate) {
  void* const found = X509_get_ext_d2i(&certificate, NID_subject_alt_name, nullptr, nullptr);
  return {static_cast<GENERAL_NAMES*>(found), &GENERAL_NAMES_free};
}

std::string text_of(const ASN1_STRING* text) {
  return {reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
          static_cast<std::size_t>(ASN1_STRING_length(text))};
}

// "10.0.0.7", "fe80::1"; empty if it is no address.
std::string address_of(const ASN1_STRING* bytes) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const int length = ASN1_STRING_length(bytes);
  if (length != 4 && length != 16) return {};
  ::inet_ntop(length == 4 ? AF_INET : AF_INET6, ASN1_STRING_get0_data(bytes), text.data(),
              text.size());
  return text.data();
}

std::vector<std::string> dns_names(const X509& certificate) {
  std::vector<std::string> found;
  const Names names = alternative_names(certificate);
  for (int i = 0; names && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type == GEN_DNS) found.push_back(text_of(name->d.dNSName));
  }
  return found;
}

bool names_address(const X509& certificate, const std::string& address) {
  std::array<unsigned char, 16> bytes{};
  const std::string host = address.substr(0, address.find('%'));  // without an IPv6 scope
  const bool is_four = ::inet_pton(AF_INET, host.c_str(), bytes.data()) == 1;
  if (!is_four && ::inet_pton(AF_INET6, host.c_str(), bytes.data()) != 1) return false;
  return X509_check_ip(const_cast<X509*>(&certificate), bytes.data(), is_four ? 4 : 16, 0) == 1;
}

}  // namespace

void Credentials::Free::operator()(ssl_ctx_st* context) const noexcept { SSL_CTX_free(context); }

Credentials::Credentials(const TlsFiles& files, const Limits& limits)
    : limits_(limits), context_(SSL_CTX_new(TLS_method())) {
  ERR_clear_error();
  SSL_CTX* const context = context_.get();
  if (context == nullptr || SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1)
    throw Error(Blame::Unsupported, "TLS: OpenSSL has no TLS 1.3 here: " + reason());
  // OpenSSL would ask a terminal for the password of an encrypted key.
  SSL_CTX_set_default_passwd_cb(context, [](char*, int, int, void*) { return -1; });
  if (SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) != 1)
    refuse("WEFT_TLS_CERT", files.certificate, reason() + "; it is a file of PEM certificates");
  if (SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), SSL_FILETYPE_PEM) != 1) {
    refuse("WEFT_TLS_KEY", files.key,
           reason() + "; it is a PEM file with the key of WEFT_TLS_CERT, without a password");
  }
  if (SSL_CTX_load_verify_locations(context, files.authorities.c_str(), nullptr) != 1)
    refuse("WEFT_TLS_CA", files.authorities, reason() + "; it is a file of PEM certificates");
  const X509* const own = SSL_CTX_get0_certificate(context);
  std::time_t time = limits_.time.value_or(std::time(nullptr));
  if (X509_cmp_time(X509_get0_notAfter(own), &time) < 0)
    refuse("WEFT_TLS_CERT", files.certificate, "the certificate has expired: issue a new one");
  if (X509_cmp_time(X509_get0_notBefore(own), &time) > 0) {
    refuse("WEFT_TLS_CERT", files.certificate,
           "the certificate is not valid yet: check this machine's clock");
  }
  names_ = dns_names(*own);
  if (limits_.time) X509_VERIFY_PARAM_set_time(SSL_CTX_get0_param(context), *limits_.time);
  // Connections last; nothing is gained by resuming one.
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context, 0);
  // Idle connections keep no buffers. Of the chain only what WEFT_TLS_CERT holds is sent.
  SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_NO_AUTO_CHAIN);
  SSL_CTX_set_read_ahead(context, 1);
  SSL_CTX_set_default_read_buffer_len(context, 128 << 10);
}

Credentials::~Credentials() = default;

bool Credentials::names(const x509_st& certificate, const std::string& address) const {
  if (names_address(certificate, address)) return true;
  for (const std::string& name : names_) {
    if (X509_check_host(const_cast<X509*>(&certificate), name.data(), name.size(),
                        X509_CHECK_FLAG_NEVER_CHECK_SUBJECT, nullptr) == 1)
      return true;
  }
  return false;
}

std::string Credentials::own_names() const {
  std::string text;
  for (const std::string& name : names_) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "no DNS name" : text.substr(0, kMostNames);
}

std::string names_of(const x509_st& certificate) {
  std::string text;
  const Names names = alternative_names(certificate);
  for (int i = 0; names && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(names.get(), i);
    std::string one;
    if (name->type == GEN_DNS) one = text_of(name->d.dNSName);
    if (name->type == GEN_IPADD) one = address_of(name->d.iPAddress);
    if (!one.empty()) text += (text.empty() ? "" : ", ") + one;
  }
  // The peer has chosen the names.
  for (char& letter : text) letter = letter < ' ' || letter > '~' ? '?' : letter;
  return text.empty() ? "no name" : text.substr(0, kMostNames);
}

std::shared_ptr<const Credentials> credentials() {
  const TlsFiles& files = tls_files();
  if (!files.given()) return nullptr;
  static constinit ForkMutex mutex(ForkOrder::Transport);
  // Never destroyed: connections may outlive static objects.
  static std::shared_ptr<const Credentials>* known WEFT_POINTEE_GUARDED_BY(mutex) = nullptr;
  MutexLock lock(mutex);
  if (known == nullptr)
    known = new std::shared_ptr<const Credentials>(std::make_shared<const Credentials>(files));
  return *known;
}

}  // namespace weft::transport::tls
