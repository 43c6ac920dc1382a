#include <algorithm>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <weft/base/log.h>
#include <weft/engine/autograd/execution_context.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/ddp/reducer.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/trace.h>

namespace weft::parallel {

namespace traced {
namespace {
constinit trace::Name gradients{trace::Layer::Engine, "gradients"};  // the wait of the backward
}  // namespace
}  // namespace traced

namespace {

// Called by a backward through the outputs of a destroyed wrapper. Allows torch::autograd::grad():
// its results are local to this rank in any case.
void refuse_without_wrapper() {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted != nullptr && !wanted->empty()) return;
  throw Error(Blame::Caller,
              "this backward is of a forward of a DistributedDataParallel that has been destroyed, "
              "so its gradients would "
              "not be averaged; keep the DistributedDataParallel until the backward has ended (one "
              "that is made within "
              "an expression ends with it)");
}

}  // namespace

std::shared_ptr<Reducer> Reducer::make(std::vector<ReducerParameter> parameters,
                                       DeviceGroups groups, std::uint32_t number,
                                       const DdpOptions& options) {
  std::shared_ptr<Reducer> reducer(
      new Reducer(std::move(parameters), std::move(groups), number, options));
  for (std::size_t i = 0; i < reducer->parameters_.size(); ++i) {
    if (reducer->parameters_.is_trained(i)) reducer->attach(i);
  }
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
      unused_(parameters_, buckets_),
      static_graph_(options, parameters_),
      check_(groups_.own(), number),
      order_(options.static_graph || !options.find_unused_parameters) {}

void Reducer::attach(std::size_t parameter) {
  hooks_.attach(parameter, parameters_[parameter].tensor, [weak = weak_from_this(), parameter] {
    if (const auto self = weak.lock()) self->on_gradient(parameter);
  });
}

Reducer::~Reducer() {
  if (passing_ && !is_reducing() && !has_failed() && !told_unfinished_ && taken_ > 0) {
    log::warn(
        "DistributedDataParallel: the last backward before its end did not reduce all gradients; "
        "it brought none for " +
        parameters_.names_of(missing_parameters()) +
        ", and the other gradients are those of this rank alone");
  }
}

void Reducer::set_comm_hook(CommHook hook) {
  if (!hook) throw Error(Blame::Caller, "register_comm_hook: the hook is empty");
  std::lock_guard lock(mutex_);
  if (buckets_.has_hook())
    throw Error(Blame::Caller, "register_comm_hook: this model has a hook already; it takes one");
  if (passing_) throw Error(Blame::Caller, "register_comm_hook: a backward pass is running");
  if (stats_.passes > 0) {
    throw Error(Blame::Caller,
                "register_comm_hook: a backward has averaged gradients without it; register the "
                "hook once, before the first "
                "backward");
  }
  buckets_.set_hook([this, hook = std::move(hook)](GradBucket& bucket) {
    try {
      return hook(bucket);
    } catch (...) {
      note_failure(group::first_line_of(std::current_exception()).text());
      throw;
    }
  });
}

void Reducer::set_follower(BucketFollower* follower) {
  std::lock_guard lock(mutex_);
  if (follower != nullptr && follower_ != nullptr) {
    throw Error(
        Blame::Caller,
        "overlap_with: another optimizer steps in the backward of this DistributedDataParallel");
  }
  if (follower != nullptr && passing_)
    throw Error(Blame::Caller, "overlap_with: a backward pass is running, or has failed");
  follower_ = follower;
}

bool Reducer::has_follower() const {
  std::lock_guard lock(mutex_);
  return follower_ != nullptr;
}

void Reducer::begin_forward() {
  std::lock_guard lock(mutex_);
  if (follower_ != nullptr && !passing_) follower_->before_forward();
  follow_parameters();
  const bool is_outside =
      autograd::Pass::current() == nullptr && torch::autograd::get_current_graph_task_id() < 0;
  // The last backward has ended, perhaps by an exception.
  if (is_outside && !passing_) backward_.abandon();
}

void Reducer::set_divisor(int ranks) {
  std::lock_guard lock(mutex_);
  buckets_.set_divisor(ranks);
}

void Reducer::prepare_forward() {
  trace::step(group().rank());
  std::lock_guard lock(mutex_);
  drop_failed_pass();
  require_in_step();
  refuse_capture();
  // A broken group may be the reason why the pass did not end.
  if (passing_) group::throw_if_refused(group());
  if (passing_ && (is_reducing() || has_failed())) throw failed_pass();
  if (passing_ && static_graph_.is_counted()) {
    throw Error(Blame::Caller,
                "static_graph: the last backward brought fewer gradients than the first one, or "
                "none, for " +
                    parameters_.names_of(missing_parameters()) +
                    "; the graph changed, switch static_graph off");
  }
  if (passing_) throw unfinished_pass();
  // If the ranks count usage, they average a frozen parameter's gradient like one of a parameter
  // that only some of them use.
  if (!static_graph_.counts_usage()) unused_.require_no_frozen_rest();
  take_over_order();
}

void Reducer::end_forward(const std::vector<at::Tensor>& outputs, bool trains) {
  std::lock_guard lock(mutex_);
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
  if (static_graph_.finds_unused()) forward->unused = hooks_.unreachable_from(outputs);
  forwards_.add(forward);
  if (!forward->synchronizes || !trains) return;
  forwards_.count(*forward, true);
  compare_parameters();
}

void Reducer::compare_parameters() {
  std::vector<ParameterCheck::Parameter> trained;
  if (!check_.is_due(forwards_.steps())) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_.is_trained(i)) trained.push_back({parameters_[i].name, parameters_[i].tensor});
  }
  check_.look(forwards_.steps(), trained);
}

