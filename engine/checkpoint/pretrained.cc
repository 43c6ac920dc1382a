// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <weft/base/make_error.h>
#include <weft/engine/checkpoint/checkpoint_file.h>
#include <weft/engine/checkpoint/checkpoint_parts.h>
#include <weft/engine/checkpoint/folder.h>
#include <weft/engine/checkpoint/host_memory.h>
#include <weft/engine/checkpoint/json_reading.h>
#include <weft/engine/checkpoint/loading.h>
#include <weft/engine/checkpoint/part_rows.h>
#include <weft/engine/checkpoint/part_staging.h>
#include <weft/engine/checkpoint/part_values.h>
#include <weft/engine/checkpoint/pretrained.h>
#include <weft/engine/checkpoint/slice_file.h>
#include <weft/engine/checkpoint/slice_reads.h>
#include <weft/engine/checkpoint/together.h>
#include <weft/engine/group/collective_error.h>

namespace weft::checkpoint {

namespace {

using group::error_of;

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kOnlyFile = "model.safetensors";
constexpr std::uintmax_t kMostIndex = 100'000'000;
constexpr std::size_t kMostNames = 20;

// --- which files there are

// The files that an index names, without tensors that it does not name.
Manifest of_index(const std::string& folder, const std::string& name) {
  const std::string path = folder + "/" + name;
  std::error_code failed;
  const std::uintmax_t bytes = std::filesystem::file_size(path, failed);
  if (failed) {
    throw system_error(blame_of(failed.value()), "the file '" + path + "' cannot be read",
                       failed.value());
  }
  if (bytes > kMostIndex) throw Error(Blame::Caller, "the file '" + path + "' is over 100 MB");
  std::ifstream stream(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  Manifest manifest;
  const auto failure = error_of([&] {
    const json all = parse_json(text);
    const json& map = value_at(all, "weight_map");
    if (!map.is_object()) throw Error(Blame::Caller, "its weight_map is no object");
    std::map<std::string, std::set<std::string>> names;  // by file
    for (const auto& [tensor, file] : map.items()) {
      if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos)
        throw Error(Blame::Caller, "it names no file for '" + tensor + "'");
      names[file.get<std::string>()].insert(tensor);
    }
    for (auto& [file, of_file] : names) {
      std::set<std::string>& tensors = of_file;  // C++20 captures no structured binding
      manifest.files.push_back(index_of(folder, file));
      auto& slices = manifest.files.back().slices;
      std::erase_if(slices, [&](const auto& saved) { return !tensors.contains(saved.slice.name); });
      for (const auto& saved : slices) tensors.erase(saved.slice.name);
      if (!tensors.empty())
        throw Error(Blame::Caller,
                    "'" + file + "' does not have '" + *tensors.begin() + "', which it names");
    }
  });
  if (failure) throw failure->within("the index '" + path + "' cannot be loaded");
  return manifest;
}

struct Files {
  std::string folder;
  Manifest manifest;
};

Files files_at(const std::string& path) {
  const std::filesystem::path named(path);
  const std::string parent = named.has_parent_path() ? named.parent_path().string() : ".";
  if (!is_folder(path)) {
    const std::string name = named.filename();
    if (name.ends_with(".json")) return {parent, of_index(parent, name)};
    return {parent, {.files = {index_of(parent, name)}}};
  }
  if (is_file(path + "/" + kIndex)) return {path, of_index(path, kIndex)};
  if (is_file(path + "/" + kOnlyFile)) return {path, {.files = {index_of(path, kOnlyFile)}}};
  Found found = find(path);
  return {path + found.below, std::move(found.manifest)};
}

// --- what the module needs of them

using Tensors = std::map<std::string, SavedTensor>;

// A parameter or buffer, and the tensor of the files that becomes its value.
struct Target {
  std::string name;
  at::Tensor tensor;
  const SavedTensor* saved = nullptr;
  std::int64_t first = 0;  // the row of `saved` at which `tensor` begins
};

std::string listed(const std::string& what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = "; " + what + ": ";
  for (std::size_t i = 0; i < std::min(names.size(), kMostNames); ++i)
    text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kMostNames)
    text += " and " + std::to_string(names.size() - kMostNames) + " more";
  return text;
}

class Match {
 public:
  Match(torch::nn::Module& module, const Tensors& tensors, const SafetensorsOptions& options)
      : tensors_(tensors), options_(options), rows_(Part(kPart, module), kPart) {
    require_values(module, kPart);
    for (const auto& item : module.named_parameters()) add(item.key(), item.value());
    for (const auto& item : module.named_buffers()) {
      if (item.value().defined()) add(item.key(), item.value());
    }
    if (!options.use_all) return;
    for (const auto& [name, tensor] : tensors) {
      if (!used_.contains(name)) others_.push_back(in_quotes(name));
    }
  }

