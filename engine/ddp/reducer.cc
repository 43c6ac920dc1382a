// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/ddp/reducer.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/collective_error.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/trace.h>

namespace weft::parallel {

namespace {

// Called by a backward through the outputs of a destroyed wrapper. Allows torch::autograd::grad():
// its results are local to this rank in any case.
void refuse_without_wrapper() {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted != nullptr && !wanted->empty()) return;
  throw Error(
      Blame::Caller,
      "this backward follows a forward of a DistributedDataParallel that has been destroyed, "
      "so its gradients would not be averaged; keep the DistributedDataParallel until the "
      "backward has ended (a local variable of a function is destroyed when the function "
      "returns, a temporary with its expression)");
}

// Compares the ranks' parameters now and then.
void look(ParameterCheck& check, const TrainedParameters& parameters, std::uint32_t step) {
  if (!check.is_due(step)) return;
  std::vector<ParameterCheck::Parameter> trained;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters.is_trained(i)) trained.push_back({parameters[i].name, parameters[i].tensor});
  }
  check.look(step, trained);
}

}  // namespace

std::shared_ptr<Reducer> Reducer::make(std::vector<ReducerParameter> parameters,
                                       DeviceGroups groups, std::uint32_t number,
                                       const DdpOptions& options) {
  std::shared_ptr<Reducer> reducer(
      new Reducer(std::move(parameters), std::move(groups), number, options));
  MutexLock lock(reducer->mutex_);
  reducer->follow_parameters();
  return reducer;
}

Reducer::Reducer(std::vector<ReducerParameter> parameters, DeviceGroups groups,
                 std::uint32_t number, const DdpOptions& options)
    : groups_(std::move(groups)),
      options_(options),
      parameters_(std::move(parameters), groups_.own()),
      hooks_(parameters_.size()),
      others_(parameters_),
      buckets_(parameters_, groups_, number, options_),
      pass_(parameters_, groups_, buckets_, forwards_, options_),
      check_(groups_.own(), number) {}

Reducer::~Reducer() {
  if (pass_.is_left_unfinished() && !backward_.is_reducing()) {
    log::warn(
        "DistributedDataParallel: the last backward before it was destroyed did not reduce all "
        "gradients; "
        "it brought none for " +
        parameters_.names_of(pass_.missing()) +
        ", and the other gradients are those of this rank alone");
  }
}

void Reducer::set_comm_hook(CommHook hook) {
  if (!hook) throw Error(Blame::Caller, "register_comm_hook: the hook is empty");
  refuse_within_hook("register_comm_hook");
  MutexLock lock(mutex_);
  if (buckets_.has_hook())
    throw Error(Blame::Caller,
                "register_comm_hook: this model has a hook already; it takes one, so do both works "
                "in one function");
  pass_.require_none("register_comm_hook");
  if (pass_.stats().passes > 0) {
    throw Error(Blame::Caller,
                "register_comm_hook: a backward has averaged gradients without it; register the "
                "hook once, before the first "
                "backward");
  }
  buckets_.set_hook([this, hook = std::move(hook)](GradBucket& bucket) WEFT_REQUIRES(mutex_) {
    hook_thread_ = std::this_thread::get_id();
    try {
      auto averages = hook(bucket);
      hook_thread_ = std::thread::id();
      return averages;
    } catch (...) {
      hook_thread_ = std::thread::id();
      pass_.failure().note(group::first_line_of(std::current_exception()).text());
      throw;
    }
  });
}

void Reducer::set_follower(BucketFollower* follower) {
  MutexLock lock(mutex_);
  if (follower != nullptr && pass_.follower() != nullptr) {
    throw Error(
        Blame::Caller,
        "overlap_with: another optimizer steps in the backward of this DistributedDataParallel");
  }
  if (follower != nullptr) pass_.require_none("overlap_with");
  pass_.set_follower(follower);
}

bool Reducer::has_follower() const {
  MutexLock lock(mutex_);
  return pass_.follower() != nullptr;
}

void Reducer::begin_forward() {
  refuse_within_hook("a forward of the DistributedDataParallel");
  MutexLock lock(mutex_);
  auto* const follower = pass_.follower();
  if (follower != nullptr && !pass_.is_open()) follower->before_forward();
  follow_parameters();
  const bool is_outside =
      autograd::Pass::current() == nullptr && torch::autograd::get_current_graph_task_id() < 0;
  // The last backward has ended, perhaps by an exception.
  if (is_outside && !pass_.is_open()) backward_.abandon();
}

bool Reducer::trains_others() const {
  MutexLock lock(mutex_);
  const std::vector<bool> now = parameters_.trained_now();
  if (std::find(now.begin(), now.end(), true) == now.end()) return false;
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (now[i] != parameters_.is_trained(i) ||
        (parameters_.was_ever_trained(i) && !buckets_.hold(i)))
      return true;
  }
  return false;
}