bool Reducer::is_synchronizing() const {
  std::lock_guard lock(mutex_);
  return forwards_.are_synchronizing();
}

void Reducer::set_synchronizing(bool on) {
  std::lock_guard lock(mutex_);
  forwards_.set_synchronizing(on);
}

// Called for every gradient of a backward. At the first one the reducer learns that the backward
// runs and registers a callback for its end. The callback belongs to the graph task that runs at
// this moment, and is destroyed with it if an exception ends it. If outputs could be hooked, that
// is the user's own backward; otherwise the first parameter's gradient registers it, perhaps inside
// a re-entrant backward.
void Reducer::enter_backward() {
  drop_failed_pass();
  if (backward_.is_known()) return;
  // The earlier backward still runs.
  if (is_reducing() && failure_.empty() && pass_failed_) require_same_pass();
  goes_on_ = passing_;
  interrupted_ |= is_reducing();
  const auto callback = [weak = weak_from_this(), task = backward_.begin()] {
    if (const auto self = weak.lock()) self->end_backward();
  };
  if (auto* const pass = autograd::Pass::current()) return pass->at_end(callback);
  torch::autograd::Engine::get_default_engine().queue_callback(callback);
}

// Called by the first gradient of an output of `forward`.
void Reducer::on_backward_start(Forward& forward) {
  const c10::AutoGradMode no_grad(false);
  std::lock_guard lock(mutex_);
  if (!hooks_.are_reached()) return forwards_.count(forward, false);
  enter_backward();
  forward.had_backward = true;
  if (forward.synchronizes) {
    forwards_.count(forward, true);
    synchronize();
  } else if (backward_.kind() == Kind::Unknown) {
    backward_.set_kind(Kind::Local);
  }
}

// True if gradients of a backward of no known forward are to be synchronised: there was a forward
// without visible outputs, or a forward that synchronises has had no backward (it may keep a loss
// elsewhere), or an earlier backward has brought a part of this pass's gradients.
bool Reducer::awaits_gradients() const {
  if (backward_.kind() != Kind::Unknown) return false;
  return passing_ || forwards_.have_synchronizing_hidden() || forwards_.await_backward();
}

