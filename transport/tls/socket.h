// SPDX-License-Identifier: Apache-2.0
// A connected socket that speaks TLS or plain text. No call blocks. One thread may send while
// another receives.
#pragma once

#include <memory>
#include <span>
#include <string>

#include <weft/base/descriptor.h>
#include <weft/transport/tls/session.h>

namespace weft::transport::tls {

class Socket {
 public:
  Socket() = default;
  Socket(Descriptor descriptor) : descriptor_(std::move(descriptor)) {}  // plain text
  // Begins TLS on a socket over which no bytes have passed. Throws Busy without memory.
  void encrypt(std::shared_ptr<const Credentials> credentials, Role role) {
    session_ = std::make_unique<Session>(std::move(credentials), role, descriptor_.get());
  }

  int get() const { return descriptor_.get(); }
  const Descriptor& descriptor() const { return descriptor_; }
  explicit operator bool() const { return static_cast<bool>(descriptor_); }
  bool is_encrypted() const { return session_ != nullptr; }

  // As in Session. Plain text needs no handshake, and has no failure.
  Progress handshake() noexcept { return session_ ? session_->handshake() : Progress::Done; }
  ssize_t send(std::span<const iovec> pieces) noexcept;
  ssize_t receive(std::span<const iovec> pieces) noexcept;
  bool flush() noexcept { return !session_ || session_->flush(); }
  bool has_unsent() const noexcept { return session_ && session_->has_unsent(); }
  void finish_writing() noexcept;
  std::string failure() const { return session_ ? session_->failure() : std::string(); }

 private:
  Descriptor descriptor_;
  std::unique_ptr<Session> session_;  // null: plain text
};

}  // namespace weft::transport::tls
