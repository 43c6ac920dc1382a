// SPDX-License-Identifier: Apache-2.0
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <weft/engine/ddp/ddp.h>
#include <weft/engine/ddp/device_groups.h>
#include <weft/engine/ddp/model_state.h>
#include <weft/engine/ddp/reducer.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/tensor/shard_mark.h>

namespace weft::parallel {

struct Replica::State {
  std::shared_ptr<torch::nn::Module> module;
  DeviceGroups groups;
  std::uint32_t number = 0;  // of this model within its group; see transport::Training
  DdpOptions options;
  std::shared_ptr<Reducer> reducer;
  std::vector<const void*> parameters;  // the module's, when it was wrapped

  std::vector<at::Tensor> buffers() const {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& buffer : module->buffers()) {
      if (buffer.defined() && buffer.numel() > 0) tensors.push_back(buffer);
    }
    return tensors;
  }

  std::vector<at::Tensor> all_values() const {
    std::vector<at::Tensor> tensors = module->parameters();
    const auto more = buffers();
    tensors.insert(tensors.end(), more.begin(), more.end());
    return tensors;
  }

  void require_same_module() const {
    const std::vector<at::Tensor> now = module->parameters();
    const bool is_same = std::equal(now.begin(), now.end(), parameters.begin(), parameters.end(),
                                    [](const at::Tensor& tensor, const void* before) {
                                      return tensor.unsafeGetTensorImpl() == before;
                                    });
    if (!is_same) throw changed_module();
  }

  Error changed_module() const {
    const std::unordered_set<const void*> before(parameters.begin(), parameters.end());
    const auto now = module->named_parameters();
    std::string added;
    for (const auto& item : now) {
      if (!before.contains(item.value().unsafeGetTensorImpl()))
        added += (added.empty() ? "" : ", ") + item.key();
    }
    const std::string changes = !added.empty()
                                    ? added + " added"
                                    : "there were " + std::to_string(parameters.size()) +
                                          ", now there are " + std::to_string(now.size());
    return {Blame::Caller,
            "DistributedDataParallel: the module's parameters are not those that it had when it "
            "was wrapped (" +
                changes +
                "), and gradients would not be averaged; make a new DistributedDataParallel after "
                "a change of the module"};
  }

  // Writes buffers unseen by autograd, as a batch norm's own updates are: the backward of an
  // earlier forward may still run.
  void sync_buffers(int root) {
    const at::AutoDispatchBelowADInplaceOrView untracked;
    const group::CalledBy by("DistributedDataParallel's buffers");
    if (!options.broadcast_buffers) return;
    try {
      broadcast_values(groups, buffers(), root, number);
    } catch (const Error& error) {
      throw explained_by_changes(groups.own(), error);
    }
  }
};

namespace {

// The parameters whose modules declare sparse gradients.
std::unordered_set<const void*> sparse_parameters(const torch::nn::Module& module) {
  std::unordered_set<const void*> found;
  for (const auto& part : module.modules(/*include_self=*/true)) {
    if (const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(part.get())) {
      if (embedding->options.sparse()) found.insert(embedding->weight.unsafeGetTensorImpl());
    } else if (const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(part.get())) {
      if (bag->options.sparse()) found.insert(bag->weight.unsafeGetTensorImpl());
    }
  }
  return found;
}

void require_copies(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    if (!is_shard(item.value())) continue;
    throw Error(Blame::Caller,
                "DistributedDataParallel: parameter '" + item.key() +
                    "' is sharded, and each rank has other rows of it; call the model through its "
                    "FullyShardedDataParallel, which averages gradients itself");
  }
}

std::vector<NamedTensor> named_values(const torch::nn::Module& module,
                                      const std::unordered_set<const void*>& sparse) {
  std::vector<NamedTensor> named;
  std::unordered_map<const void*, std::string> first;
  for (const auto& item : module.named_parameters()) {
    const bool is_sparse = sparse.contains(item.value().unsafeGetTensorImpl());
    const auto [same, is_new] = first.emplace(item.value().unsafeGetTensorImpl(), item.key());
    const std::string kind = !is_new                         ? " (the same as " + same->second + ")"
                             : !item.value().requires_grad() ? " (frozen)"
                             : is_sparse                     ? " (sparse gradient)"
                                                             : "";
    named.push_back({item.key() + kind, item.value()});
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) named.push_back({item.key(), item.value()});
  }
  return named;
}

// The options that decide which collectives a rank takes part in and how large these are, one line
// each.
std::string agreed(const DdpOptions& options) {
  std::ostringstream text;
  text << std::boolalpha << "DdpOptions::bucket_bytes " << options.bucket_bytes
       << "\nDdpOptions::first_bucket_bytes " << options.first_bucket_bytes
       << "\nDdpOptions::find_unused_parameters " << options.find_unused_parameters
       << "\nDdpOptions::static_graph " << options.static_graph
       << "\nDdpOptions::broadcast_buffers " << options.broadcast_buffers << "\n";
  return text.str();
}

}  // namespace

