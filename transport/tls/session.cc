// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <netdb.h>
#include <sys/socket.h>

#include <weft/base/error.h>
#include <weft/transport/tls/plain_text.h>
#include <weft/transport/tls/session.h>

namespace weft::transport::tls {

namespace {

constexpr std::size_t kRecord = SSL3_RT_MAX_PLAIN_LENGTH;
// Bytes that are encrypted before the socket is written. More would leave the core's cache.
constexpr std::size_t kBatch = 4 * kRecord;

std::string address_of_peer(int socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  auto* const address = reinterpret_cast<sockaddr*>(&storage);
  std::array<char, NI_MAXHOST> name{};
  if (::getpeername(socket, address, &length) != 0 ||
      ::getnameinfo(address, length, name.data(), name.size(), nullptr, 0, NI_NUMERICHOST) != 0)
    return {};
  return name.data();
}

// How to mend what a certificate is refused for.
std::string remedy(long fault) {
  switch (fault) {
    case X509_V_ERR_CERT_HAS_EXPIRED: return "issue a new one, and check both machines' clocks";
    case X509_V_ERR_CERT_NOT_YET_VALID: return "check both machines' clocks";
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
      return "give all ranks and workers certificates that one authority has signed, and that "
             "authority as WEFT_TLS_CA";
    case X509_V_ERR_INVALID_PURPOSE:
      return "its extended key usage, if there is one, needs serverAuth and clientAuth";
    default: return "issue another one";
  }
}

}  // namespace

// OpenSSL reads from this and writes to it.
struct SocketBio {
  static Session& of(BIO* bio) { return *static_cast<Session*>(BIO_get_data(bio)); }
  static int read(BIO* bio, char* to, int bytes) {
    BIO_clear_retry_flags(bio);
    const int got = of(bio).pull(to, static_cast<std::size_t>(bytes));
    if (got < 0 && errno == EAGAIN) BIO_set_retry_read(bio);
    return got;
  }
  static int write(BIO* bio, const char* from, int bytes) {
    try {
      of(bio).push(from, static_cast<std::size_t>(bytes));
    } catch (const std::bad_alloc&) {
      return -1;
    }
    return bytes;
  }
  static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }
  static BIO_METHOD* make_method() {
    BIO_METHOD* const made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "weft");
    BIO_meth_set_read(made, &SocketBio::read);
    BIO_meth_set_write(made, &SocketBio::write);
    BIO_meth_set_ctrl(made, &SocketBio::control);
    return made;
  }
};

namespace {

// Made when the library is loaded: a process that is forked while a local static variable is being
// initialised would wait for it forever.
const BIO_METHOD* const kMethod = SocketBio::make_method();

}  // namespace

void Session::Free::operator()(ssl_st* session) const noexcept { SSL_free(session); }

Session::Session(std::shared_ptr<const Credentials> credentials, Role role, int socket)
    : credentials_(std::move(credentials)),
      role_(role),
      socket_(socket),
      session_(SSL_new(credentials_->context())) {
  BIO* const bytes = session_ ? BIO_new(kMethod) : nullptr;
  if (bytes == nullptr) throw Error(Blame::Busy, "TLS: OpenSSL has no memory for a connection");
  BIO_set_data(bytes, this);
  BIO_set_init(bytes, 1);
  SSL* const session = session_.get();
  SSL_set_bio(session, bytes, bytes);
  SSL_set_app_data(session, this);
  SSL_set_verify(session, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, &Session::check);
  role_ == Role::Connector ? SSL_set_connect_state(session) : SSL_set_accept_state(session);
}

Session::~Session() = default;

