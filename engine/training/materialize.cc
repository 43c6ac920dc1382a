// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/meta_tensors.h>
#include <weft/engine/shard/unit.h>
#include <weft/engine/shard/unit_choice.h>
#include <weft/engine/training/generators.h>
#include <weft/engine/training/layers.h>
#include <weft/engine/training/materialize.h>

namespace weft {

namespace training {
namespace {

using torch::nn::Module;

// A parameter or buffer of one of a layer's modules.
struct Entry {
  // The tensor that the module's member refers to: of a sharded parameter the shell.
  const at::Tensor& member() const {
    return owner.unit ? owner.unit->parameters()[owner.parameter].whole : tensor;
  }
  at::ScalarType dtype() const {
    return owner.unit ? owner.unit->parameters()[owner.parameter].dtype : tensor.scalar_type();
  }

  Module* module = nullptr;
  std::string key, name;  // in the module, and in the model
  at::Tensor tensor;      // in the module's parameters() or buffers()
  shard::Owner owner;     // of a sharded parameter
  bool is_new = false;    // it was on meta when it was listed
};

std::vector<Entry> entries_of(const Layer& layer) {
  std::vector<Entry> entries;
  const auto add = [&](Module& module, const auto& items) {
    std::string path = layer.name.empty() ? "" : layer.name + ".";
    if (&module != layer.modules.back()) path += "out_proj.";
    for (const auto& item : items) {
      const at::Tensor& tensor = item.value();
      if (!tensor.defined()) continue;
      entries.push_back({&module, item.key(), path + item.key(), tensor, shard::owner_of(tensor),
                         tensor.is_meta()});
    }
  };
  for (Module* const module : layer.modules) {
    add(*module, module->named_parameters(/*recurse=*/false));
    add(*module, module->named_buffers(/*recurse=*/false));
  }
  return entries;
}

bool needs_values(const Layer& layer) {
  return std::ranges::any_of(entries_of(layer), &Entry::is_new);
}

// Memory that knows whether it was written.
class MarkedMemory {
 public:
  MarkedMemory(std::size_t bytes, c10::Device device)
      : bytes_(at::empty({static_cast<std::int64_t>(bytes)},
                         at::TensorOptions(at::kByte).device(device))) {
    mark().fill_(kMark);
  }
  const c10::Storage& storage() const { return bytes_.storage(); }
  bool is_written() const { return bytes_.numel() == 0 || !mark().eq(kMark).all().item<bool>(); }

