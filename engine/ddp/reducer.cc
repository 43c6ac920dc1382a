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

namespace {

// All reducers of this process. A module may have two wrappers.
struct Reducers {
  std::mutex mutex;
  std::vector<std::weak_ptr<Reducer>> all;
};

Reducers& reducers() {
  static Reducers* const made = new Reducers();  // never destroyed: threads may outlive main()
  return *made;
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
  std::lock_guard lock(reducers().mutex);
  std::erase_if(reducers().all, [](const auto& weak) { return weak.expired(); });
  reducers().all.push_back(reducer);
  return reducer;
}

Reducer::Reducer(std::vector<ReducerParameter> parameters, DeviceGroups groups,
                 std::uint32_t number, const DdpOptions& options)
    : groups_(std::move(groups)),
      options_(options),
      parameters_(std::move(parameters), groups_.own()),
      hooks_(parameters_.size()),
      buckets_(parameters_, groups_, number, options_),
      usage_(parameters_.size()),
      static_graph_(options.static_graph, parameters_.size()),
      check_(groups_.own(), number) {
  kept_.resize(parameters_.size());
}

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
  if (is_outside && !passing_) {
    graph_task_.reset();
    context_pass_.reset();
    ended_ = true;
  }
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
  require_no_frozen_rest();
  take_over_order();
}

void Reducer::end_forward(const std::vector<at::Tensor>& outputs, bool trains) {
  std::lock_guard lock(mutex_);
  std::erase_if(forwards_, [](const auto& weak) { return weak.expired(); });
  const auto forward = std::make_shared<Forward>();
  forward->synchronizes = synchronizing_;
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
  if (std::exchange(hidden_had_pass_, false)) hidden_.reset();
  if (is_visible) {
    if (finds_unused()) forward->unused = hooks_.unreachable_from(outputs);
    forwards_.push_back(forward);
    if (synchronizing_ && trains) {
      count(*forward, true);
      compare_parameters();
    }
  } else {
    // The forward returned nothing, or a type in which no tensors are found, so any backward may
    // belong to it.
    hidden_ = hidden_.value_or(false) || synchronizing_;
  }
}

void Reducer::compare_parameters() {
  std::vector<ParameterCheck::Parameter> trained;
  if (!check_.is_due(steps_)) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_.is_trained(i)) trained.push_back({parameters_[i].name, parameters_[i].tensor});
  }
  check_.look(steps_, trained);
}

bool Reducer::is_synchronizing() const {
  std::lock_guard lock(mutex_);
  return synchronizing_;
}

void Reducer::set_synchronizing(bool on) {
  std::lock_guard lock(mutex_);
  synchronizing_ = on;
}

bool Reducer::finds_unused() const {
  return options_.find_unused_parameters && !static_graph_.is_counted();
}

// Called for every gradient of a backward. At the first one the reducer learns that the backward
// runs and registers a callback for its end. The callback belongs to the graph task that runs at
// this moment, and is destroyed with it if an exception ends it. If outputs could be hooked, that
// is the user's own backward; otherwise the first parameter's gradient registers it, perhaps inside
// a re-entrant backward.
void Reducer::enter_backward() {
  drop_failed_pass();
  if (is_in_known_backward()) return;
  // The earlier backward still runs.
  if (is_reducing() && failure_.empty() && pass_failed_) require_same_pass();
  const auto task = std::make_shared<char>();
  auto* const pass = autograd::Pass::current();
  graph_task_ = task;
  context_pass_ = pass ? pass->failure() : nullptr;
  goes_on_ = passing_;
  interrupted_ |= is_reducing();
  backward_ = Kind::Unknown;
  came_.clear();
  ended_ = false;
  const auto callback = [weak = weak_from_this(), task] {
    if (const auto self = weak.lock()) self->end_backward();
  };
  if (pass) return pass->at_end(callback);
  torch::autograd::Engine::get_default_engine().queue_callback(callback);
}

bool Reducer::is_in_known_backward() const {
  const auto* const pass = autograd::Pass::current();
  return pass ? context_pass_ == pass->failure()
              : context_pass_ == nullptr && !graph_task_.expired();
}

// Called by the first gradient of an output of `forward`.
void Reducer::on_backward_start(Forward& forward) {
  const c10::AutoGradMode no_grad(false);
  std::lock_guard lock(mutex_);
  if (!hooks_.are_reached()) return count(forward, false);
  enter_backward();
  forward.had_backward = true;
  if (forward.synchronizes) {
    count(forward, true);
    synchronize();
  } else if (backward_ == Kind::Unknown) {
    backward_ = Kind::Local;
  }
}

