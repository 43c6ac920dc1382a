// SPDX-License-Identifier: Apache-2.0
// On which host each rank of a group lies, and how the ranks of a host share work: memory is cut
// into slices, as many as the largest host has ranks, and every slice has one owner on each host.
// So on hosts with equally many ranks each rank owns one slice, and on a smaller host a rank may
// own several, which follow each other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft::transport::mesh {

class Layout {
 public:
  // Nothing is known: all ranks are as good as on one host.
  Layout() = default;
  // Takes the host of each rank. Hosts may have any numbers.
  explicit Layout(std::span<const std::uint32_t> host_of_rank);

  int hosts() const { return static_cast<int>(ranks_.size()); }
  // True if collectives may be done in two levels: there are several hosts, and one of them has
  // several ranks.
  bool has_levels() const { return hosts() > 1 && slices_ > 1; }
  // Hosts are numbered in the order of their lowest ranks.
  int host_of(int rank) const { return host_of_[static_cast<std::size_t>(rank)]; }
  // In ascending order.
  const std::vector<int>& ranks_on(int host) const {
    return ranks_[static_cast<std::size_t>(host)];
  }
  // The place of a rank among the ranks of its host.
  int place_of(int rank) const { return place_of_[static_cast<std::size_t>(rank)]; }

  // Number of ranks on the largest host.
  int slices() const { return slices_; }
  // The slices of the rank with this place on this host are those from first_slice(host, place) to
  // first_slice(host, place + 1).
  int first_slice(int host, int place) const {
    const int members = static_cast<int>(ranks_on(host).size());
    return (place * slices_ + members - 1) / members;
  }
  // The owners of a slice, by host.
  const std::vector<int>& owners(int slice) const {
    return owners_[static_cast<std::size_t>(slice)];
  }

 private:
  std::vector<int> host_of_, place_of_;   // by rank
  std::vector<std::vector<int>> ranks_;   // by host
  std::vector<std::vector<int>> owners_;  // by slice
  int slices_ = 0;
};

}  // namespace weft::transport::mesh
