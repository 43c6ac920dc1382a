// SPDX-License-Identifier: Apache-2.0
// A Bootstrap whose server answers a question about many keys, or a question and a change, in one
// request. Ranks of large groups ask for little, because all ask the same server.
//
// The free functions take any Bootstrap, and make more requests if it is not one of these.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <weft/transport/bootstrap.h>

namespace weft::transport {

class BatchedBootstrap : public Bootstrap {
 public:
  virtual bool exist(const std::vector<std::string>& keys) = 0;
  // Returns the values once all keys exist. Throws Timeout, naming a key.
  virtual std::vector<Bytes> get_all(const std::vector<std::string>& keys, Deadline deadline) = 0;
  // Returns the value, or nothing if the key does not exist. Does not wait.
  virtual std::optional<Bytes> find(const std::string& key) = 0;
  // Sets the key unless it exists. Returns its value then.
  virtual Bytes set_once(const std::string& key, const Bytes& value) = 0;
  // True if the store ends with the job, so nobody needs to erase keys.
  virtual bool ends_with_job() const { return false; }
};

bool exist(Bootstrap& store, const std::vector<std::string>& keys);
std::vector<Bootstrap::Bytes> get_all(Bootstrap& store, const std::vector<std::string>& keys,
                                      Deadline deadline);
std::optional<Bootstrap::Bytes> find(Bootstrap& store, const std::string& key);
Bootstrap::Bytes set_once(Bootstrap& store, const std::string& key, const Bootstrap::Bytes& value);
bool ends_with_job(const Bootstrap& store);

}  // namespace weft::transport
