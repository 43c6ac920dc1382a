// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <ATen/ops/empty.h>
#include <torch/serialize/archive.h>

#include <weft/engine/checkpoint/checkpoint_file.h>
#include <weft/engine/checkpoint/checkpoint_parts.h>
#include <weft/engine/checkpoint/folder.h>
#include <weft/engine/checkpoint/loading.h>
#include <weft/engine/checkpoint/save_arguments.h>
#include <weft/engine/checkpoint/together.h>
#include <weft/engine/ddp/model_state.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/group/objects.h>
#include <weft/engine/zero/zero.h>

namespace weft::checkpoint {

namespace {

using group::agree;
using group::error_of;

constexpr std::int64_t kPiece = 8 << 20;

// Sends the bytes in pieces of kPiece, so that files may have any size.
void broadcast_bytes(ProcessGroup& group, const at::Tensor& bytes) {
  if (group.size() == 1) return;
  const c10::Device device = group::host_values_device(group);
  for (std::int64_t offset = 0; offset < bytes.numel(); offset += kPiece) {
    const at::Tensor piece = bytes.narrow(0, offset, std::min(kPiece, bytes.numel() - offset));
    const at::Tensor there = piece.to(device);  // `piece` itself on the host
    group.broadcast(there, 0).wait();
    if (group.rank() != 0 && !device.is_cpu()) piece.copy_(there);
  }
}

void write(const std::string& file, const std::vector<Part>& parts) {
  Draft draft(file);
  torch::serialize::OutputArchive archive;
  save_parts(archive, parts);
  archive.save_to([&](const void* data, std::size_t bytes) {
    draft.write(data, bytes);
    return bytes;
  });
  draft.publish();
}

void save_on_all(const std::string& file, ProcessGroup& group, const std::vector<Part>& parts) {
  std::vector<std::string> names;
  std::optional<Error> failure = error_of([&] { names = check_names(parts); });
  agree(group, failure);
  compare_names(group, names);
  std::vector<std::shared_ptr<void>> whole;
  for (const Part& part : parts) {
    auto* const sharded = sharded_optimizer_of(part);
    // Collective: an earlier failure here must not keep this rank from calling it.
    const auto error = error_of([&] {
      if (sharded != nullptr) sharded->consolidate_state_dict(0);
      whole.push_back(hold_whole(part, /*writable=*/false));
    });
    if (error && !failure) failure = error;
  }
  if (group.rank() == 0 && !failure) failure = error_of([&] { write(file, parts); });
  agree(group, failure);
}

bool exists_on_all(const std::string& file, ProcessGroup& group) {
  bool is_there = false;
  const auto failure = error_of([&] {
    if (group.rank() == 0) is_there = is_folder(file) ? has_whole(file) : is_file(file);
  });
  agree(group, failure);
  return broadcast_object(is_there, 0, group);
}

void load_on_all(const std::string& file, ProcessGroup& group, const std::vector<Part>& parts) {
  const bool reads = group.rank() == 0;
  std::unique_ptr<Reader> reader;
  agree(group, error_of([&] {
          check_names(parts);
          if (reads) reader = std::make_unique<Reader>(file);
        }));
  const auto size =
      broadcast_object(reads ? static_cast<std::int64_t>(reader->bytes()) : 0, 0, group);
  at::Tensor bytes;
  agree(group, error_of([&] {
          const auto no_room =
              error_of([&] { bytes = at::empty({size}, at::TensorOptions(at::kByte)); });
          if (no_room) {
            throw Error(Blame::Busy, "rank " + std::to_string(group.rank()) +
                                         " has no memory for the " + std::to_string(size) +
                                         " bytes of the checkpoint '" + file + "'");
          }
          if (reads) reader->read(bytes.mutable_data_ptr());
        }));
  broadcast_bytes(group, bytes);
  const auto whole = hold_all_whole(parts, /*writable=*/true, group);
  std::vector<Commit> commits;
  auto failure = error_of([&] {
    torch::serialize::InputArchive archive;
    archive.load_from(static_cast<const char*>(bytes.const_data_ptr()),
                      static_cast<std::size_t>(size), c10::Device(c10::kCPU));
    bytes.reset();
    commits = stage_parts(archive, parts, group.device());
  });
  if (failure) {
    failure = failure->within("the checkpoint '" + file + "' does not fit on rank " +
                              std::to_string(group.rank()) + ", and nothing was loaded");
  }
  agree(group, failure);
  for (const Commit& commit : commits) commit();
}

// Collective. True on all ranks if the path is a folder on rank 0.
bool is_folder_on_all(const std::string& path, ProcessGroup& group) {
  bool is_one = false;
  agree(group, error_of([&] { is_one = group.rank() == 0 && is_folder(path); }));
  return broadcast_object(is_one, 0, group);
}

}  // namespace

void compare_names(ProcessGroup& group, const std::vector<std::string>& names,
                   const std::vector<std::string>& values) {
  std::vector<std::string> lines = names;
  lines.insert(lines.end(), values.begin(), values.end());
  std::string text;
  for (const std::string& line : lines) text += line + '\0';
  if (parallel::is_same_on_all(group, text)) return;
  const auto all = all_gather_object(lines, group);
  const auto other =
      std::find_if(all.begin(), all.end(), [&](const auto& some) { return some != all.front(); });
  const auto place = static_cast<std::size_t>(std::ranges::mismatch(all.front(), *other).in1 -
                                              all.front().begin());
  // Ranks with the same parts find the first other value behind them.
  const auto counts = all_gather_object(names.size(), group);
  const bool are_parts =
      std::ranges::any_of(counts, [&](std::size_t count) { return place < count; });
  const auto at = [&](const std::vector<std::string>& some, std::size_t count) {
    const std::size_t end = are_parts ? count : some.size();
    return place < end ? some[place] : are_parts ? "no more parts" : "no more of them";
  };
  const auto rank = static_cast<std::size_t>(other - all.begin());
  const std::string have = ": rank " + std::to_string(rank) + " has " + at(*other, counts[rank]) +
                           ", where rank 0 has " + at(all.front(), counts.front());
  group::throw_together(
      group, Error(Blame::Caller,
                   are_parts ? "the ranks name different parts for one checkpoint" + have +
                                   "; name the same on all, in the same order"
                             : "the ranks have different parameters or optimizer states for one "
                               "checkpoint" +
                                   have + "; give all ranks models and optimizers alike"));
}

void save(const std::string& file, ProcessGroup group, const std::vector<Part>& parts) {
  on_all("checkpoint::save", group, [&] { save_on_all(file, group, parts); });
}

void check_writable(const std::string& path, ProcessGroup group) {
  on_all("checkpoint::check_writable", group, [&, path = without_slashes(path)] {
    const bool is_one = is_folder_on_all(path, group);
    agree(group, error_of([&] {
            if (is_one) {
              const auto refusal = error_of([&] { check_folder_writable(path); });
              if (refusal) throw refusal->within("rank " + std::to_string(group.rank()));
            } else if (group.rank() == 0) {
              const Draft draft(path);
            }
          }));
  });
}

bool exists(const std::string& path, ProcessGroup group) {
  return on_all("checkpoint::exists", group,
                [&] { return exists_on_all(without_slashes(path), group); });
}

void load(const std::string& path, ProcessGroup group, const std::vector<Part>& parts) {
  on_all("checkpoint::load", group, [&, path = without_slashes(path)] {
    if (is_folder_on_all(path, group)) return load_folder(path, group, parts);
    load_on_all(path, group, parts);
  });
}

}  // namespace weft::checkpoint
