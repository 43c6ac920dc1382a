#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <torch/serialize/archive.h>

#include <weft/engine/group/core.h>
#include <weft/engine/parallel/checkpoint_file.h>
#include <weft/engine/parallel/checkpoint_parts.h>
#include <weft/engine/parallel/zero.h>

namespace weft::checkpoint {

namespace {

constexpr std::int64_t kMostText = 16 << 10;
constexpr std::int64_t kPiece = 8 << 20;

at::Tensor bytes_of(std::string& text) {
  return at::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, at::TensorOptions(at::kByte));
}

c10::Device device_of(const ProcessGroup& group) { return group::Core::of(group).host_values_device(); }

// Returns on all ranks where it went well on all, with `same` alike; else throws the first rank's failure on all.
void agree(ProcessGroup& group, const std::optional<Error>& mine, std::int64_t same = 0) {
  const c10::Device device = device_of(group);
  std::string text;
  if (mine) text = static_cast<char>(mine->blame()) + mine->text().substr(0, kMostText - 1);
  at::Tensor own = at::empty({2}, at::TensorOptions(at::kLong));
  own[0] = static_cast<std::int64_t>(text.size());
  own[1] = same;
  at::Tensor all = at::empty({2 * group.size()}, own.options().device(device));
  group.all_gather_into(all, own.to(device)).wait();
  all = all.to(at::kCPU).view({group.size(), 2});
  const std::int64_t longest = all.select(1, 0).max().item<std::int64_t>();
  if (all.select(1, 0).min().item<std::int64_t>() < 0 || longest > kMostText) {
    throw Error(Blame::Remote, "a rank announced an error of " + std::to_string(longest) + " bytes");
  }
  if (longest == 0) {
    for (int rank = 1; rank < group.size(); ++rank) {
      if (all[rank][1].item<std::int64_t>() == all[0][1].item<std::int64_t>()) continue;
      throw Error(Blame::Caller, "the ranks name different parts for one checkpoint: those of rank " +
                                     std::to_string(rank) + " are not those of rank 0");
    }
    return;
  }
  text.resize(static_cast<std::size_t>(longest));
  at::Tensor texts = at::empty({group.size() * longest}, at::TensorOptions(at::kByte).device(device));
  group.all_gather_into(texts, bytes_of(text).to(device, /*non_blocking=*/false, /*copy=*/true)).wait();
  texts = texts.to(at::kCPU);
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::int64_t bytes = all[rank][0].item<std::int64_t>();
    if (bytes == 0) continue;
    const auto* const said = static_cast<const char*>(texts.const_data_ptr()) + rank * longest;
    const int blame = static_cast<unsigned char>(said[0]);
    throw Error(blame > static_cast<int>(Blame::Remote) ? Blame::Remote : static_cast<Blame>(blame),
                std::string(said + 1, static_cast<std::size_t>(bytes - 1)));
  }
}

std::int64_t broadcast_number(ProcessGroup& group, std::int64_t number) {
  const c10::Device device = device_of(group);
  const at::Tensor there = at::full({1}, number, at::TensorOptions(at::kLong).device(device));
  group.broadcast(there, 0).wait();
  return there.to(at::kCPU).item<std::int64_t>();
}

void broadcast_bytes(ProcessGroup& group, const at::Tensor& bytes) {
  if (group.size() == 1) return;
  const c10::Device device = device_of(group);
  for (std::int64_t offset = 0; offset < bytes.numel(); offset += kPiece) {
    const at::Tensor piece = bytes.narrow(0, offset, std::min(kPiece, bytes.numel() - offset));
    const at::Tensor there = piece.to(device);  // itself, on the host
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

}  // namespace

void save(const std::string& file, ProcessGroup group, const std::vector<Part>& parts) {
  std::int64_t same = 0;
  std::optional<Error> failure = error_of([&] { same = check_names(parts); });
  agree(group, failure, same);
  for (const Part& part : parts) {
    auto* const sharded = sharded_optimizer_of(part);
    if (sharded == nullptr) continue;
    // It is collective: what fails here does not keep this rank from the others.
    const auto error = error_of([&] { sharded->consolidate_state_dict(0); });
    if (error && !failure) failure = error;
  }
  if (group.rank() == 0 && !failure) failure = error_of([&] { write(file, parts); });
  agree(group, failure);
}

void check_writable(const std::string& file, ProcessGroup group) {
  agree(group, error_of([&] {
          if (group.rank() != 0) return;
          const Draft draft(file);
        }));
}

bool exists(const std::string& file, ProcessGroup group) {
  bool is_there = false;
  const auto failure = error_of([&] {
    if (group.rank() == 0) is_there = is_file(file);
  });
  agree(group, failure);
  return broadcast_number(group, is_there ? 1 : 0) != 0;
}

void load(const std::string& file, ProcessGroup group, const std::vector<Part>& parts) {
  const bool reads = group.rank() == 0;
  std::unique_ptr<Reader> reader;
  agree(group, error_of([&] {
          check_names(parts);
          if (reads) reader = std::make_unique<Reader>(file);
        }));
  const std::int64_t size = broadcast_number(group, reads ? static_cast<std::int64_t>(reader->bytes()) : 0);
  at::Tensor bytes;
  agree(group, error_of([&] {
          const auto no_room = error_of([&] { bytes = at::empty({size}, at::TensorOptions(at::kByte)); });
          if (no_room) {
            throw Error(Blame::Busy, "rank " + std::to_string(group.rank()) + " has no memory for the " +
                                         std::to_string(size) + " bytes of the checkpoint '" + file + "'");
          }
          if (reads) reader->read(bytes.mutable_data_ptr());
        }));
  broadcast_bytes(group, bytes);
  std::vector<Commit> commits;
  auto failure = error_of([&] {
    torch::serialize::InputArchive archive;
    archive.load_from(static_cast<const char*>(bytes.const_data_ptr()), static_cast<std::size_t>(size),
                      c10::Device(c10::kCPU));
    bytes.reset();
    commits = stage_parts(archive, parts, group.device());
  });
  if (failure) {
    failure = failure->within("the checkpoint '" + file + "' does not fit on rank " + std::to_string(group.rank()) +
                              ", and nothing was loaded");
  }
  agree(group, failure);
  for (const Commit& commit : commits) commit();
}

}  // namespace weft::checkpoint
