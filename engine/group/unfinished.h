// SPDX-License-Identifier: Apache-2.0
// The operations of this rank in one group that have not ended, and the last one that it issued.
// Leaving waits for them, and wait reports show them.
//
// Operations owns it and calls every function with its mutex held. Nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <weft/base/op.h>
#include <weft/engine/group/wait.h>

namespace weft::group {

class Unfinished {
 public:
  struct Issued {
    Wait wait;
    Op op;
    bool receives = false;  // leaving does not wait for it
  };

  // An operation begins; it may still be refused.
  void begin(Wait wait) { last_ = wait; }
  const Wait& last() const { return last_; }
  // The operation has been issued.
  void add(Issued issued);
  // Recent operations, oldest first; some of them may have ended.
  const std::vector<Issued>& issued() const { return issued_; }
  // The oldest operation that has not ended.
  std::vector<Wait> waits() const;
  // The last operation, and how long ago it was. `begun`: how many collectives this rank has begun.
  std::string last_text(std::uint64_t begun) const;

 private:
  std::vector<Issued> issued_;
  std::size_t kept_ = 0;  // size of issued_ when ended operations were last removed from it
  Wait last_;
};

}  // namespace weft::group
