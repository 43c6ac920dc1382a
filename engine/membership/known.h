// SPDX-License-Identifier: Apache-2.0
// The news of the job that a rank knows, and tells its new neighbours: who takes part, has died or
// has left, and the latest frames that must reach every rank. Ranks pass each piece of news on
// once. For the thread of the job's loop; nothing blocks.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <weft/engine/membership/frame.h>
#include <weft/engine/membership/published.h>

namespace weft::group {

class Known {
 public:
  // Takes in a frame that goes to all ranks. Returns false if it is no news: then it is not passed
  // on.
  bool take(const Frame& frame);
  // Gives the frame of this rank its sequence, if its type has one.
  void number(Frame& frame);
  // Frames that tell a new neighbour everything.
  std::vector<Frame> all() const;

  // The Abort frames of the group, as far as they are kept: for a rank that comes to it late.
  std::vector<Frame> aborts(const std::string& group) const;

  // True if the rank's address is known and it is neither lost nor has left.
  bool is_present(int rank) const;
  const std::map<int, Published>& addresses() const { return addresses_; }
  std::optional<Published> address_of(int rank) const;
  const std::map<int, std::string>& lost() const { return lost_; }
  // True if the rank is lost because its machine does not answer.
  bool is_cut(int rank) const { return cut_.contains(rank); }
  const std::set<int>& left() const { return left_; }

 private:
  struct Kept {
    Frame frame;
    std::size_t bytes = 0;
    std::chrono::steady_clock::time_point since;
  };
  bool keep(const Frame& frame);

  std::map<int, Published> addresses_;
  std::map<int, std::string> lost_;      // and how that was noticed
  std::set<int> cut_;                    // lost ranks that may live on, out of reach
  std::set<int> left_;                   // ranks that said goodbye
  std::map<int, std::uint32_t> latest_;  // sequences, by rank
  std::deque<Kept> kept_;
  std::size_t kept_bytes_ = 0;
};

}  // namespace weft::group