void Reducer::take_over_trained() {
  MutexLock lock(mutex_);
  pass_.compare_trained();
}

void Reducer::set_divisor(int ranks) {
  MutexLock lock(mutex_);
  buckets_.set_divisor(ranks);
}

void Reducer::prepare_forward() {
  trace::step(group().rank());
  MutexLock lock(mutex_);
  if (pass_.drop_failed()) backward_.end();
  pass_.prepare(backward_.is_reducing());
}

void Reducer::end_forward(const std::vector<at::Tensor>& outputs, bool trains) {
  MutexLock lock(mutex_);
  const auto forward = std::make_shared<Forward>();
  forward->synchronizes = forwards_.are_synchronizing();
  bool is_visible = false;
  // A backward pass computes the gradient of its output first, even if no parameter gets a
  // gradient.
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad() || output.is_leaf()) continue;
    is_visible = true;
    output.register_hook([weak = weak_from_this(), forward](const at::Tensor&) {
      if (const auto self = weak.lock()) return self->on_backward_start(*forward);
      if (forward->synchronizes) refuse_without_wrapper();
    });
  }
  if (!is_visible) return forwards_.add_hidden();
  if (pass_.static_graph().finds_unused()) forward->unused = hooks_.unreachable_from(outputs);
  forwards_.add(forward);
  if (!forward->synchronizes || !trains) return;
  forwards_.count(*forward, true);
  look(check_, parameters_, forwards_.steps());
}

bool Reducer::is_synchronizing() const {
  refuse_within_hook("no_sync");
  MutexLock lock(mutex_);
  return forwards_.are_synchronizing();
}

void Reducer::set_synchronizing(bool on) {
  MutexLock lock(mutex_);
  forwards_.set_synchronizing(on);
}

// Hooks the accumulators that parameters have got meanwhile. Throws if a parameter's type, device
// or shape is no longer that of its place in the bucket.
void Reducer::follow_parameters() {
  parameters_.note_trained();
  std::vector<std::size_t> changed;
  std::vector<std::size_t> moved;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    if (buckets_.hold(i) && !parameters_.keeps_layout(i)) {
      changed.push_back(i);
    } else if (tensor.requires_grad() && !hooks_.is_attached(i, tensor)) {
      moved.push_back(i);
    }
  }
  if (!changed.empty()) {
    throw Error(Blame::Caller,
                "the type, the device or the shape of " + parameters_.names_of(changed) +
                    " has changed since DistributedDataParallel was made, and gradients would not "
                    "be averaged; call module->to(…) first, then make the DistributedDataParallel");
  }
  if (moved.empty()) return;
  hooks_.drop_former();
  for (const std::size_t parameter : moved) {
    hooks_.attach(parameter, parameters_[parameter].tensor, [weak = weak_from_this(), parameter] {
      if (const auto self = weak.lock()) self->on_gradient(parameter);
    });
  }
}

// Called for every gradient of a backward. At the first one the reducer learns that the backward
// runs and registers a callback for its end. The callback belongs to the graph task that runs at
// this moment, and is destroyed with it if an exception ends it. If outputs could be hooked, that
// is the user's own backward; otherwise the first parameter's gradient registers it, perhaps inside
// a re-entrant backward.
void Reducer::enter_backward() {
  if (pass_.drop_failed()) backward_.end();
  if (backward_.is_known()) return;
  pass_.enter_backward(backward_.is_reducing());
  const auto callback = [weak = weak_from_this(), task = backward_.begin()] {
    if (const auto self = weak.lock()) self->end_backward();
  };
  if (auto* const pass = autograd::Pass::current()) return pass->local().at_end(callback);
  torch::autograd::Engine::get_default_engine().queue_callback(callback);
}

// Called by the first gradient of an output of `forward`.
void Reducer::on_backward_start(Forward& forward) {
  const c10::AutoGradMode no_grad(false);
  MutexLock lock(mutex_);
  if (!hooks_.are_reached()) {
    // torch::autograd::grad(). A backward that has run before it has made this forward a step.
    if (!forward.had_backward) forwards_.count(forward, false);
    return;
  }
  enter_backward();
  forward.had_backward = true;
  if (forward.synchronizes) {
    forwards_.count(forward, true);
    synchronize();
  } else if (backward_.kind() == Kind::Unknown) {
    backward_.set_kind(Kind::Local);
  }
}

// From here on this backward's gradients are reduced, and so are those that it brought before it
// reached the outputs of a forward that synchronises.
void Reducer::synchronize() {
  if (backward_.kind() == Kind::Synchronized) return;
  pass_.begin();
  backward_.set_kind(Kind::Synchronized);
  if (!pass_.static_graph().counts()) pass_.fill_unused();
  for (const auto& [parameter, stream] : backward_.take_early()) {
    if (stream) wait_for(*stream);
    others_.note_averaged();
    pass_.take(parameter);
  }
}