// Counts or uncounts `forward` as a step. The ranks' steps are compared with each bucket: a rank
// that has skipped the backward of a step has made one forward more than the others. Forwards for
// torch::autograd::grad() and for evaluation are not counted, since one rank may make them alone.
void Reducer::count(Forward& forward, bool counts) {
  if (std::exchange(forward.counts, counts) == counts) return;
  steps_ += counts ? 1 : -1;
}

// True if gradients of a backward of no known forward are to be synchronised: there was a forward
// without visible outputs, or a forward that synchronises has had no backward (it may keep a loss
// elsewhere), or an earlier backward has brought a part of this pass's gradients.
bool Reducer::awaits_gradients() const {
  if (backward_ != Kind::Unknown) return false;
  if (passing_ || hidden_.value_or(false)) return true;
  return std::any_of(forwards_.begin(), forwards_.end(), [](const auto& weak) {
    const auto forward = weak.lock();
    return forward && forward->synchronizes && !forward->had_backward;
  });
}

// From here on this backward's gradients are reduced, and so are those that it brought before it
// reached the outputs of a forward that synchronises.
void Reducer::synchronize() {
  if (backward_ == Kind::Synchronized) return;
  begin_pass();
  backward_ = Kind::Synchronized;
  if (!static_graph_.counts()) mark_unused();
  for (const auto& [parameter, stream] : std::exchange(came_, {})) {
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
  if (gradient_of(parameters_[parameter].tensor).defined()) usage_.note(parameter);
  enter_backward();
  if (awaits_gradients() && !has_failed()) {
    if (!passing_ && hidden_.value_or(false)) ++steps_;  // no output's hook has counted this step
    synchronize();
  }
  if (backward_ != Kind::Synchronized) return keep_local(parameter);
  if (creates_graph) {
    throw Error(Blame::Caller,
                "backward(create_graph = true) brings a gradient for " +
                    parameters_.names_of({parameter}) +
                    ", whose average has no graph: a backward through it would not be averaged. "
                    "Call torch::autograd::grad(…, create_graph = true) for gradients that the "
                    "loss contains, and backward without create_graph");
  }
  require_one_wrapper(parameter);
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
  const c10::Device device = parameters_[parameter].tensor.device();
  came_.emplace_back(parameter, device.is_cpu()
                                    ? std::nullopt
                                    : std::optional(tensor::CudaDevices::current_stream(device)));
  const bool is_explained = backward_ == Kind::Local || !synchronizing_ || hidden_.has_value();
  if (is_explained || warned_of_direct_ || warns_of_direct_) return;
  warns_of_direct_ = true;
  direct_ = parameter;
  direct_task_ = torch::autograd::get_current_graph_task_id();
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
  averaging_task_ = torch::autograd::get_current_graph_task_id();
  if (goes_on_ && buckets_.is_filled(parameter) && parameters_.is_trained(parameter) &&
      !static_graph_)
    throw unfinished_pass();
  if (++taken_ == 1) leave_out_frozen();
  if (order_.is_open() && rebuilds()) order_.note(parameter);
  if (static_graph_.counts()) return static_graph_.count(parameter);
  if (static_graph_) {
    check_static_graph(parameter);
    if (static_graph_.misses(parameter)) return;
  }
  mark_unused();
  const bool is_defined = gradient_of(parameters_[parameter].tensor).defined();
  if (!is_defined && finds_unused()) unused_.push_back(parameter);
  // The parameter was frozen; an older forward still brings a gradient for it.
  if (buckets_.is_filled(parameter) && !parameters_.is_trained(parameter)) return;
  fill(parameter);
}

// If two wrappers of one module took part in one backward, each would average the other's average.
// The hooks of one accumulator run one after the other on one thread, so `last` sees both.
void Reducer::require_one_wrapper(std::size_t parameter) const {
  struct Last {
    int graph_task = -1;
    const void* context_pass = nullptr;
    const void* parameter = nullptr;
    const Reducer* by = nullptr;
  };
  thread_local Last last;
  const Last now{torch::autograd::get_current_graph_task_id(), context_pass_.get(),
                 parameters_[parameter].tensor.unsafeGetTensorImpl(), this};
  const Last before = std::exchange(last, now);
  if (before.by == this || before.parameter != now.parameter ||
      before.graph_task != now.graph_task || before.context_pass != now.context_pass)
    return;
  throw Error(Blame::Caller,
              "two DistributedDataParallel of one module take part in one backward, and both would "
              "average " +
                  parameters_.names_of({parameter}) + "; use one of them for the whole loss");
}

// True if another wrapper of the same module averages the gradients of that graph task.
bool Reducer::is_averaged_by_another(std::size_t parameter, int graph_task) const {
  if (graph_task < 0) return false;
  std::vector<std::shared_ptr<Reducer>> others;
  {
    std::lock_guard lock(reducers().mutex);
    for (const auto& weak : reducers().all) others.push_back(weak.lock());
  }
  const at::Tensor& tensor = parameters_[parameter].tensor;
  return std::any_of(others.begin(), others.end(), [&](const std::shared_ptr<Reducer>& other) {
    if (!other || other.get() == this) return false;
    if (!other->parameters_.contain(tensor)) return false;
    std::lock_guard lock(other->mutex_);
    return other->averaging_task_ == graph_task;
  });
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
  unused_marked_ = false;
  buckets_.begin_pass();
  if (static_graph_.is_counted()) {
    static_graph_.begin_pass();
    unused_ = static_graph_.unused();
  } else {
    unused_ = finds_unused() ? unused_by_forwards() : std::vector<std::size_t>{};
  }
  std::erase_if(unused_, [&](std::size_t parameter) { return !buckets_.hold(parameter); });
}

void Reducer::fill(std::size_t parameter) {
  if (buckets_.fill(parameter)) launch_full_buckets();
}

void Reducer::launch_full_buckets() {
  try {
    while (buckets_.is_next_full()) {
      buckets_.launch_next(steps_, passing_);
      // With counted usage, the unused parameters are known only at the end of the pass.
      if (follower_ == nullptr || counts_usage()) continue;
      buckets_.follow(*follower_,
                      [&](std::size_t parameter) { return is_used_anywhere(parameter); });
    }
  } catch (...) {
    fail_pass(std::current_exception());
  }
  if (buckets_.are_all_launched() && counts_usage()) usage_.share(groups_.own());
}

// A static graph is counted once; without one, every pass may use other parameters.
bool Reducer::counts_usage() const {
  return static_graph_ ? !static_graph_.is_shared() : options_.find_unused_parameters;
}

// Called when the backward has run to its end.
void Reducer::end_backward() {
  const c10::AutoGradMode no_grad(false);
  bool warns = false;
  std::size_t direct = 0;
  int task = -1;
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    graph_task_.reset();
    context_pass_.reset();
    came_.clear();
    warns = std::exchange(warns_of_direct_, false) && backward_ != Kind::Synchronized;
    direct = direct_;
    task = direct_task_;
    if (std::exchange(backward_, Kind::Unknown) == Kind::Synchronized && passing_) finish();
  }
  if (!warns || is_averaged_by_another(direct, task)) return;
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
    if (!finds_unused()) {
      // Another backward of this forward's outputs brings the rest. If no gradient has come (the
      // parameters were frozen meanwhile), none need follow.
      const bool any_came = buckets_.is_any_launched() || taken_ > 0;
      if (!any_came && !static_graph_) passing_ = false;
      return;
    }
    leave_out_what_is_missing();
  }
  if (is_first_static) {
    // All work was put off until here, where all gradients of this graph are known.
    require_used_by_others();
    unused_ = static_graph_.unused();
    std::erase_if(unused_, [&](std::size_t parameter) { return !buckets_.hold(parameter); });
    unused_marked_ = false;
    mark_unused();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (buckets_.hold(i) && !buckets_.is_filled(i)) fill(i);
    }
  }
  const trace::Range range(traced::gradients, {.rank = group().rank()});
  const auto start = std::chrono::steady_clock::now();
  try {
    buckets_.collect();
    wait_in_backward(usage_.take_work(), group::Core::of(groups_.own()).host_values_device());
  } catch (...) {
    fail_pass(std::current_exception());
  }
  stats_.last_wait = std::chrono::steady_clock::now() - start;
  stats_.wait += stats_.last_wait;
  restore_unused();
  if (order_.is_open() && rebuilds()) order_.share(groups_.own(), parameters_.size());
  static_graph_.end_pass();
  hidden_had_pass_ = true;
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
