// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of the test's process.
#pragma once

#include <weft/tests/conformance/communicator/ranks.h>

namespace weft::conformance {

class Threads : public Setting {
 public:
  explicit Threads(int ranks) : ranks_(ranks) {}
  int ranks() const override { return ranks_; }
  static transport::JoinOptions options_for(const Rank& rank, std::chrono::milliseconds timeout);

 protected:
  // `join` gives the rank its communicator and memory. When this returns, the ranks have released
  // everything.
  void run_ranks(const std::function<void(Rank&)>& join,
                 const std::function<void(Rank&)>& body) const;

 private:
  int ranks_;
};

}  // namespace weft::conformance
