// SPDX-License-Identifier: Apache-2.0
// TLS 1.3 on one end of a connection, over a non-blocking socket that it does not own. The socket's
// events are the caller's: the session has no thread and no loop. No call blocks. Thread-safe, so
// one thread may send while another receives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sys/types.h>
#include <sys/uio.h>

#include <weft/base/mutex.h>
#include <weft/transport/tls/credentials.h>

struct bio_st;
struct ssl_st;

namespace weft::transport::tls {

enum class Role { Connector, Listener };
// Waits: the handshake goes on when the socket is readable, or writable if there are unsent bytes.
// Lost: the connection ended meanwhile. Failed: the two ends do not agree, and would not the next
// time.
enum class Progress { Done, Waits, Lost, Failed };

class Session {
 public:
  // `socket` is connected. Throws Busy without memory.
  Session(std::shared_ptr<const Credentials> credentials, Role role, int socket);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Goes on with the handshake. Both ends have checked each other's certificate after Done; but a
  // connector may learn only later, from receive(), that the listener has refused it.
  Progress handshake() noexcept;
  // As sendmsg(): returns how many bytes were taken, or -1 with errno. Taken bytes that the socket
  // has no room for are encrypted and wait; flush() sends them.
  ssize_t send(std::span<const iovec> pieces) noexcept;
  // As recvmsg(); fills the pieces as far as bytes have arrived. EPROTO: see failure().
  ssize_t receive(std::span<const iovec> pieces) noexcept;
  // Sends bytes that wait, as many as the socket takes; drops them if the socket has failed.
  // Returns whether none is left.
  bool flush() noexcept;
  bool has_unsent() const noexcept;
  // Tells the peer that nothing follows, and then ends the socket's writing.
  void finish_writing() noexcept;
  // Why the handshake, or the connection with EPROTO, has failed, and what to do about it. The text
  // goes on from "the peer: ".
  std::string failure() const;

 private:
  friend struct SocketBio;  // from which OpenSSL reads, and to which it writes
  int pull(char* to, std::size_t bytes) noexcept WEFT_UNCHECKED_LOCKING;
  void push(const char* from, std::size_t bytes) WEFT_UNCHECKED_LOCKING;
  static int check(int is_right, struct x509_store_ctx_st* chain) WEFT_UNCHECKED_LOCKING;

  bool write(const void* from, std::size_t bytes) WEFT_REQUIRES(mutex_);
  // The same, but returns false if the socket has failed.
  bool flush_now() noexcept WEFT_REQUIRES(mutex_);
  void fail() WEFT_REQUIRES(mutex_);
  bool is_plain() const WEFT_REQUIRES(mutex_);
  std::string why() const WEFT_REQUIRES(mutex_);
  std::string why_refused() const WEFT_REQUIRES(mutex_);

  struct Free {
    void operator()(ssl_st* session) const noexcept;
  };
  const std::shared_ptr<const Credentials> credentials_;
  const Role role_;
  const int socket_;

  mutable Mutex mutex_;
  std::unique_ptr<ssl_st, Free> session_ WEFT_GUARDED_BY(mutex_);
  std::optional<char> first_ WEFT_GUARDED_BY(mutex_);  // the first byte that arrived
  std::string refused_ WEFT_GUARDED_BY(mutex_);        // the names of a certificate that is refused
  std::vector<char> record_ WEFT_GUARDED_BY(mutex_);   // small pieces, put together
  std::vector<char> unsent_ WEFT_GUARDED_BY(mutex_);   // encrypted; sent_ of them are sent
  std::size_t sent_ WEFT_GUARDED_BY(mutex_) = 0;
  std::uint64_t under_key_ WEFT_GUARDED_BY(mutex_) = 0;  // bytes sent under the present key
  bool finishes_ WEFT_GUARDED_BY(mutex_) = false;
  int error_ WEFT_GUARDED_BY(mutex_) = 0;           // errno of the socket
  std::optional<int> end_ WEFT_GUARDED_BY(mutex_);  // errno; 0 if the peer ended its writing
  std::string failure_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::transport::tls
