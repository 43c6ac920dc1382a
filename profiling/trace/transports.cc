// SPDX-License-Identifier: Apache-2.0
#include <weft/profiling/trace/latest_members.h>
#include <weft/profiling/trace/transports.h>

namespace weft::trace {

namespace {

constinit LatestMembers<TransportsText, kMostTransports> latest;

}  // namespace

void record_transports(const Member& member, std::string_view text) noexcept {
  TransportsText kept{};
  text.copy(kept.data(), kept.size() - 1);
  latest.set(member, kept);
}

std::optional<TransportsText> transports_of(const Member& member) noexcept {
  return latest.get(member);
}

}  // namespace weft::trace