// Called by OpenSSL, within calls that hold mutex_, as push() and check() are.
int Session::pull(char* to, std::size_t bytes) noexcept {
  ssize_t got = 0;
  do {
    got = ::recv(socket_, to, bytes, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno == EWOULDBLOCK) errno = EAGAIN;
  if (got < 0 && errno != EAGAIN) error_ = errno;
  if (got == 0) end_ = 0;
  if (got > 0 && !first_) first_ = *to;
  return static_cast<int>(got);
}

void Session::push(const char* from, std::size_t bytes) {
  unsent_.insert(unsent_.end(), from, from + bytes);
}

// Checks the names, once OpenSSL has found the chain right.
int Session::check(int is_right, X509_STORE_CTX* chain) {
  const auto* const session =
      static_cast<SSL*>(X509_STORE_CTX_get_ex_data(chain, SSL_get_ex_data_X509_STORE_CTX_idx()));
  Session& self = *static_cast<Session*>(SSL_get_app_data(session));
  const X509* const certificate = X509_STORE_CTX_get0_cert(chain);
  if (is_right == 1 && X509_STORE_CTX_get_error_depth(chain) == 0 &&
      !self.credentials_->names(*certificate, address_of_peer(self.socket_))) {
    X509_STORE_CTX_set_error(chain, X509_V_ERR_HOSTNAME_MISMATCH);
    is_right = 0;
  }
  if (is_right != 1 && certificate != nullptr) self.refused_ = names_of(*certificate);
  return is_right;
}

Progress Session::handshake() noexcept {
  MutexLock lock(mutex_);
  ERR_clear_error();
  const int done = SSL_do_handshake(session_.get());
  const int error = done == 1 ? SSL_ERROR_NONE : SSL_get_error(session_.get(), done);
  if (error != SSL_ERROR_NONE && error != SSL_ERROR_WANT_READ) {
    const bool is_lost = end_ || error_ != 0;
    fail();
    flush_now();  // the alert
    return is_lost && !is_plain() ? Progress::Lost : Progress::Failed;
  }
  const bool is_flushed = flush_now();
  if (error_ != 0) {
    fail();
    return Progress::Lost;
  }
  return error == SSL_ERROR_NONE && is_flushed ? Progress::Done : Progress::Waits;
}

ssize_t Session::send(std::span<const iovec> pieces) noexcept {
  MutexLock lock(mutex_);
  std::size_t taken = 0;
  std::size_t skip = 0;  // in the first piece
  while (flush_now() && !pieces.empty()) {
    // Long pieces are encrypted where they lie.
    const std::size_t left = pieces.front().iov_len - skip;
    if (left >= kRecord) {
      const std::size_t bytes = std::min(left, kBatch);
      if (!write(static_cast<const char*>(pieces.front().iov_base) + skip, bytes)) break;
      taken += bytes;
      skip += bytes;
      continue;
    }
    record_.clear();
    while (!pieces.empty() && record_.size() < kRecord) {
      const auto* const from = static_cast<const char*>(pieces.front().iov_base) + skip;
      const std::size_t bytes = std::min(pieces.front().iov_len - skip, kRecord - record_.size());
      record_.insert(record_.end(), from, from + bytes);
      skip += bytes;
      if (skip < pieces.front().iov_len) break;
      pieces = pieces.subspan(1);
      skip = 0;
    }
    if (record_.empty()) continue;
    if (!write(record_.data(), record_.size())) break;
    taken += record_.size();
  }
  // No event follows that of the failure, so the caller has to learn of it now.
  if (error_ == 0 && (taken > 0 || pieces.empty())) return static_cast<ssize_t>(taken);
  errno = error_ != 0 ? error_ : EAGAIN;
  return -1;
}

bool Session::write(const void* from, std::size_t bytes) {
  ERR_clear_error();
  std::size_t written = 0;
  if (SSL_write_ex(session_.get(), from, bytes, &written) != 1) {
    error_ = EPIPE;
    return false;
  }
  under_key_ += written;
  if (under_key_ >= credentials_->limits().key_bytes) {
    SSL_key_update(session_.get(), SSL_KEY_UPDATE_NOT_REQUESTED);  // sent before the next bytes
    under_key_ = 0;
  }
  return true;
}

ssize_t Session::receive(std::span<const iovec> pieces) noexcept {
  MutexLock lock(mutex_);
  std::size_t got = 0;
  for (const iovec& piece : pieces) {
    for (std::size_t at = 0; at < piece.iov_len;) {
      std::size_t some = 0;
      ERR_clear_error();
      const int done = SSL_read_ex(session_.get(), static_cast<char*>(piece.iov_base) + at,
                                   piece.iov_len - at, &some);
      at += some;
      got += some;
      if (done == 1) continue;
      const int error = SSL_get_error(session_.get(), done);
      if (error == SSL_ERROR_ZERO_RETURN) end_ = 0;
      if (error != SSL_ERROR_ZERO_RETURN && error != SSL_ERROR_WANT_READ && failure_.empty())
        fail();
      if (!unsent_.empty()) flush_now();
      if (got > 0) return static_cast<ssize_t>(got);
      errno = error == SSL_ERROR_WANT_READ ? EAGAIN : end_.value_or(EAGAIN);
      return errno == 0 ? 0 : -1;
    }
  }
  return static_cast<ssize_t>(got);
}

bool Session::flush() noexcept {
  MutexLock lock(mutex_);
  flush_now();
  return unsent_.empty();
}

bool Session::flush_now() noexcept {
  while (sent_ < unsent_.size() && error_ == 0) {
    const ssize_t took = ::send(socket_, unsent_.data() + sent_, unsent_.size() - sent_,
                                MSG_NOSIGNAL | MSG_DONTWAIT);
    if (took < 0 && errno == EINTR) continue;
    if (took < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (took < 0) error_ = errno;
    if (took > 0) sent_ += static_cast<std::size_t>(took);
  }
  unsent_.clear();
  sent_ = 0;
  if (error_ != 0) return false;
  if (finishes_) ::shutdown(socket_, SHUT_WR);
  return true;
}

bool Session::has_unsent() const noexcept {
  MutexLock lock(mutex_);
  return !unsent_.empty();
}

void Session::finish_writing() noexcept {
  MutexLock lock(mutex_);
  if (finishes_) return;
  ERR_clear_error();
  if (failure_.empty()) SSL_shutdown(session_.get());
  finishes_ = true;
  flush_now();
}

std::string Session::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

void Session::fail() {
  const unsigned long code = ERR_peek_error();
  const bool is_at_end = ERR_GET_LIB(code) != ERR_LIB_SSL ||
                         ERR_GET_REASON(code) == SSL_R_UNEXPECTED_EOF_WHILE_READING;
  failure_ = why();
  if (SSL_is_init_finished(session_.get()) != 1 || !is_at_end) {
    end_ = EPROTO;
  } else if (error_ != 0) {
    end_ = error_;
  }
  // Else the peer ended without a farewell: the layers above know whether something is missing.
}

// True if the peer's bytes are no TLS records, or if it has answered ours with kMismatch.
bool Session::is_plain() const {
  const unsigned long code = ERR_peek_error();
  const int reason = ERR_GET_LIB(code) == ERR_LIB_SSL ? ERR_GET_REASON(code) : 0;
  return (first_ && !is_tls(static_cast<std::byte>(*first_))) ||
         reason == SSL_AD_REASON_OFFSET + kProtocolVersion || reason == SSL_R_UNSUPPORTED_PROTOCOL;
}

std::string Session::why() const {
  const unsigned long code = ERR_peek_error();
  const int reason = ERR_GET_LIB(code) == ERR_LIB_SSL ? ERR_GET_REASON(code) : 0;
  if (is_plain()) {
    if (role_ == Role::Listener)
      ::send(socket_, kMismatch.data(), kMismatch.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return std::string(kPeerIsPlain);
  }
  if (SSL_get_verify_result(session_.get()) != X509_V_OK) return why_refused();
  if (reason > SSL_AD_REASON_OFFSET) {
    return "it refuses this process's certificate or TLS, by the alert '" +
           std::string(SSL_alert_desc_string_long(reason - SSL_AD_REASON_OFFSET)) +
           "': see its log, and check WEFT_TLS_CERT and WEFT_TLS_CA on both sides";
  }
  if (error_ != 0) return std::string(std::strerror(error_)) + " in the TLS handshake";
  if (end_) return "it closed the connection in the TLS handshake";
  if (reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE)
    return "it shows no certificate: give it WEFT_TLS_CERT and WEFT_TLS_KEY";
  const char* const text = ERR_reason_error_string(code);
  return "TLS failed: " + std::string(text == nullptr ? "OpenSSL gives no reason" : text);
}

std::string Session::why_refused() const {
  const long fault = SSL_get_verify_result(session_.get());
  if (fault == X509_V_ERR_HOSTNAME_MISMATCH) {
    return "its certificate is for " + refused_ + ", which is neither its address " +
           address_of_peer(socket_) + " nor a DNS name of this process's own certificate (" +
           credentials_->own_names() +
           "): issue certificates whose subjectAltName has the machine's addresses, or one DNS "
           "name that all ranks and workers share";
  }
  return "its certificate (of " + refused_ +
         ") is refused: " + X509_verify_cert_error_string(fault) + "; " + remedy(fault);
}

}  // namespace weft::transport::tls
