// SPDX-License-Identifier: Apache-2.0
// Adapts a transport::Bootstrap to the c10d::Store that ProcessGroupGloo takes. Keys and values
// pass through unchanged, so that ranks that gave their store directly to c10d (Python) find the
// same keys.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <weft/base/mutex.h>
#include <weft/transport/bootstrap.h>

namespace weft::transport::gloo {

class StoreAdapter : public c10d::Store {
 public:
  StoreAdapter(std::shared_ptr<Bootstrap> bootstrap, std::chrono::milliseconds timeout)
      : c10d::Store(timeout), bootstrap_(std::move(bootstrap)) {}

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

  // Called when the group has ended: drops the store, which may count its users. Later calls throw
  // Cancelled.
  void release();

 private:
  std::shared_ptr<Bootstrap> bootstrap() const;

  mutable Mutex mutex_;
  std::shared_ptr<Bootstrap> bootstrap_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::transport::gloo