  // Throws Caller unless all names, shapes and dtypes fit.
  std::vector<Target> targets() && {
    std::vector<std::string> missing;
    for (const auto& [name, tensor] : missing_) {
      if (!found_.contains(tensor.unsafeGetTensorImpl())) missing.push_back(in_quotes(name));
    }
    if (missing.empty() && others_.empty() && misfits_.empty()) return std::move(targets_);
    const std::string text = listed("the files do not have", missing) +
                             listed("the module does not have", others_) +
                             listed("these differ", misfits_);
    throw Error(Blame::Caller, text.substr(2) +
                                   ". SafetensorsOptions::name_in_file maps names, "
                                   "and use_all = false leaves tensors out");
  }

 private:
  static constexpr const char* kPart = "module";

  void add(const std::string& name, const at::Tensor& tensor) {
    const std::string in_file = options_.name_in_file ? options_.name_in_file(name) : name;
    if (in_file.empty()) {
      found_.insert(tensor.unsafeGetTensorImpl());
      return;
    }
    const auto saved = tensors_.find(in_file);
    if (saved == tensors_.end()) {
      missing_.emplace_back(name, tensor);
      return;
    }
    used_.insert(in_file);
    found_.insert(tensor.unsafeGetTensorImpl());
    const OwnRows* const own = rows_.of(std::string(kPart) + "." + step_names(name));
    const at::IntArrayRef sizes = own != nullptr ? own->sizes : tensor.sizes();
    const bool converts =
        at::isFloatingType(saved->second.dtype) && at::isFloatingType(tensor.scalar_type());
    if (sizes != at::IntArrayRef(saved->second.shape) ||
        (saved->second.dtype != tensor.scalar_type() && !converts)) {
      misfits_.push_back(in_quotes(name) + " (" +
                         form_of(saved->second.dtype, saved->second.shape) + " in the file, " +
                         form_of(tensor.scalar_type(), sizes) + " here)");
      return;
    }
    targets_.push_back({name, tensor, &saved->second, own != nullptr ? own->rows.first : 0});
  }

  // The names follow the rules for the names of a part's values.
  static std::string step_names(const std::string& name) {
    std::string steps;
    for (std::size_t from = 0; from <= name.size();) {
      const std::size_t dot = std::min(name.find('.', from), name.size());
      steps += (from == 0 ? "" : ".") + step_of(name.substr(from, dot - from));
      from = dot + 1;
    }
    return steps;
  }

  const Tensors& tensors_;
  const SafetensorsOptions& options_;
  const PartRows rows_;
  std::vector<Target> targets_;
  std::vector<std::pair<std::string, at::Tensor>> missing_;
  std::set<std::string> used_;   // names in the files
  std::set<const void*> found_;  // tensors of the module
  std::vector<std::string> others_, misfits_;
};

void read_into(const std::string& folder, const Target& target, bool is_shared) {
  const c10::AutoGradMode no_grad(false);
  if (target.tensor.numel() == 0) return;
  const at::Tensor memory = paged_tensor(target.tensor.sizes(), target.saved->dtype);
  std::vector<SliceRead> reads;
  add_reads(*target.saved, memory, target.first, is_shared, reads);
  read_slices(folder, std::move(reads));
  target.tensor.copy_(memory);
}

void load_on_all(const std::string& path, ProcessGroup& group, torch::nn::Module& module,
                 const SafetensorsOptions& options) {
  Files files;
  group::agree(group, error_of([&] {
                 if (group.rank() == 0) files = files_at(path);
               }));
  share_manifest(files.folder, files.manifest, group);
  const std::string here = "on rank " + std::to_string(group.rank());
  Tensors tensors;
  std::vector<Target> targets;
  auto failure = error_of([&] {
    tensors = tensors_of(files.manifest);
    targets = Match(module, tensors, options).targets();
  });
  if (failure)
    failure = failure->within("'" + path + "' does not fit the module " + here +
                              ", and nothing was loaded");
  group::agree(group, failure);
  failure = error_of([&] {
    for (const Target& target : targets) read_into(files.folder, target, group.size() > 1);
  });
  if (failure)
    failure = failure->within("'" + path + "' cannot be read " + here +
                              ", and the module has a part of its values");
  group::agree(group, failure);
}

}  // namespace

void load_safetensors(const std::string& path, ProcessGroup group, torch::nn::Module& module,
                      const SafetensorsOptions& options) {
  on_all("checkpoint::load_safetensors", group, [&] { load_on_all(path, group, module, options); });
}

}  // namespace weft::checkpoint
