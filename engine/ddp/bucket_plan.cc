// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <utility>

#include <weft/base/error.h>
#include <weft/engine/ddp/bucket_plan.h>

namespace weft::parallel {

namespace {

// A bucket that still takes gradients, of one dtype and device.
struct Open {
  PlannedBucket bucket;
  std::size_t bytes = 0;
  std::size_t next_limit = 0;
  std::size_t last = 0;  // position in the order of its latest gradient
};

void check_permutation(std::size_t count, std::span<const std::size_t> order) {
  std::vector<bool> seen(count);
  for (const std::size_t index : order) {
    if (index >= count || seen[index])
      throw Error(Blame::Caller,
                  "the order of gradients names an index twice, or one out of range");
    seen[index] = true;
  }
  if (order.size() != count) throw Error(Blame::Caller, "the order of gradients leaves some out");
}

}  // namespace

std::vector<PlannedBucket> plan_buckets(std::span<const PlannedGradient> gradients,
                                        std::span<const std::size_t> order,
                                        std::span<const std::size_t> limits) {
  check_permutation(gradients.size(), order);
  if (limits.empty() || std::find(limits.begin(), limits.end(), 0u) != limits.end()) {
    throw Error(Blame::Caller,
                "DdpOptions::bucket_bytes and first_bucket_bytes must be positive: a bucket holds "
                "at least one byte");
  }
  const auto key = [](const PlannedGradient& gradient) {
    return std::tuple(gradient.dtype, gradient.device.type(), gradient.device.index());
  };
  std::map<decltype(key(gradients[0])), Open> open;
  std::vector<std::pair<std::size_t, PlannedBucket>> closed;  // and its last gradient's position
  for (std::size_t position = 0; position < order.size(); ++position) {
    const PlannedGradient& gradient = gradients[order[position]];
    if (gradient.sparse) {
      closed.push_back({position, {{order[position]}, 0}});
      continue;
    }
    Open& current = open[key(gradient)];
    const std::size_t limit = limits[std::min(current.next_limit, limits.size() - 1)];
    current.bucket.gradients.push_back(order[position]);
    current.bucket.limit = limit;
    current.bytes += gradient.bytes;
    current.last = position;
    if (current.bytes < limit) continue;
    closed.push_back({position, std::exchange(current.bucket, {})});
    current.bytes = 0;
    ++current.next_limit;
  }
  for (auto& [kind, current] : open) {
    if (!current.bucket.gradients.empty())
      closed.push_back({current.last, std::move(current.bucket)});
  }
  std::sort(closed.begin(), closed.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<PlannedBucket> buckets;
  for (auto& [last, bucket] : closed) buckets.push_back(std::move(bucket));
  return buckets;
}

}  // namespace weft::parallel
