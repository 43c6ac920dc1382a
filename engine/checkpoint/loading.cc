// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <optional>
#include <set>

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/checkpoint/checkpoint_parts.h>
#include <weft/engine/checkpoint/folder.h>
#include <weft/engine/checkpoint/host_memory.h>
#include <weft/engine/checkpoint/loading.h>
#include <weft/engine/checkpoint/part_contents.h>
#include <weft/engine/checkpoint/part_staging.h>
#include <weft/engine/checkpoint/part_values.h>
#include <weft/engine/checkpoint/saving_thread.h>
#include <weft/engine/checkpoint/slice_reads.h>
#include <weft/engine/ddp/model_state.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/group/objects.h>

namespace weft::checkpoint {

namespace {

using Tensors = std::map<std::string, SavedTensor>;
using Values = std::map<std::string, Value>;

std::string quoted_names(const Manifest& manifest, const Tensors& tensors) {
  std::set<std::string> names;
  for (const auto& [name, kind] : manifest.parts) names.insert(name);
  for (const auto& [name, tensor] : tensors) {
    if (manifest.parts.empty()) names.insert(name.substr(0, name.find('.')));
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "'" : ", '") + name + "'";
  return text.empty() ? "no parts" : text;
}

constexpr std::ptrdiff_t kMostLevels = 1000;
// Values of so many bytes are read to their place.
constexpr std::size_t kInPlace = 64 << 10;

class Load {
 public:
  // `rank`, of `ranks` that load. `device`: for tensors that have no memory yet.
  Load(const std::string& folder, const Manifest& manifest, int rank, int ranks, c10::Device device)
      : folder_(folder),
        manifest_(manifest),
        tensors_(tensors_of(manifest)),
        rank_(rank),
        ranks_(ranks),
        device_(device) {}

  // Throws Caller if the checkpoint does not have the parts; makes memory for their values.
  void request(const std::vector<Part>& parts) {
    for (const Part& part : parts) {
      check_ranks(part);
      if (Contents::is_per_rank(part) && manifest_.ranks > 0 && rank_ >= manifest_.ranks) continue;
      check_presence(part);
      const auto failure = group::error_of([&] { request(part); });
      if (failure) throw failure->within("part '" + part.name() + "'");
      present_.push_back(part);
    }
  }

  // The names of the values that are read to their place.
  std::string names_in_place() const {
    std::string names;
    for (const SliceRead& one : in_place_) names += one.saved->slice.name + "\n";
    return names;
  }
  // All ranks read the same values to their place, so that they can take turns in comparing chunks:
  // a disk then reads them in order.
  void share_checks() { is_shared_ = true; }

  // Reads what needs memory of its own, and compares the rest, or a share, with its checksums.
  void read() {
    read_slices(folder_, std::move(reads_), static_cast<std::size_t>(rank_));
    const auto ranks = static_cast<std::uint64_t>(ranks_);
    open_ = check_slices(folder_, in_place_, [&](const SavedFile& file, std::uint64_t place) {
      const auto index = static_cast<std::uint64_t>(&file - manifest_.files.data());
      return !is_shared_ || (index + place / kChunk) % ranks == static_cast<std::uint64_t>(rank_);
    });
  }

  // Reads to their place what read() has compared on all ranks.
  void read_in_place() {
    read_slices(folder_, std::move(in_place_), static_cast<std::size_t>(rank_), std::move(open_));
  }

  // Compares what was read with the parts, and changes nothing.
  std::vector<Commit> stage() const {
    torch::serialize::OutputArchive written;
    for (const Part& part : present_) {
      const auto failure =
          group::error_of([&] { write_part(written, part, prefix_of(part, rank_), values_); });
      if (failure) throw failure->within("part '" + part.name() + "'");
    }
    torch::serialize::InputArchive archive;
    reopen(written, archive);
    return stage_parts(archive, present_, device_);
  }

 private:
  // Throws Caller if another number of ranks has saved the rows of shards, each its own: this
  // rank's rows are others.
  void check_ranks(const Part& part) const {
    const bool has_other_rows = Contents::is_per_rank(part) && manifest_.ranks > 0 &&
                                manifest_.ranks != ranks_ && has_shards(part);
    if (!has_other_rows) return;
    throw Error(
        Blame::Caller,
        "part '" + part.name() + "' is per_rank() and belongs to a sharded model, whose rows " +
            std::to_string(manifest_.ranks) + " ranks have saved and " + std::to_string(ranks_) +
            " load, where each has others; save the part without per_rank(), then any "
            "number of ranks loads it");
  }

