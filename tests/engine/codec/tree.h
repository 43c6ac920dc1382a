// SPDX-License-Identifier: Apache-2.0
// A value of nested containers, of any depth.
#pragma once

#include <utility>
#include <vector>

#include <weft/engine/codec/values.h>

namespace weft::harness {

// Each level is two containers: the struct and its vector.
struct Tree {
  std::vector<Tree> children;
  WEFT_FIELDS(children)
};

inline Tree grown(int levels) {
  Tree tree;
  for (; levels > 1; --levels) {
    Tree above;
    above.children.push_back(std::move(tree));
    tree = std::move(above);
  }
  return tree;
}

inline int levels_of(Tree tree) {
  int levels = 1;
  for (const Tree* at = &tree; !at->children.empty(); at = &at->children.front()) ++levels;
  return levels;
}

}  // namespace weft::harness
