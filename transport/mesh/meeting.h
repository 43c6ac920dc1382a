// SPDX-License-Identifier: Apache-2.0
// How the ranks of a mesh meet in the store, before they are connected. Each rank publishes its
// address. Rank 0 reads all addresses and publishes them as one table, with a random token that
// the ranks show each other when they connect. So a rank makes two requests, and rank 0 three and
// those by which it waits, over a BatchedBootstrap. Rank 0 also reads now and then what has come,
// so that a rank that cannot join is refused before all have come.
//
// If the group has a secret, the store is a SignedBootstrap; a rank without one is refused, and
// refuses the others.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <weft/transport/batched_bootstrap.h>
#include <weft/transport/mesh/table.h>
#include <weft/transport/transport.h>

namespace weft::transport::mesh {

class Meeting {
 public:
  // `place` begins the texts of errors.
  Meeting(const JoinOptions& options, std::string place);

  // Blocks until all ranks have published their addresses. Throws Timeout, which names the ranks
  // that did not come; Protocol, which names a rank of another version; Caller, if ranks have
  // different secrets; the store's errors.
  Table hold(const std::string& address, const Connector& connector, Deadline deadline) const;
  // Erases this group's keys from the store, unless it ends with the job. All ranks must have met
  // before.
  void tidy() const noexcept;

 private:
  Table collect(const std::string& own, const Connector& connector, Deadline deadline) const;
  void look_at_first(std::vector<std::string> keys) const;
  std::vector<std::string> read(const std::vector<std::string>& keys, Deadline deadline) const;
  // The error of a rank without a secret, if a rank with one has written the value.
  std::optional<Error> why_locked(const Bootstrap::Bytes& value, int writer) const;
  std::vector<std::uint32_t> hosts_of(const std::vector<std::string>& addresses,
                                      const Connector& connector) const;
  Error why_late() const;

  const JoinOptions& options_;
  const std::string place_;
};

}  // namespace weft::transport::mesh
