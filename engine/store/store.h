// c10d's stores as the transports' Bootstrap, with Weft's errors.
#pragma once

#include <chrono>
#include <functional>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <weft/transport/bootstrap.h>

namespace weft::group {

// Longer ones overflow inside c10d and Gloo.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 24);

class StoreConnection;

// Where the store has a connection (TCPStore), get() looks for the key again and again: others use
// the connection meanwhile, which c10d's own wait would keep to itself. Give it a connection_of() a
// store on which users may block.
class StoreBootstrap final : public transport::Bootstrap {
 public:
  // With `interrupt`, get() does so with every store, and calls it in between; what it throws ends
  // the wait. (c10d's own wait cannot be ended.)
  explicit StoreBootstrap(c10::intrusive_ptr<c10d::Store> store,
                          std::function<void()> interrupt = {});

  void set(const std::string& key, const Bytes& value) override;
  Bytes get(const std::string& key, Deadline deadline) override;
  long add(const std::string& key, long amount) override;
  bool exists(const std::string& key) override;
  bool compare_set(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  // Only what nobody may be about to get: c10d's own get would wait for it anew, past every
  // deadline.
  void erase(const std::string& key) override;
  bool exist(const std::vector<std::string>& keys);

 private:
  void wait(const std::string& key, Deadline deadline);
  void look_for(const std::string& key, Deadline deadline);

  c10::intrusive_ptr<c10d::Store> store_;
  std::function<void()> interrupt_;
  bool is_shared_;               // the connection
  StoreConnection* connection_;  // of store_; null where that is none of connection_of()
};

// The same store over another connection than the user's, where it has connections (TCPStore): all
// groups and agents of this process that are made with one store object share one, however many
// they are. None of them blocks on it. It ends with the last that holds it. Throws PeerLost where
// it cannot be made, Busy where this process has no descriptor left.
c10::intrusive_ptr<c10d::Store> connection_of(const c10::intrusive_ptr<c10d::Store>& store);

transport::Bootstrap::Bytes to_bytes(std::string_view text);
std::string to_text(const transport::Bootstrap::Bytes& bytes);

}  // namespace weft::group
