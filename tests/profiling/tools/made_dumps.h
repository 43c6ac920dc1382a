// SPDX-License-Identifier: Apache-2.0
// Handmade dumps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include <weft/profiling/tools/analysis.h>

namespace weft::tools {

using What = Finding::What;

inline constexpr std::int64_t kSecond = 1'000'000'000;
inline constexpr std::int64_t kStart = 1'700'000'000 * kSecond;

inline Record collective(std::uint64_t sequence, std::int64_t begun, std::int64_t ended,
                         const std::string& name = "all_reduce") {
  Record record;
  record.kind = "collective";
  record.state = ended == 0 ? "open" : "done";
  record.name = name;
  record.sequence = sequence;
  record.bytes = 16;
  record.dtype = "float32";
  record.shape = {4};
  record.begun = kStart + begun;
  record.ended = ended == 0 ? 0 : kStart + ended;
  return record;
}

inline Record message(const std::string& kind, int peer, std::uint64_t sequence,
                      const std::string& state = "open") {
  Record record = collective(sequence, kSecond, state == "open" ? 0 : 2 * kSecond,
                             kind == "receive" ? "recv" : "send");
  record.kind = kind;
  record.state = state;
  record.peer = peer;
  return record;
}

inline Record call(const std::string& kind, int peer, std::uint64_t id, const std::string& state) {
  Record record = message(kind, peer, id, state);
  record.name = "work::slowly";
  record.dtype.clear();
  return record;
}

// A job whose ranks all have a dump 10 s after the start.
inline Dumps job(int ranks) {
  Dumps dumps;
  Group group{"default", 0, {}, {}};
  for (int rank = 0; rank < ranks; ++rank) {
    dumps.dumps.push_back(
        {"dump" + std::to_string(rank), "host", rank, kStart + 10 * kSecond, "asked"});
    group.ranks.push_back(rank);
    group.views[rank] = {static_cast<std::size_t>(rank), rank, rank, {}};
    dumps.agents[rank] = group.views[rank];
  }
  dumps.groups.push_back(group);
  return dumps;
}

inline std::vector<Finding> of(const std::vector<Finding>& all, What what) {
  std::vector<Finding> some;
  std::copy_if(all.begin(), all.end(), std::back_inserter(some),
               [&](const Finding& one) { return one.what == what; });
  return some;
}

}  // namespace weft::tools
