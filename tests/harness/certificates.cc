// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <stdexcept>

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <weft/tests/harness/certificates.h>

namespace weft::harness {

namespace {

void require(bool is_done, const char* what) {
  if (!is_done) throw std::runtime_error(std::string("certificates of a test: ") + what);
}

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

File create(const std::string& name) {
  File file(std::fopen(name.c_str(), "w"));
  require(file != nullptr, "cannot create a file");
  return file;
}

void write(const std::string& name, X509* certificate) {
  require(PEM_write_X509(create(name).get(), certificate) == 1, "cannot write a certificate");
}

void write(const std::string& name, EVP_PKEY* key) {
  require(PEM_write_PrivateKey(create(name).get(), key, nullptr, nullptr, 0, nullptr, nullptr) == 1,
          "cannot write a key");
}

void extend(X509* certificate, X509* issuer, int which, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, which, value.c_str());
  require(extension != nullptr, value.c_str());
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

X509* make(const std::string& name, EVP_PKEY* key, long serial, long from, long until) {
  X509* const made = X509_new();
  X509_set_version(made, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(made), serial);
  X509_gmtime_adj(X509_getm_notBefore(made), from);
  X509_gmtime_adj(X509_getm_notAfter(made), until);
  X509_set_pubkey(made, key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(made), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  return made;
}

}  // namespace

Authority::Authority(const std::string& name) : key_(EVP_EC_gen("P-256")) {
  require(key_ != nullptr, "cannot make a key");
  certificate_ = make(name, key_, 1, -86'400, 86'400);
  X509_set_issuer_name(certificate_, X509_get_subject_name(certificate_));
  extend(certificate_, certificate_, NID_basic_constraints, "critical,CA:TRUE");
  extend(certificate_, certificate_, NID_key_usage, "critical,keyCertSign");
  require(X509_sign(certificate_, key_, EVP_sha256()) > 0, "cannot sign");
  write(file(), certificate_);
}

Authority::~Authority() {
  X509_free(certificate_);
  EVP_PKEY_free(key_);
}

std::string Authority::file() const { return folder_.path() + "/ca.pem"; }

TlsFiles Authority::issue(const CertificateOptions& options, const Authority* trusted) {
  EVP_PKEY* const key = EVP_EC_gen("P-256");
  require(key != nullptr, "cannot make a key");
  const std::string stem = folder_.path() + "/" + std::to_string(++issued_);
  X509* const made = make("rank", key, issued_ + 1, options.valid_from, options.valid_until);
  X509_set_issuer_name(made, X509_get_subject_name(certificate_));
  if (!options.names.empty()) extend(made, certificate_, NID_subject_alt_name, options.names);
  if (!options.usage.empty()) extend(made, certificate_, NID_ext_key_usage, options.usage);
  require(X509_sign(made, key_, EVP_sha256()) > 0, "cannot sign");
  write(stem + ".pem", made);
  write(stem + ".key", key);
  X509_free(made);
  EVP_PKEY_free(key);
  return {stem + ".pem", stem + ".key", (trusted == nullptr ? *this : *trusted).file()};
}

}  // namespace weft::harness
