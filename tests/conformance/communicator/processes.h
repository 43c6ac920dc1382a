// SPDX-License-Identifier: Apache-2.0
// Ranks that are forked processes.
#pragma once

#include <weft/tests/conformance/communicator/threads.h>

namespace weft::conformance {

class Processes : public Setting {
 public:
  explicit Processes(int ranks) : ranks_(ranks) {}
  int ranks() const override { return ranks_; }

 protected:
  // `join` gives the rank its communicator and memory. The test fails if a rank throws, fails an
  // expectation or dies.
  void run_ranks(const std::function<void(Rank&)>& join,
                 const std::function<void(Rank&)>& body) const;

 private:
  int ranks_;
};

}  // namespace weft::conformance