  // Throws Caller if the checkpoint does not have the part, or another kind of it.
  void check_presence(const Part& part) const {
    const auto has = std::ranges::find(manifest_.parts, part.name(),
                                       &std::pair<std::string, std::string>::first);
    const std::string prefix = prefix_of(part, rank_);
    const bool is_there =
        has != manifest_.parts.end() || std::ranges::any_of(tensors_, [&](const auto& one) {
          return is_value_of(one.first, prefix);
        });
    if (!is_there) {
      throw Error(Blame::Caller, "part '" + part.name() +
                                     "': the checkpoint has no part of that name; it has " +
                                     quoted_names(manifest_, tensors_));
    }
    if (has == manifest_.parts.end()) return;
    const std::string here = check_names({part}).front();
    const auto kind_of = [&](const std::string& text) {
      const std::string kind = text.substr(part.name().size() + 4);  // behind "'NAME', "
      return kind.substr(0, kind.find(" ("));  // types of variables are compared later
    };
    const std::string in_file = has->second;
    if (kind_of(in_file) != kind_of(here)) {
      throw Error(Blame::Caller, "part '" + part.name() + "' is " + kind_of(in_file) +
                                     " in the checkpoint and " + kind_of(here) + " here");
    }
  }

  // Makes memory for the part's values and notes what to read into it.
  void request(const Part& part) {
    if (const auto* const module = std::get_if<torch::nn::Module*>(&Contents::of(part)))
      require_values(**module, part.name());
    const std::string prefix = prefix_of(part, rank_);
    const PartRows rows(part, prefix);
    const auto places = places_of(part);
    for (auto at = tensors_.lower_bound(prefix);
         at != tensors_.end() && at->first.starts_with(prefix); ++at) {
      const auto& [name, tensor] = *at;
      if (!is_needed(part, prefix, name, rank_)) continue;
      // Each dot is a level of the archive that the values are put into.
      if (std::ranges::count(name, '.') > kMostLevels)
        throw Error(Blame::Caller, "a name of the checkpoint has too many dots");
      std::vector<std::int64_t> shape = tensor.shape;
      const auto own = needed_rows(rows, prefix, name, tensor);
      if (own) shape.front() = own->count;
      // Rows that one rank has are read by that rank alone.
      const bool is_shared = !own && !Contents::is_per_rank(part) && ranks_ > 1;
      const auto place = places.find(name);
      const bool is_in_place =
          is_shared && place != places.end() && has_form(place->second, tensor.dtype, shape);
      const at::Tensor memory = is_in_place ? place->second : memory_for(name, shape, tensor.dtype);
      values_[name] = {name, memory, tensor.kind, Writer::First, {}};
      add_reads(tensor, memory, own ? own->first : 0, is_shared, is_in_place ? in_place_ : reads_);
    }
  }

  // The program's tensors on the host that can be read to where they are, by the names of values.
  // They get their values after stage(), so only the commit may read them.
  std::map<std::string, at::Tensor> places_of(const Part& part) const {
    std::map<std::string, at::Tensor> places;
    const auto& content = Contents::of(part);
    const bool has_tensors = !std::holds_alternative<detail::Archived>(content) &&
                             !std::holds_alternative<detail::Variable>(content) &&
                             !std::holds_alternative<detail::Numbers>(content) &&
                             sharded_optimizer_of(part) == nullptr;
    if (ranks_ == 1 || Contents::is_per_rank(part) || !has_tensors) return places;
    // State on the host of a parameter on a GPU is copied to it before this memory is read.
    const auto* const optimizer = std::get_if<torch::optim::Optimizer*>(&content);
    if (optimizer != nullptr && !is_on_host(**optimizer)) return places;
    std::vector<Value> values;
    // A part that cannot be saved has values without places.
    const auto failure = group::error_of([&] { values = values_of(part, rank_, ranks_); });
    if (failure) return places;
    for (const Value& value : values) {
      if (value.kind.empty() || value.kind == kRequiresGrad) places[value.name] = value.tensor;
    }
    return places;
  }

  static bool is_on_host(const torch::optim::Optimizer& optimizer) {
    return std::ranges::all_of(optimizer.param_groups(), [](const auto& group) {
      return std::ranges::all_of(group.params(), &at::Tensor::is_cpu);
    });
  }

  static bool has_form(const at::Tensor& place, c10::ScalarType dtype, at::IntArrayRef sizes) {
    return place.is_cpu() && place.scalar_type() == dtype && place.sizes() == sizes &&
           place.is_contiguous() && place.nbytes() >= kInPlace && !place.is_conj() &&
           !place.is_neg() && !place.is_inference();
  }

  at::Tensor memory_for(const std::string& name, at::IntArrayRef sizes,
                        c10::ScalarType dtype) const {
    at::Tensor memory;
    if (group::error_of([&] { memory = paged_tensor(sizes, dtype); })) {
      throw Error(Blame::Busy, "rank " + std::to_string(rank_) + " has no memory for '" + name +
                                   "' of the checkpoint");
    }
    return memory;
  }