// From here on this backward's gradients are reduced, and so are those that it brought before it
// reached the outputs of a forward that synchronises.
void Reducer::synchronize() {
  if (backward_.kind() == Kind::Synchronized) return;
  begin_pass();
  backward_.set_kind(Kind::Synchronized);
  if (!static_graph_.counts()) fill_unused();
  for (const auto& [parameter, stream] : backward_.take_early()) {
    if (stream) wait_for(*stream);
    take(parameter);
  }
}

// Called when parameter.grad() has the gradient, perhaps added to an earlier one.
void Reducer::on_gradient(std::size_t parameter) {
  if (is_inside_a_pass()) {
    throw Error(
        Blame::Caller,
        "a node calls backward() inside of a distributed backward, and brings a gradient for " +
            parameters_.names_of({parameter}) +
            ", which would not be averaged; call torch::autograd::grad() there, and return "
            "its results");
  }
  const bool creates_graph = c10::GradMode::is_enabled();
  const c10::AutoGradMode no_grad(false);
  std::lock_guard lock(mutex_);
  if (gradient_of(parameters_[parameter].tensor).defined()) unused_.usage().note(parameter);
  enter_backward();
  if (awaits_gradients() && !has_failed()) {
    // No output's hook has counted this step.
    if (!passing_ && forwards_.have_synchronizing_hidden()) forwards_.count_hidden();
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
  take(parameter);
}

// Notes a gradient of a backward under no_sync(), of one without a forward of this wrapper, or of
// one that is not known to synchronise yet.
void Reducer::keep_local(std::size_t parameter) {
  if (has_failed()) return;  // later backwards belong to another wrapper of the model
  if (passing_ && buckets_.is_filled(parameter)) {
    throw Error(
        Blame::Caller,
        "a backward that is not synchronised brings a gradient for " +
            parameters_.names_of({parameter}) +
            ", which is being averaged: a backward before it did not reduce all gradients, and "
            "brought none for " +
            parameters_.names_of(missing_parameters()) +
            ". Call backward for all losses of a forward before others, or set "
            "DdpOptions::find_unused_parameters");
  }
  backward_.note_early(parameter, parameters_[parameter].tensor.device());
  const bool is_explained =
      backward_.kind() == Kind::Local || !forwards_.are_synchronizing() || forwards_.have_hidden();
  if (!is_explained && !warned_of_direct_) backward_.note_direct(parameter);
}

// Adds one gradient, which is in parameter.grad(), to this pass.
void Reducer::take(std::size_t parameter) {
  if (!buckets_.hold(parameter)) {
    throw Error(
        Blame::Caller,
        "the backward brings a gradient for " + parameters_.names_of({parameter}) +
            ", which required none at the last forward that synchronised; call requires_grad_() "
            "before that forward");
  }
  others_.note_averaged();
  if (goes_on_ && buckets_.is_filled(parameter) && parameters_.is_trained(parameter) &&
      !static_graph_)
    throw unfinished_pass();
  if (++taken_ == 1) unused_.add_frozen();
  if (order_.is_open()) order_.note(parameter);
  if (static_graph_.counts()) return static_graph_.count(parameter);
  if (static_graph_) {
    static_graph_.take(parameter);
    if (static_graph_.misses(parameter)) return;
  }
  fill_unused();
  const bool is_defined = gradient_of(parameters_[parameter].tensor).defined();
  if (!is_defined && static_graph_.finds_unused()) unused_.add(parameter);
  // The parameter was frozen; an older forward still brings a gradient for it.
  if (buckets_.is_filled(parameter) && !parameters_.is_trained(parameter)) return;
  fill(parameter);
}

void Reducer::begin_pass() {
  if (has_failed()) throw failed_pass();
  if (passing_) return require_same_pass();
  require_in_step();
  if (follower_ != nullptr && autograd::Pass::current() != nullptr) {
    throw Error(Blame::Caller,
                "an AutogradContext keeps its gradients for itself, and an optimizer that steps in "
                "the backward of this "
                "DistributedDataParallel would not see them; call loss.backward() without a "
                "context, or leave out "
                "overlap_with");
  }
  passing_ = true;
  goes_on_ = interrupted_ = told_unfinished_ = false;
  taken_ = 0;
  auto* const pass = autograd::Pass::current();
  pass_failed_ = pass ? pass->failure() : nullptr;
  buckets_.begin_pass();
  if (static_graph_.is_counted()) {
    static_graph_.begin_pass();
    unused_.begin_pass(static_graph_.unused());
  } else {
    unused_.begin_pass(static_graph_.finds_unused() ? forwards_.unused(parameters_.size())
                                                    : std::vector<std::size_t>{});
  }
}

void Reducer::fill_unused() {
  if (!unused_.are_to_be_filled()) return;
  for (const std::size_t parameter : unused_.all()) {
    if (buckets_.is_filled(parameter)) continue;
    unused_.keep(parameter);
    fill(parameter);
  }
}

void Reducer::fill(std::size_t parameter) {
  if (buckets_.fill(parameter)) launch_full_buckets();
}

void Reducer::launch_full_buckets() {
  try {
    while (buckets_.is_next_full()) {
      buckets_.launch_next(forwards_.steps(), passing_);
      // With counted usage, the unused parameters are known only at the end of the pass.
      if (follower_ == nullptr || static_graph_.counts_usage()) continue;
      buckets_.follow(*follower_,
                      [&](std::size_t parameter) { return unused_.is_used_anywhere(parameter); });
    }
  } catch (...) {
    fail_pass(std::current_exception());
  }
  if (buckets_.are_all_launched() && static_graph_.counts_usage())
    unused_.usage().share(groups_.own());
}

// Called when the backward has run to its end.
void Reducer::end_backward() {
  const c10::AutoGradMode no_grad(false);
  std::optional<RunningBackward::Direct> direct;
  {
    std::lock_guard lock(mutex_);
    const Kind kind = backward_.end();
    direct = backward_.take_direct();
    if (kind == Kind::Synchronized) direct.reset();
    if (kind == Kind::Synchronized && passing_) finish();
  }
  if (!direct || others_.average(direct->parameter, direct->graph_task)) return;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(warned_of_direct_, true)) return;
  }
  log::warn(
      "DistributedDataParallel: a backward brings gradients of the module without a forward of "
      "this wrapper, which does not average them; the ranks' parameters will differ. Call the "
      "DistributedDataParallel in place of its module, or use no_sync() if gradients are to stay "
      "local");
}

