// SPDX-License-Identifier: Apache-2.0
// The functions that the worker which saves or loads a checkpoint of an RPC job calls on the owners
// of its values (job_checkpoint.cc). Internal.
//
// Each returns an Answer, also if it fails, and blocks until it has done its work. They run on
// threads of the owner's agent, whose current streams are not those of the calls that have written
// the values: so they wait for the GPUs of the values before they read or write there, and commit()
// after that, too.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/deadline.h>
#include <weft/engine/checkpoint/checkpoint_parts.h>
#include <weft/engine/checkpoint/job_checkpoint.h>
#include <weft/engine/checkpoint/open_folder.h>
#include <weft/engine/checkpoint/shares.h>

namespace weft::checkpoint::job {

using OwnedParts = std::vector<RRef<detail::OwnedPart>>;

// The values that an owner has copied, or is about to load, between two calls. The caller has the
// reference to it; it is destroyed with that, also if the caller dies.
struct Staged {
  std::optional<OpenFolder> folder;  // of a save: a later folder of the same name is another one
  Share share;
  at::Tensor memory;
  std::vector<Commit> commits;
  OwnedParts parts;                   // keep the values alive
  Deadline last = Deadline::never();  // until when the commits may begin
};
using SharedStaged = std::shared_ptr<Staged>;

// An owner's answer. Errors keep their blame, which they would lose as exceptions.
struct Answer {
  int blame = -1;  // none: no error
  std::string text;
  RRef<SharedStaged> staged;
  std::vector<std::string> kinds;  // of the parts
  WEFT_FIELDS(blame, text, staged, kinds)
};

// Copies the parts' values, for a checkpoint in that folder.
Answer stage_save(OwnedParts parts, std::string folder);
// Writes what was copied; the text of the answer is this file's part of the manifest.
Answer write_staged(RRef<SharedStaged> staged, std::string file);
// Reads the parts and compares them. `ranks`: see Manifest. `lease`: how long commit() may begin
// from the return on, in milliseconds; 0: without limit.
Answer stage_load(OwnedParts parts, std::string folder, std::string manifest, int ranks, int rank,
                  std::int64_t lease);
// Gives the parts the values that were read.
Answer commit(RRef<SharedStaged> staged);

}  // namespace weft::checkpoint::job
