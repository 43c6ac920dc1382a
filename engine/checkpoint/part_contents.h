// SPDX-License-Identifier: Apache-2.0
// The contents of a Part, for the files of this folder. Internal.
#pragma once

#include <string>

#include <weft/engine/checkpoint/checkpoint.h>

namespace weft::checkpoint {

struct Contents {
  using Content = Part::Content;
  static const Content& of(const Part& part) { return part.content_; }
  static bool is_constant(const Part& part) { return part.is_constant_; }
  static bool is_per_rank(const Part& part) { return part.is_per_rank_; }
};

// A name's key in an archive, and back. libtorch's archives are TorchScript, which cannot read
// every name again.
std::string key_of(const std::string& name);
std::string name_of(const std::string& key);

}  // namespace weft::checkpoint
