// SPDX-License-Identifier: Apache-2.0
// A Bootstrap in which only processes that know a secret can write valid values. It appends a
// signature to each value that it sets, and refuses values without it:
//
//   value, HMAC-SHA-256(secret, "weft store value 1" s k scope key value), "weft signed 1"
//
// s and k are the sizes of scope and key, 8 bytes each. Strangers that reach the store can still
// erase keys, count, and put back an earlier value of the same scope and key.
//
// With an empty secret, values stay as they are, and signed ones are refused: the process that has
// written them was given a secret.
//
// Thread-safe, and blocks, as the store below it does.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/error.h>
#include <weft/transport/batched_bootstrap.h>

namespace weft::transport {

class SignedBootstrap final : public BatchedBootstrap {
 public:
  enum class Users { Ranks, Workers };  // whom errors tell to share a secret

  // The same text on all ranks as `scope`, which tells their keys from equal keys elsewhere in the
  // store (another group, another device).
  SignedBootstrap(std::shared_ptr<Bootstrap> store, std::string secret, std::string scope,
                  Users users = Users::Ranks);

  void set(const std::string& key, const Bytes& value) override;
  // Throws Caller, naming the key and the remedy, if the value has no signature or another
  // secret's.
  Bytes get(const std::string& key, Deadline deadline) override;
  long add(const std::string& key, long amount) override;  // counters have no signature
  bool exists(const std::string& key) override;
  bool compare_set(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  void erase(const std::string& key) override;
  bool exist(const std::vector<std::string>& keys) override;
  // These throw as get() does.
  std::vector<Bytes> get_all(const std::vector<std::string>& keys, Deadline deadline) override;
  std::optional<Bytes> find(const std::string& key) override;
  Bytes set_once(const std::string& key, const Bytes& value) override;
  bool ends_with_job() const override;

  // A value as it lies in the store.
  Bytes sealed(const std::string& key, const Bytes& value) const;
  // The value within; throws as get() does.
  Bytes unsealed(const std::string& key, Bytes stored) const;

 private:
  Error refused(const std::string& key, const std::string& why) const;

  const std::shared_ptr<Bootstrap> store_;
  const std::string secret_;
  const std::string scope_;
  const Users users_;
};

// True if a SignedBootstrap has written the value: for ranks without a secret, which then can say
// what is wrong.
bool is_signed(const Bootstrap::Bytes& stored);

}  // namespace weft::transport
