// SPDX-License-Identifier: Apache-2.0
// The tree along which membership passes its frames on. Every rank computes it from the ranks that
// it takes to be present, so that nobody has to publish it, and a rank that has lost its parent
// knows the next one. A parent is always lower than its children: ranks that disagree on who is
// present still make no cycle.
#pragma once

namespace weft::group {

// With 1,024 ranks the tree has 4 levels below its root, and a rank 9 connections at most.
constexpr int kChildren = 8;

// The parent of a rank > 0 while all ranks are present.
constexpr int static_parent(int rank) { return (rank - 1) / kChildren; }

// Returns the nearest ancestor of `rank` that is present; if all are absent, the lowest rank that
// is present; -1 if that is `rank` itself, which is then the root. `present` is not called for
// `rank`.
template <class Present>
int parent_of(int rank, const Present& present) {
  for (int one = rank; one > 0;) {
    one = static_parent(one);
    if (present(one)) return one;
  }
  for (int one = 0; one < rank; ++one) {
    if (present(one)) return one;
  }
  return -1;
}

}  // namespace weft::group