 private:
  static constexpr int kMark = 0xA5;  // a value whose bytes are all this is none that is in use
  at::Tensor mark() const {
    return bytes_.narrow(0, 0, std::min<std::int64_t>(bytes_.numel(), 4096));
  }
  const at::Tensor bytes_;
};

// While it lives, the members of a layer have memory of their own, whole: those that are on meta
// memory on `device` for values to come, if there is a device. The others have memory that is
// thrown away, so that they keep their values. The module's parameters() are the members.
class Scratch {
 public:
  Scratch(std::vector<Entry> entries, std::optional<c10::Device> device)
      : entries_(std::move(entries)) {
    for (const Entry& entry : entries_) {
      const at::Tensor& member = entry.member();
      if ((entry.is_new && !device) || lent_.contains(key_of(entry))) continue;
      const std::size_t bytes = shard::storage_bytes(member, entry.dtype());
      MarkedMemory memory(bytes, entry.is_new ? *device : member.device());
      lent_.emplace(key_of(entry), Lent{member.storage(), member.scalar_type(), memory});
      shard::put_into(member, memory.storage(), entry.dtype());
      if (!entry.is_new) member.zero_();
    }
    for (const Entry& entry : entries_) {
      if (entry.owner.unit) shard::parameter_entry(*entry.module, entry.key) = entry.member();
    }
  }
  ~Scratch() { give_back(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // The members that were on meta and have been written keep their values.
  void keep() {
    const auto lent = give_back();
    for (const Entry& entry : entries_) {
      if (!entry.tensor.is_meta()) continue;  // also if an entry before is the same tensor
      const MarkedMemory& memory = lent.at(key_of(entry)).memory;
      if (!memory.is_written()) continue;
      const c10::Storage& storage = memory.storage();
      if (!entry.owner.unit) {
        shard::put_into(entry.tensor, storage, entry.dtype());
        continue;
      }
      const auto options = at::TensorOptions(entry.dtype()).device(storage.device());
      const shard::UnitParameter& sharded = entry.owner.unit->parameters()[entry.owner.parameter];
      entry.owner.unit->give_values(
          entry.owner.parameter,
          at::empty({0}, options).set_(storage, 0, sharded.sizes, sharded.strides));
    }
  }

 private:
  struct Lent {
    c10::Storage before;
    at::ScalarType dtype;
    MarkedMemory memory;
  };
  using Lents = std::unordered_map<const void*, Lent>;  // by the member

  static const void* key_of(const Entry& entry) { return entry.member().unsafeGetTensorImpl(); }

  Lents give_back() {
    for (const Entry& entry : entries_) {
      const auto found = lent_.find(key_of(entry));
      if (found != lent_.end())
        shard::put_into(entry.member(), found->second.before, found->second.dtype);
      if (entry.owner.unit) shard::parameter_entry(*entry.module, entry.key) = entry.tensor;
    }
    return std::exchange(lent_, {});
  }

  const std::vector<Entry> entries_;
  Lents lent_;
};

std::string text_of(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "'" : ", '") + name + "'";
  return text;
}

[[noreturn]] void throw_unwritten(const std::vector<std::string>& names, bool has_init) {
  const std::string why =
      has_init ? ": neither their modules' reset_parameters(), which Weft knows of torch::nn's "
                 "layers only, nor `init` writes them; let `init` write to these members of their "
                 "modules"
               : ": Weft knows the reset_parameters() of torch::nn's layers only; pass an `init` "
                 "that writes to them: weft::materialize(model, seed, [](torch::nn::Module& "
                 "module) { … })";
  throw Error(Blame::Caller, "materialize: " + text_of(names) + " would stay without values" + why);
}

// Tensors that share memory would have separate memory afterwards.
void require_own_memory(const std::vector<Layer>& layers) {
  std::unordered_map<const void*, Entry> by_storage;
  for (const Layer& layer : layers) {
    for (const Entry& entry : entries_of(layer)) {
      if (!entry.is_new) continue;
      const void* const storage = entry.member().storage().unsafeGetStorageImpl();
      const auto [found, is_first] = by_storage.emplace(storage, entry);
      if (is_first || found->second.member().is_same(entry.member())) continue;
      throw Error(Blame::Caller, "materialize: '" + found->second.name + "' and '" + entry.name +
                                     "' are views of the same memory, which they would not share "
                                     "afterwards; register one tensor, and make the views in "
                                     "forward");
    }
  }
}

// Throws for tensors that have no values. A tensor that layers share is named once.
void require_values(const std::vector<Layer>& layers) {
  std::vector<std::string> names;
  std::unordered_set<const void*> seen;
  for (const Layer& layer : layers) {
    for (const Entry& entry : entries_of(layer)) {
      if (entry.is_new && seen.insert(entry.tensor.unsafeGetTensorImpl()).second)
        names.push_back(entry.name);
    }
  }
  if (!names.empty()) throw_unwritten(names, /*has_init=*/true);
}

// Finds out on meta, where nothing is computed, which tensors reset() would leave.
void require_known(const std::vector<Layer>& layers) {
  std::vector<Entry> all;
  std::unordered_set<const void*> written;
  for (const Layer& layer : layers) {
    const auto entries = entries_of(layer);
    const Scratch others(entries, std::nullopt);
    const RegisteredMembers members(layer);
    std::vector<std::uint32_t> versions;
    for (const Entry& entry : entries)
      versions.push_back(static_cast<std::uint32_t>(entry.member()._version()));
    reset(layer);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const at::Tensor& member = entries[i].member();
      if (static_cast<std::uint32_t>(member._version()) != versions[i] || member.numel() == 0)
        written.insert(member.unsafeGetTensorImpl());
      if (entries[i].is_new) all.push_back(entries[i]);
    }
  }
  std::vector<std::string> names;
  for (const Entry& entry : all) {
    if (written.insert(entry.member().unsafeGetTensorImpl()).second) names.push_back(entry.name);
  }
  if (!names.empty()) throw_unwritten(names, /*has_init=*/false);
}

// Notices writes to parameters that `init` must leave alone: those of the modules inside of one.
class OthersParameters {
 public:
  explicit OthersParameters(Module& module) {
    for (shard::ParameterPlace& place : shard::places_in(module)) {
      if (place.module == &module) continue;
      const shard::Owner owner = shard::owner_of(place.tensor);
      const at::Tensor member =
          owner.unit ? owner.unit->parameters()[owner.parameter].whole : place.tensor;
      parameters_.push_back({place.name, place.tensor, member, versions(place.tensor, member)});
    }
  }
  void require_unchanged() const {
    for (const Watched& watched : parameters_) {
      if (versions(watched.tensor, watched.member) == watched.version) continue;
      throw Error(Blame::Caller,
                  "materialize: `init` was called with a module and wrote to '" + watched.name +
                      "' of a module inside of it, which gets its values in a call of its own; "
                      "write to the module's own parameters only: "
                      "module.parameters(/*recurse=*/false)");
    }
  }