void Reducer::finish() {
  const bool is_first_static = static_graph_.counts();
  if (!is_first_static && !buckets_.are_all_launched()) {
    if (!static_graph_.finds_unused()) {
      // Another backward of this forward's outputs brings the rest. If no gradient has come (the
      // parameters were frozen meanwhile), none need follow.
      const bool any_came = buckets_.is_any_launched() || taken_ > 0;
      if (!any_came && !static_graph_) passing_ = false;
      return;
    }
    unused_.add_missing();
    fill_unused();
  }
  if (is_first_static) {
    // All work was put off until here, where all gradients of this graph are known.
    if (const auto error = static_graph_.unknown_to_others(unused_.usage())) {
      note_failure(error->text());
      throw Error(*error);
    }
    unused_.begin_pass(static_graph_.unused());
    fill_unused();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (buckets_.hold(i) && !buckets_.is_filled(i)) fill(i);
    }
  }
  const trace::Range range(traced::gradients, {.rank = group().rank()});
  const auto start = std::chrono::steady_clock::now();
  try {
    buckets_.collect();
    unused_.wait_for_usage(group::Core::of(groups_.own()).host_values_device());
  } catch (...) {
    fail_pass(std::current_exception());
  }
  stats_.last_wait = std::chrono::steady_clock::now() - start;
  stats_.wait += stats_.last_wait;
  unused_.restore();
  if (order_.is_open()) order_.share(groups_.own(), parameters_.size());
  static_graph_.end_pass();
  forwards_.end_pass();
  passing_ = false;
  ++stats_.passes;
}

DdpStats Reducer::stats() const {
  std::lock_guard lock(mutex_);
  DdpStats stats = stats_;
  stats.bucket_bytes = buckets_.bytes();
  return stats;
}

}  // namespace weft::parallel
