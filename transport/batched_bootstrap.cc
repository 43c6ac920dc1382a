// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/transport/batched_bootstrap.h>

namespace weft::transport {

bool exist(Bootstrap& store, const std::vector<std::string>& keys) {
  if (auto* const batched = dynamic_cast<BatchedBootstrap*>(&store)) return batched->exist(keys);
  return std::all_of(keys.begin(), keys.end(),
                     [&](const std::string& key) { return store.exists(key); });
}

std::vector<Bootstrap::Bytes> get_all(Bootstrap& store, const std::vector<std::string>& keys,
                                      Deadline deadline) {
  if (auto* const batched = dynamic_cast<BatchedBootstrap*>(&store))
    return batched->get_all(keys, deadline);
  std::vector<Bootstrap::Bytes> values;
  values.reserve(keys.size());
  for (const std::string& key : keys) values.push_back(store.get(key, deadline));
  return values;
}

std::optional<Bootstrap::Bytes> find(Bootstrap& store, const std::string& key) {
  if (auto* const batched = dynamic_cast<BatchedBootstrap*>(&store)) return batched->find(key);
  if (!store.exists(key)) return std::nullopt;
  return store.get(key, Deadline::never());
}

Bootstrap::Bytes set_once(Bootstrap& store, const std::string& key, const Bootstrap::Bytes& value) {
  if (auto* const batched = dynamic_cast<BatchedBootstrap*>(&store))
    return batched->set_once(key, value);
  return store.compare_set(key, {}, value) ? value : store.get(key, Deadline::never());
}

bool ends_with_job(const Bootstrap& store) {
  const auto* const batched = dynamic_cast<const BatchedBootstrap*>(&store);
  return batched != nullptr && batched->ends_with_job();
}

}  // namespace weft::transport