 private:
  struct Watched {
    std::string name;
    at::Tensor tensor, member;
    std::int64_t version;
  };
  static std::int64_t versions(const at::Tensor& tensor, const at::Tensor& member) {
    return static_cast<std::int64_t>(tensor._version()) +
           static_cast<std::int64_t>(member._version());
  }
  std::vector<Watched> parameters_;
};

class Materialization {
 public:
  Materialization(std::uint64_t seed, const std::function<void(Module&)>& init, c10::Device device)
      : seed_(seed), init_(init), device_(device) {}

  void give_values(const Layer& layer) const {
    Scratch scratch(entries_of(layer), device_);
    {
      // Ranks that are threads of one process share the generators.
      static Mutex mutex;
      MutexLock lock(mutex);
      const SeededGenerators seeded({device_}, seed_of(seed_, layer.name));
      const RegisteredMembers members(layer);
      reset(layer);
      for (auto module = layer.modules.rbegin(); init_ && module != layer.modules.rend(); ++module)
        call_init(**module);
    }
    scratch.keep();
  }

 private:
  void call_init(Module& module) const {
    const OthersParameters others(module);
    {
      const shard::WithoutChildren alone(module);
      init_(module);
    }
    others.require_unchanged();
  }

  const std::uint64_t seed_;
  const std::function<void(Module&)>& init_;
  const c10::Device device_;
};

}  // namespace
}  // namespace training

OnMeta::OnMeta() : before_(shard::is_making_on_meta()) {
  shard::install_meta_factories();
  shard::set_making_on_meta(true);
}

OnMeta::~OnMeta() { shard::set_making_on_meta(before_); }

void materialize(torch::nn::Module& model, std::uint64_t seed,
                 std::function<void(torch::nn::Module&)> init, c10::Device device) {
  if (device.is_meta())
    throw Error(Blame::Caller, "materialize: the device is meta, which has no memory for values");
  const shard::MakingAsUsual usual;
  const shard::WithoutHooks plain;
  const c10::AutoGradMode no_grad(false);
  auto layers = training::layers_in(model);
  std::erase_if(layers,
                [](const training::Layer& layer) { return !training::needs_values(layer); });
  training::require_own_memory(layers);
  if (!init) training::require_known(layers);
  const training::Materialization materialization(seed, init, device);
  for (const training::Layer& layer : layers) materialization.give_values(layer);
  training::require_values(layers);
}

}  // namespace weft