  // The rows of the value that this rank has; nullopt if it has the whole value.
  static std::optional<shard::Rows> needed_rows(const PartRows& rows, const std::string& prefix,
                                                const std::string& name,
                                                const SavedTensor& tensor) {
    const OwnRows* const own = rows.of(name);
    if (own == nullptr || own->sizes.empty()) return std::nullopt;
    const std::vector<std::int64_t> sizes = sizes_in_file(*own, tensor.kind);
    if (tensor.shape == sizes) return own->rows;
    if (rows.is_state(name)) return std::nullopt;
    differs("parameter " + in_quotes(name.substr(prefix.size() + 1)),
            form_of(tensor.dtype, tensor.shape), form_of(own->dtype, sizes));
  }

  const std::string folder_;
  const Manifest& manifest_;
  const Tensors tensors_;
  const int rank_, ranks_;
  bool is_shared_ = false;  // the comparing of in_place_
  const c10::Device device_;
  std::vector<Part> present_;
  std::vector<SliceRead> reads_;     // to new memory
  std::vector<SliceRead> in_place_;  // to the program's tensors, once all ranks agree
  OpenFiles open_;                   // those of in_place_
  Values values_;
};

void warn_of_other_ranks(const Manifest& manifest, const ProcessGroup& group,
                         const std::vector<Part>& parts) {
  if (group.rank() != 0 || manifest.ranks == group.size() || manifest.ranks == 0) return;
  for (const Part& part : parts) {
    if (!Contents::is_per_rank(part)) continue;
    log::warn("checkpoint::load: part '" + part.name() + "' was saved by " +
              std::to_string(manifest.ranks) + " ranks, each its own, and " +
              std::to_string(group.size()) + " load it: " +
              (manifest.ranks < group.size() ? "the further ranks keep their values"
                                             : "the values of the further ranks are left out"));
  }
}

}  // namespace

std::vector<Commit> stage_folder(const std::string& folder, const Manifest& manifest,
                                 const std::vector<Part>& parts, int rank) {
  Load load(folder, manifest, rank, /*ranks=*/1, c10::Device(at::kCPU));
  const auto attempt = [&](const char* what, const std::function<void()>& call) {
    const auto failure = group::error_of(call);
    if (failure)
      throw failure->within("the checkpoint '" + folder + what + ", and nothing was loaded");
  };
  attempt("' does not fit", [&] { load.request(parts); });
  attempt("' cannot be read", [&] { load.read(); });
  std::vector<Commit> commits;
  attempt("' does not fit", [&] { commits = load.stage(); });
  return commits;
}

void share_manifest(std::string& folder, Manifest& manifest, ProcessGroup& group) {
  const int ranks = broadcast_object(manifest.ranks, 0, group);
  folder = broadcast_object(folder, 0, group);
  if (ranks == 0) manifest.ranks = 1;  // as parse_manifest() demands
  std::string text;                    // not of a name that is not UTF-8
  group::agree(group, group::error_of([&] {
                 if (group.rank() == 0) text = encode(manifest);
               }));
  text = broadcast_object(text, 0, group);
  group::agree(group, group::error_of([&] { manifest = parse_manifest(text); }));
  manifest.ranks = ranks;
}

void load_folder(const std::string& path, ProcessGroup& group, const std::vector<Part>& parts) {
  wait_for_saves(group);  // they remove older checkpoints
  Found found;
  group::agree(group, group::error_of([&] {
                 check_names(parts);
                 if (group.rank() == 0) found = find(path);
               }));
  share_manifest(found.below, found.manifest, group);
  const Manifest& manifest = found.manifest;
  const std::string folder = path + found.below;
  std::optional<Load> load;
  std::vector<Commit> commits;
  const std::string here = " on rank " + std::to_string(group.rank()) + ", and nothing was loaded";
  std::optional<Error> failure;
  const auto attempt = [&](const char* what, const std::function<void()>& call) {
    if (failure) return;
    failure = group::error_of(call);
    if (failure) failure = failure->within("the checkpoint '" + folder + what + here);
  };
  attempt("' does not fit", [&] {
    load.emplace(folder, manifest, group.rank(), group.size(), group.device());
    load->request(parts);
  });
  if (parallel::is_same_on_all(group, load ? load->names_in_place() : "")) {
    if (load) load->share_checks();
  }
  attempt("' cannot be read", [&] { load->read(); });
  attempt("' does not fit", [&] { commits = load->stage(); });
  group::agree(group, failure);
  failure = group::error_of([&] { load->read_in_place(); });
  load.reset();
  if (failure) {
    failure = failure->within("the checkpoint '" + folder + "' cannot be read again on rank " +
                              std::to_string(group.rank()) +
                              ", and the parts have some of its values; load another one");
  }
  group::agree(group, failure);
  for (const Commit& commit : commits) commit();
  warn_of_other_ranks(manifest, group, parts);
}

}  // namespace weft::checkpoint
