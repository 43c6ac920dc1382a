// SPDX-License-Identifier: Apache-2.0
// Makes all ranks start from the same model.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/error.h>
#include <weft/engine/ddp/device_groups.h>

namespace weft::parallel {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// Compares names, shapes, dtypes, layouts and places (the host, the rank's GPU, its second one, …)
// of the tensors, and `options` (lines of text), with rank 0's. Collective. Throws Caller on every
// rank if one differs, naming the ranks that differ and the first difference of each; or if a
// tensor is sparse or expanded and so cannot be copied to other ranks. Does nothing in a group of
// one rank.
void check_same_model(ProcessGroup& group, const std::vector<NamedTensor>& tensors,
                      const std::string& options = "");

// Runs `call`, the part of the user's call `name` that all ranks run together. Errors and wait
// reports put `name` in front of its collectives. If a rank is late or has left, the error says
// that all ranks must come to `place`.
void on_all_ranks(const ProcessGroup& group, const char* name, const char* place,
                  const std::function<void()>& call);

// A rank that is about to compare which parameters are frozen writes its change, `what`, to the
// group's store. Ranks without that change call another collective instead, which fails on all of
// them with a mismatch; explained_by_changes() then names the cause.
void announce_change(const ProcessGroup& group, const std::string& what);
void withdraw_change(const ProcessGroup& group);
// Returns `error`; if it is a Caller error of a collective, with the announced and not withdrawn
// changes of all ranks in front. Rank 0 waits up to a second until the others have read these: it
// may end next, and its store with it.
Error explained_by_changes(const ProcessGroup& group, const Error& error);

// Returns true if all ranks give the same text. Runs one collective and blocks.
bool is_same_on_all(ProcessGroup& group, const std::string& text);

// Copies the values of `root` to all ranks, in flat pieces of at most 250 MiB. Collective; blocks
// until the values have arrived. `model` is sent as in transport::Training, so that ranks which
// copy different models get an error that says so.
void broadcast_values(DeviceGroups& groups, const std::vector<at::Tensor>& tensors, int root,
                      std::uint32_t model);

}  // namespace weft::parallel