Replica::Replica(const std::shared_ptr<torch::nn::Module>& module, ProcessGroup group,
                 const DdpOptions& options)
    : state_(std::make_unique<State>()) {
  if (!module) throw Error(Blame::Caller, "DistributedDataParallel: the module is empty");
  require_copies(*module);
  state_->module = module;
  state_->options = options;
  const auto sparse = sparse_parameters(*module);
  on_all_ranks(group, "DistributedDataParallel", "its constructor", [&] {
    check_same_model(group, named_values(*module, sparse), agreed(options));
    state_->number =
        static_cast<std::uint32_t>(group::next_number(group, "DistributedDataParallel"));
    state_->groups = DeviceGroups(group, state_->all_values());
    broadcast_values(state_->groups, state_->all_values(), 0, state_->number);
  });

  std::unordered_set<const void*> seen;  // counts a weight that two modules share once
  std::vector<ReducerParameter> parameters;
  bool requires_any = false;
  for (const auto& item : module->named_parameters()) {
    const at::Tensor& tensor = item.value();
    state_->parameters.push_back(tensor.unsafeGetTensorImpl());
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    requires_any |= tensor.requires_grad();
    parameters.push_back({item.key(), tensor, sparse.contains(tensor.unsafeGetTensorImpl())});
  }
  if (!requires_any) {
    throw Error(Blame::Caller,
                "DistributedDataParallel: no parameter of the module requires a gradient; there is "
                "nothing to reduce");
  }
  state_->reducer = Reducer::make(std::move(parameters), state_->groups, state_->number, options);
}

Replica::~Replica() = default;
Replica::Replica(Replica&&) noexcept = default;
Replica& Replica::operator=(Replica&&) noexcept = default;

Replica::State& Replica::state() const {
  if (!state_)
    throw Error(Blame::Caller, "this DistributedDataParallel is empty: it was moved from");
  return *state_;
}

void Replica::before_forward() {
  State& own = state();
  if (!c10::GradMode::is_enabled()) return;  // no backward will follow
  own.require_same_module();
  if (join_scope_ != nullptr) join_scope_->announce_step(*this, is_synchronizing());
  own.reducer->begin_forward();
  own.reducer->set_divisor(join_scope_ != nullptr ? join_scope_->divisor()
                                                  : own.groups.own().size());
  if (!is_synchronizing()) return;
  follow_frozen();
  own.reducer->prepare_forward();
  if (trains()) own.sync_buffers(join_scope_ != nullptr ? join_scope_->first_active_rank() : 0);
}

// Parameters may be frozen and thawed between forwards, on all ranks alike; the ranks compare it
// when it happens. While all are frozen there are no gradients, so there is nothing to compare (a
// discriminator in its generator's step).
void Replica::follow_frozen() {
  if (!state().reducer->trains_others()) return;
  if (join_scope_ != nullptr) {
    throw Error(Blame::Caller,
                "join: requires_grad of a parameter was changed, which ranks that have run out "
                "cannot follow; freeze and thaw "
                "parameters outside of join");
  }
  state().reducer->take_over_trained();
}

void Replica::after_forward(const std::vector<at::Tensor>& outputs) {
  if (c10::GradMode::is_enabled()) state().reducer->end_forward(outputs, trains());
}

bool Replica::tracks_outputs() { return c10::GradMode::is_enabled(); }

bool Replica::is_synchronizing() const { return state().reducer->is_synchronizing(); }

Replica::NoSync Replica::no_sync(bool on) { return {state().reducer, on}; }

void Replica::register_comm_hook(CommHook hook) { state().reducer->set_comm_hook(std::move(hook)); }

DdpStats Replica::stats() const { return state().reducer->stats(); }

ProcessGroup& Replica::join_group() { return state().groups.own(); }

void Replica::check_join() const {
  if (!state().reducer->has_follower()) return;
  throw Error(Blame::Caller,
              "join: an optimizer steps in the backward of this DistributedDataParallel, which a "
              "rank that has run out does "
              "not have; leave out overlap_with");
}

const std::shared_ptr<Reducer>& Replica::reducer() const { return state().reducer; }

bool Replica::trains() const { return state().module->is_training(); }

void Replica::mirror_step(const detail::JoinStep& step) {
  if (!step.synchronizes) return;
  if (step.trains) state().sync_buffers(step.first_rank);
  state().reducer->set_divisor(join_scope_->divisor());
  state().reducer->mirror_pass();
}

void Replica::take_over(int last_rank) {
  broadcast_values(state().groups, state().all_values(), last_rank, state().number);
}

}  // namespace weft::parallel
