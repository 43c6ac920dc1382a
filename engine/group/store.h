// c10d's stores as the transports' Bootstrap, with Weft's errors.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <weft/transport/bootstrap.h>

namespace weft::group {

// Makes a connection of its own where the store has connections (TCPStore), so that a blocking get() of one user does not
// hold up the others.
class StoreBootstrap final : public transport::Bootstrap {
 public:
  explicit StoreBootstrap(const c10::intrusive_ptr<c10d::Store>& store);

  void set(const std::string& key, const Bytes& value) override;
  Bytes get(const std::string& key, Deadline deadline) override;
  long add(const std::string& key, long amount) override;
  bool exists(const std::string& key) override;
  void erase(const std::string& key) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

transport::Bootstrap::Bytes to_bytes(std::string_view text);
std::string to_text(const transport::Bootstrap::Bytes& bytes);

}  // namespace weft::group