// Called when parameter.grad() has the gradient, perhaps added to an earlier one.
void Reducer::on_gradient(std::size_t parameter) {
  if (is_inside_a_pass()) {
    MutexLock lock(mutex_);
    throw Error(
        Blame::Caller,
        "a node calls backward() inside of a distributed backward, and brings a gradient for " +
            parameters_.names_of({parameter}) +
            ", which would not be averaged; call torch::autograd::grad() there, and return "
            "its results");
  }
  const bool creates_graph = c10::GradMode::is_enabled();
  const c10::AutoGradMode no_grad(false);
  MutexLock lock(mutex_);
  if (gradient_of(parameters_[parameter].tensor).defined()) pass_.usage().note(parameter);
  enter_backward();
  // Gradients of a backward of no known forward are averaged, too, if there was a forward without
  // visible outputs, or a forward that synchronises has had no backward, or an earlier backward has
  // brought a part of this pass's gradients.
  const bool is_awaited =
      backward_.kind() == Kind::Unknown &&
      (pass_.is_open() || forwards_.have_synchronizing_hidden() || forwards_.await_backward());
  if (is_awaited && !pass_.has_failed()) {
    // No output's hook has counted this step.
    if (!pass_.is_open() && forwards_.have_synchronizing_hidden()) forwards_.count_hidden();
    synchronize();
  }
  if (backward_.kind() != Kind::Synchronized) return keep_local(parameter);
  if (creates_graph) {
    throw Error(Blame::Caller,
                "backward(create_graph = true) brings a gradient for " +
                    parameters_.names_of({parameter}) +
                    ", whose average has no graph: a backward through it would not be averaged. "
                    "Call torch::autograd::grad(…, create_graph = true) for gradients that the "
                    "loss contains, and backward without create_graph");
  }
  others_.require_alone(parameter, backward_.context_pass());
  others_.note_averaged();
  pass_.take(parameter);
}

// Notes a gradient of a backward under no_sync(), of one without a forward of this wrapper, or of
// one that is not known to synchronise yet.
void Reducer::keep_local(std::size_t parameter) {
  if (pass_.has_failed()) return;  // later backwards belong to another wrapper of the model
  if (pass_.is_open() && buckets_.is_filled(parameter)) {
    throw Error(
        Blame::Caller,
        "the last backward did not reduce all gradients: it brought none for " +
            parameters_.names_of(pass_.missing()) +
            ". If outputs need not depend on every parameter, set "
            "DdpOptions::find_unused_parameters; else call backward for all losses of a forward "
            "before others (noticed when a backward under no_sync reached " +
            parameters_.names_of({parameter}) + ")");
  }
  backward_.note_early(parameter, parameters_[parameter].tensor.device());
  const bool is_explained =
      backward_.kind() == Kind::Local || !forwards_.are_synchronizing() || forwards_.have_hidden();
  if (!is_explained && !warned_of_direct_) backward_.note_direct(parameter);
}

// Called when the backward has run to its end.
void Reducer::end_backward() {
  const c10::AutoGradMode no_grad(false);
  std::optional<RunningBackward::Direct> direct;
  {
    MutexLock lock(mutex_);
    const Kind kind = backward_.end();
    direct = backward_.take_direct();
    if (kind == Kind::Synchronized) direct.reset();
    if (kind == Kind::Synchronized && pass_.is_open()) pass_.finish();
  }
  if (!direct || others_.average(direct->parameter, direct->graph_task)) return;
  {
    MutexLock lock(mutex_);
    if (std::exchange(warned_of_direct_, true)) return;
  }
  log::warn(
      "DistributedDataParallel: a backward brings gradients of the module without a forward of "
      "this wrapper, which does not average them; the ranks' parameters will differ. Call the "
      "DistributedDataParallel in place of its module, or use no_sync() if gradients are to stay "
      "local");
}

void Reducer::mirror_pass() {
  const c10::AutoGradMode no_grad(false);
  MutexLock lock(mutex_);
  pass_.mirror();
}

// Its callers keep the members from changing.
WEFT_UNCHECKED_LOCKING std::vector<at::Tensor> Reducer::averaged_parameters() const {
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (buckets_.hold(i)) tensors.push_back(parameters_[i].tensor);
  }
  return tensors;
}

// A communication hook, which runs under the mutex, may ask for them.
WEFT_UNCHECKED_LOCKING DdpStats Reducer::stats() const { return pass_.stats(); }

// A call of a communication hook would wait for ever for the mutex under which the hook runs.
void Reducer::refuse_within_hook(const char* call) const {
  if (hook_thread_.load() != std::this_thread::get_id()) return;
  throw Error(Blame::Caller, std::string(call) +
                                 ": a communication hook calls it during the backward; call it "
                                 "before the forward");
}

}  // namespace weft::parallel
