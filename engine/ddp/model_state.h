// Starting all ranks from the same model.
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
// with rank 0's, and `options`, lines of text. Collective. Throws Caller on every rank when one
// differs; the text names the ranks that do and their first difference. So it does where a tensor
// cannot be copied to other ranks, being sparse or expanded. One rank alone compares nothing.
void check_same_model(ProcessGroup& group, const std::vector<NamedTensor>& tensors,
                      const std::string& options = "");

// Runs what all ranks of the group do together in `name`, a call of the user: errors and reports of
// waits name it in front of its collectives. Where a rank does not come in time, or has left, the
// error says that it did not come to `place`.
void on_all_ranks(const ProcessGroup& group, const char* name, const char* place,
                  const std::function<void()>& call);

// A rank that goes to compare what is frozen leaves in the group's store what it has changed,
// `what`. Ranks that have not changed it too go on to another collective instead, which then fails
// on all of them with a text about calls.
void announce_change(const ProcessGroup& group, const std::string& what);
void withdraw_change(const ProcessGroup& group);
// A Caller error of a collective, in front of which stands what ranks have announced and not
// withdrawn. Rank 0 waits up to a second until the others have read that: it may end next, and the
// store with it.
Error explained_by_changes(const ProcessGroup& group, const Error& error);

// Returns whether all ranks give the same text. Runs one collective, and blocks.
bool is_same_on_all(ProcessGroup& group, const std::string& text);

// Copies the values of `root` to all ranks, in flat pieces of at most 250 MiB. Collective; blocks
// until they are there. `model`: as in transport::Training, so that ranks which copy different
// models are told so.
void broadcast_values(DeviceGroups& groups, const std::vector<at::Tensor>& tensors, int root,
                      std::uint32_t model);

}  // namespace weft::parallel
