// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>
#include <utility>
#include <variant>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <weft/base/make_error.h>
#include <weft/engine/checkpoint/folder.h>
#include <weft/engine/checkpoint/job_owner.h>
#include <weft/engine/checkpoint/loading.h>
#include <weft/engine/checkpoint/part_contents.h>
#include <weft/engine/checkpoint/part_rows.h>
#include <weft/engine/checkpoint/part_values.h>
#include <weft/engine/checkpoint/slice_file.h>
#include <weft/engine/checkpoint/value_copies.h>
#include <weft/engine/group/collective_error.h>

namespace weft::checkpoint::job {

namespace {

using group::error_of;

Answer answer(const std::function<void(Answer&)>& call) {
  Answer made;
  if (const auto failure = error_of([&] { call(made); }))
    return {static_cast<int>(failure->blame()), failure->text(), {}, {}};
  return made;
}

std::vector<Part> parts_of(const OwnedParts& owned) {
  std::vector<Part> parts;
  for (const auto& one : owned) parts.push_back(one.local_value().part);
  return parts;
}

void refuse_spread(const Part& part) {
  if (Contents::is_per_rank(part))
    throw Error(Blame::Caller, "per_rank() is for a group, whose ranks all save and load");
  if (sharded_optimizer_of(part) != nullptr) {
    throw Error(Blame::Caller,
                "a ZeroRedundancyOptimizer is spread over the ranks of a group, which save and "
                "load it together: checkpoint::save_async(folder, group, parts)");
  }
}

Error spread_model() {
  return {Blame::Caller,
          "a sharded model is spread over the ranks of a group, which save and load it together: "
          "checkpoint::save_async(folder, group, parts)"};
}

std::vector<Value> values_here(const std::vector<Part>& parts) {
  std::vector<Value> values;
  for (const Part& part : parts) {
    const auto failure = error_of([&] {
      refuse_spread(part);
      auto own = values_of(part, 0, 1);
      const bool is_spread =
          std::ranges::any_of(own, [](const Value& value) { return value.rows.has_value(); });
      if (is_spread) throw spread_model();
      std::move(own.begin(), own.end(), std::back_inserter(values));
    });
    if (failure)
      throw failure->within("part '" + part.name() + "' of the checkpoint cannot be saved");
  }
  std::ranges::stable_sort(values, {}, &Value::name);
  return values;
}

// The tensors that a load may write on a GPU. Objects that load themselves show none.
std::vector<at::Tensor> tensors_of_parts(const std::vector<Part>& parts) {
  std::vector<at::Tensor> tensors;
  const auto add = [&](const std::vector<at::Tensor>& some) {
    tensors.insert(tensors.end(), some.begin(), some.end());
  };
  for (const Part& part : parts) {
    const auto& content = Contents::of(part);
    if (auto* const* const module = std::get_if<torch::nn::Module*>(&content)) {
      add((*module)->parameters());
      add((*module)->buffers());
    } else if (auto* const* const optimizer = std::get_if<torch::optim::Optimizer*>(&content)) {
      for (const auto& group : (*optimizer)->param_groups()) add(group.params());
    } else if (auto* const* const tensor = std::get_if<at::Tensor*>(&content)) {
      tensors.push_back(**tensor);
    } else if (auto* const* const several = std::get_if<std::vector<at::Tensor>*>(&content)) {
      add(**several);
    }
  }
  return tensors;
}

// Waits for the GPUs that saving or loading the parts may use. An object that saves and loads
// itself may use any.
void wait_for_gpus_of(const std::vector<Part>& parts) {
  const bool has_object = std::ranges::any_of(parts, [](const Part& part) {
    return std::holds_alternative<detail::Archived>(Contents::of(part));
  });
  has_object ? wait_for_all_gpus() : wait_for_gpus(tensors_of_parts(parts));
}

void require_seen(const std::string& folder) {
  if (is_folder(folder)) return;
  throw Error(Blame::Caller, "there is no folder '" + folder +
                                 "' here: name one on a file system that all workers share");
}

}  // namespace

Answer stage_save(OwnedParts parts, std::string folder) {
  return answer([&](Answer& made) {
    require_seen(folder);
    check_folder_writable(folder);
    const std::vector<Part> own = parts_of(parts);
    made.kinds = check_names(own);
    auto staged = std::make_shared<Staged>();
    staged->folder.emplace(std::move(folder));
    wait_for_gpus_of(own);
    staged->share = share_of(values_here(own), 0, 1);
    staged->memory = memory_for(staged->share);
    wait_for_gpus(staged->share.tensors);
    ValueCopies copies;
    copies.start(staged->share, staged->memory, /*stages=*/false);
    // The caller returns to its program when this call has ended, and values may change then.
    copies.wait();
    staged->share.tensors.clear();
    made.staged = RRef<SharedStaged>(std::move(staged));
  });
}

Answer write_staged(RRef<SharedStaged> staged, std::string file) {
  return answer([&](Answer& made) {
    if (file.find('/') != std::string::npos)
      throw Error(Blame::Protocol, "a caller names a file outside of the checkpoint");
    Staged& here = *staged.local_value();
    made.text = encode(write_slices(*here.folder, file, std::move(here.share.slices),
                                    here.memory.const_data_ptr(), here.share.bytes));
    here.memory.reset();
  });
}

Answer stage_load(OwnedParts parts, std::string folder, std::string manifest, int ranks, int rank,
                  std::int64_t lease) {
  return answer([&](Answer& made) {
    require_seen(folder);
    auto staged = std::make_shared<Staged>();
    const std::vector<Part> own = parts_of(parts);
    check_names(own);
    for (const Part& part : own) {
      const auto failure = error_of([&] {
        refuse_spread(part);
        if (has_shards(part)) throw spread_model();
      });
      if (failure) throw failure->within("part '" + part.name() + "'");
    }
    Manifest read = parse_manifest(manifest);
    read.ranks = ranks;
    wait_for_gpus_of(own);
    staged->commits = stage_folder(folder, read, own, rank);
    staged->parts = std::move(parts);
    if (lease > 0) staged->last = Deadline::in(std::chrono::milliseconds(lease));
    made.staged = RRef<SharedStaged>(std::move(staged));
  });
}

Answer commit(RRef<SharedStaged> staged) {
  return answer([&](Answer&) {
    Staged& here = *staged.local_value();
    if (here.last.passed())
      throw Error(Blame::Timeout, "it was too late to load the values that it had read");
    const std::vector<Part> parts = parts_of(here.parts);
    wait_for_gpus_of(parts);
    for (const Commit& commit : here.commits) commit();
    wait_for_gpus_of(parts);
  });
}

}  // namespace weft::checkpoint::job
