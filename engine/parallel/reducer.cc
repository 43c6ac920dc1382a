#include <algorithm>

#include <ATen/ScalarOps.h>
#include <ATen/ops/mul.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <weft/engine/autograd/ambient.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/group/agree.h>
#include <weft/engine/group/core.h>
#include <weft/engine/parallel/reducer.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/trace.h>

namespace weft::parallel {

namespace traced {
namespace {
constinit trace::Name gradient{trace::Layer::Engine, "gradient"};  // it takes its place in a bucket
constinit trace::Name bucket{trace::Layer::Engine, "bucket"};
constinit trace::Name gradients{trace::Layer::Engine, "gradients"};  // the backward pass waits for them
}  // namespace
}  // namespace traced

namespace {

// Whether libtorch's engine runs here inside of a pass, which does not use it: a node calls backward() or grad() itself.
bool is_inside_a_pass() {
  return autograd::Pass::current() != nullptr && torch::autograd::get_current_graph_task_id() >= 0;
}

}  // namespace

std::shared_ptr<Reducer> Reducer::make(std::vector<ReducerParameter> parameters, DeviceGroups groups,
                                       const DdpOptions& options) {
  std::shared_ptr<Reducer> reducer(new Reducer(std::move(parameters), std::move(groups), options));
  reducer->attach();
  return reducer;
}

Reducer::Reducer(std::vector<ReducerParameter> parameters, DeviceGroups groups, const DdpOptions& options)
    : parameters_(std::move(parameters)),
      groups_(std::move(groups)),
      options_(options),
      divisor_(group().size()),
      usage_(parameters_.size()),
      static_graph_(options.static_graph, parameters_.size()) {
  ready_.resize(parameters_.size());
  kept_.resize(parameters_.size());
  left_out_.resize(parameters_.size());
  // Gradients come roughly in the reverse of the order in which the forward pass used the parameters.
  std::vector<std::size_t> order(parameters_.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = order.size() - 1 - i;
  build_buckets(order);
}

void Reducer::attach() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[i].tensor);
    const auto on_post = [weak = weak_from_this(), i](const torch::autograd::variable_list& outputs,
                                                      const torch::autograd::variable_list&) {
      if (const auto self = weak.lock()) self->on_gradient(i);
      return outputs;
    };
    hook_keys_.push_back(accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(on_post)));
    accumulators_.push_back(std::move(accumulator));
  }
}

Reducer::~Reducer() {
  for (std::size_t i = 0; i < accumulators_.size(); ++i) accumulators_[i]->del_post_hook(hook_keys_[i]);
}

void Reducer::set_comm_hook(CommHook hook) {
  if (!hook) throw Error(Blame::Caller, "register_comm_hook: the hook is empty");
  std::lock_guard lock(mutex_);
  if (hook_) throw Error(Blame::Caller, "register_comm_hook: this model has a hook already; it takes one");
  if (passing_) throw Error(Blame::Caller, "register_comm_hook: a backward pass is running");
  hook_ = std::move(hook);
}

void Reducer::set_follower(BucketFollower* follower) {
  std::lock_guard lock(mutex_);
  if (follower != nullptr && follower_ != nullptr) {
    throw Error(Blame::Caller, "overlap_with: another optimizer steps in the backward of this DistributedDataParallel");
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
  std::fill(left_out_.begin(), left_out_.end(), false);
  outputs_again_ = false;
}

void Reducer::set_divisor(int ranks) {
  std::lock_guard lock(mutex_);
  divisor_ = ranks;
}

void Reducer::prepare_forward() {
  trace::step(group().rank());
  std::lock_guard lock(mutex_);
  require_same_parameters();
  drop_failed_pass();
  require_in_step();
  refuse_capture();
  if (passing_) group::Core::of(group()).throw_if_broken();  // that is why it did not end
  // What was to be called at its end still waits where an exception ended it.
  if (passing_ && (finish_queued_ || !failure_.empty())) {
    expecting_ = false;
    throw failed_pass();
  }
  if (passing_ && static_graph_.is_counted()) {
    throw Error(Blame::Caller, "static_graph: the last backward brought fewer gradients than the first one, or none, for " +
                                   names_of(missing_parameters()) + "; the graph changed, switch static_graph off");
  }
  if (passing_) {
    throw Error(
        Blame::Caller,
        "the last backward did not reduce all gradients: it brought none for " + names_of(missing_parameters()) +
            ". If the outputs need not depend on every parameter, set DdpOptions::find_unused_parameters; all outputs "
            "of the forward must take part in the loss");
  }
  take_over_order();
}

void Reducer::prepare_backward(const std::vector<at::Tensor>& outputs) {
  std::lock_guard lock(mutex_);
  const bool joins_another = expecting_ && !passing_;
  expecting_ = true;
  outputs_again_ = outputs.empty();  // what is not shown may be part of any backward
  const std::vector<std::size_t> unused_before = std::exchange(unused_, {});
  // A forward that shows no tensors, as it returns void or a type that does not say what it holds: then what has not come
  // at the end of the backward is unused.
  if (!finds_unused() || outputs.empty()) return;
  unused_ = unreachable_from(outputs);
  if (!joins_another) return;
  // The losses of several forwards may be added up for one backward: unused is what none of them uses. Where the other
  // one's outputs were thrown away, what only they used counts as unused at the end.
  std::erase_if(unused_, [&](std::size_t parameter) {
    return std::find(unused_before.begin(), unused_before.end(), parameter) == unused_before.end();
  });
}

bool Reducer::finds_unused() const { return options_.find_unused_parameters && !static_graph_.is_counted(); }

void Reducer::on_backward_start() {
  const c10::AutoGradMode no_grad(false);
  std::lock_guard lock(mutex_);
  if (!accumulates()) return;
  if (!expecting_) {
    outputs_again_ = true;
    return at_end_of_backward([](Reducer& self) {
      std::lock_guard again(self.mutex_);
      self.outputs_again_ = false;
    });
  }
  begin_pass();
  queue_finish();
  if (static_graph_.counts()) return;
  mark_unused();
}

// Whether the backward that runs here can bring a gradient. torch::autograd::grad() gives its results to the caller, and a
// rank may call it as often as it likes (gradient penalties, adversarial examples).
bool Reducer::accumulates() const {
  if (autograd::Pass::current() != nullptr) return !is_inside_a_pass();
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) return true;  // backward() without a list of inputs
  return std::any_of(accumulators_.begin(), accumulators_.end(), [&](const auto& accumulator) {
    const auto found = wanted->find(accumulator.get());
    return found != wanted->end() && found->second.needed_;
  });
}

// Where this thread's backward puts the parameter's gradient: the pass of an AutogradContext has its own.
at::Tensor& Reducer::gradient_of(const at::Tensor& parameter) {
  if (auto* pass = autograd::Pass::current()) return pass->gradient(parameter);
  return parameter.mutable_grad();
}

// A context keeps its gradients while later passes fill the buckets again.
bool Reducer::gradients_are_views() const {
  return options_.gradient_as_bucket_view && autograd::Pass::current() == nullptr;
}

// Called with the gradient already in parameter.grad(), or accumulated there.
void Reducer::on_gradient(std::size_t parameter) {
  if (is_inside_a_pass()) {
    throw Error(Blame::Caller, "a node calls backward() inside of a distributed backward, and brings a gradient for " +
                                   names_of({parameter}) +
                                   ", which no AutogradContext would hold; call torch::autograd::grad() there, and return "
                                   "its results");
  }
  const c10::AutoGradMode no_grad(false);
  std::lock_guard lock(mutex_);
  const bool is_defined = gradient_of(parameters_[parameter].tensor).defined();
  if (is_defined) usage_.note(parameter);
  if (!expecting_) {
    if (!left_out_[parameter] || !std::exchange(outputs_again_, false)) return;
    throw Error(Blame::Caller, "a second backward of one forward brings a gradient for " + names_of({parameter}) +
                                   ", which the first one left out and which was reduced as unused then; add the losses up "
                                   "and call backward once, or switch find_unused_parameters and static_graph off");
  }
  begin_pass();
  if (finds_unused()) queue_finish();  // which closes what the loss leaves out
  if (order_.is_open() && rebuilds()) order_.note(parameter);
  if (static_graph_.counts()) {
    static_graph_.count(parameter);
    return queue_finish();
  }
  if (static_graph_) {
    check_static_graph(parameter);
    if (static_graph_.misses(parameter)) return;
  }
  mark_unused();
  if (!is_defined && finds_unused()) unused_.push_back(parameter);
  mark_ready(parameter);
}

void Reducer::begin_pass() {
  drop_failed_pass();
  if (passing_) return require_same_pass();
  require_in_step();
  if (follower_ != nullptr && autograd::Pass::current() != nullptr) {
    throw Error(Blame::Caller,
                "an AutogradContext keeps its gradients for itself, and an optimizer that steps in the backward of this "
                "DistributedDataParallel would not see them; call loss.backward() without a context, or leave out "
                "overlap_with");
  }
  passing_ = true;
  auto* const pass = autograd::Pass::current();
  pass_failed_ = pass ? pass->failure() : nullptr;
  unused_marked_ = false;
  finish_queued_ = false;
  next_bucket_ = 0;
  std::fill(ready_.begin(), ready_.end(), false);
  for (Bucket& bucket : buckets_) bucket.pending = bucket.parameters.size();
  if (static_graph_.is_counted()) {
    static_graph_.begin_pass();
    unused_ = static_graph_.unused();
  }
}

// A distributed pass has a time limit, which the others' gradients must keep.
void Reducer::wait(Work work, const c10::Device& device) const {
  const auto* const pass = autograd::Pass::current();
  if (pass == nullptr || pass->deadline().is_never() || !device.is_cpu()) return work.wait();
  work.synchronize(std::max(pass->deadline().remaining(), std::chrono::milliseconds(1)));
}

void Reducer::mark_ready(std::size_t parameter) {
  if (ready_[parameter]) {
    throw Error(Blame::Caller,
                "a gradient of " + names_of({parameter}) +
                    " came twice in one backward. A parameter that is used in several parts of a recomputed graph "
                    "needs DdpOptions::static_graph");
  }
  ready_[parameter] = true;
  const Place place = places_[parameter];
  Bucket& bucket = buckets_[place.bucket];
  note_stream(bucket, parameters_[parameter].tensor.device());
  {
    const trace::Range range(traced::gradient, {.bytes = parameters_[parameter].tensor.nbytes(), .rank = group().rank()});
    fill_slot(bucket, place.slot, parameter);
    if (const auto arrow = trace::Arrow::leave(); arrow.id() != 0) bucket.arrows.push_back(arrow);
  }
  if (--bucket.pending == 0) launch_ready_buckets();
}

void Reducer::fill_slot(Bucket& bucket, std::size_t slot, std::size_t parameter) {
  // As in parameter.grad(): what passes under no_sync() have brought is averaged with the rest.
  if (auto* pass = autograd::Pass::current()) pass->absorb(parameters_[parameter].tensor);
  at::Tensor& gradient = gradient_of(parameters_[parameter].tensor);
  if (bucket.sparse) {
    bucket.sparse_gradient = gradient;
    return;
  }
  at::Tensor& view = bucket.views[slot];
  if (!gradient.defined()) {
    view.zero_();
    return;
  }
  if (gradient.layout() != at::kStrided) {
    throw Error(Blame::Caller,
                "the gradient of " + names_of({parameter}) +
                    " is sparse, but its module does not say so; torch::nn::Embedding with sparse(true) is known");
  }
  const bool divide = !hook_;
  if (gradient.is_alias_of(view) && gradient.data_ptr() == view.data_ptr()) {
    if (divide && divisor_ != 1) view.mul_(1.0 / divisor_);
    return;
  }
  if (divide && divisor_ != 1) {
    at::mul_out(view, gradient, at::native::wrapped_scalar_tensor(1.0 / divisor_));
  } else {
    view.copy_(gradient);
  }
  if (gradients_are_views()) gradient = view;
}

// Autograd runs each gradient on the stream of its forward operation, and a user may have had several.
void Reducer::note_stream(Bucket& bucket, const c10::Device& device) {
  if (device.is_cpu()) return;
  const c10::Stream stream = tensor::CudaDevices::current_stream(device);
  if (std::find(bucket.streams.begin(), bucket.streams.end(), stream) == bucket.streams.end()) {
    bucket.streams.push_back(stream);
  }
}

void Reducer::wait_for_slots(Bucket& bucket) {
  for (const c10::Stream& stream : std::exchange(bucket.streams, {})) {
    const c10::Stream current = tensor::CudaDevices::current_stream(stream.device());
    if (stream == current) continue;
    c10::Event filled(stream.device_type());
    filled.record(stream);
    filled.block(current);
  }
}

void Reducer::launch_ready_buckets() {
  try {
    while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0) {
      const std::size_t index = next_bucket_++;
      launch(index);
      follow(index);
    }
  } catch (...) {
    note_failure(group::first_line_of(std::current_exception()).text());
    if (follower_ == nullptr) throw;
    follower_->fail(std::current_exception());
  }
  if (next_bucket_ < buckets_.size()) return;
  if (counts_usage()) usage_.share(groups_.own());
  queue_finish();
}

void Reducer::launch(std::size_t index) {
  Bucket& bucket = buckets_[index];
  const trace::Range range(traced::bucket,
                           {.bytes = bucket.flat.defined() ? bucket.flat.nbytes() : 0, .rank = group().rank()});
  for (const trace::Arrow& arrow : std::exchange(bucket.arrows, {})) arrow.arrive();
  wait_for_slots(bucket);
  if (bucket.sparse) return launch_sparse(bucket);
  if (!hook_) {
    bucket.work = groups_.of(bucket.flat.device()).all_reduce(bucket.flat);
    return;
  }
  std::vector<at::Tensor> parameters;
  for (const std::size_t parameter : bucket.parameters) parameters.push_back(parameters_[parameter].tensor);
  GradBucket shown(index, buckets_.size(), bucket.flat, bucket.views, std::move(parameters),
                   groups_.of(bucket.flat.device()));
  bucket.reduced = call_hook(shown);
}

Future<at::Tensor> Reducer::call_hook(GradBucket& bucket) {
  try {
    return hook_(bucket);
  } catch (...) {
    note_failure(group::first_line_of(std::current_exception()).text());
    throw;
  }
}

// A static graph is counted once; else every pass may use other parameters.
bool Reducer::counts_usage() const { return static_graph_ ? !static_graph_.is_shared() : options_.find_unused_parameters; }

// The callback belongs to the graph task that runs at this moment; it is called when that ends well. Where outputs could be
// hooked that is the user's own backward; else the first gradient asks for it, which may be inside a re-entrant one.
void Reducer::queue_finish() {
  if (finish_queued_) return;
  finish_queued_ = true;
  at_end_of_backward([](Reducer& self) { self.finish(); });
}

void Reducer::at_end_of_backward(void (*call)(Reducer&)) {
  const auto callback = [weak = weak_from_this(), call] {
    if (const auto self = weak.lock()) call(*self);
  };
  if (auto* pass = autograd::Pass::current()) return pass->at_end(callback);
  torch::autograd::Engine::get_default_engine().queue_callback(callback);
}

void Reducer::finish() {
  const c10::AutoGradMode no_grad(false);
  std::lock_guard lock(mutex_);
  finish_queued_ = false;
  if (!passing_) return;
  const bool is_first_static = static_graph_.counts();
  if (!is_first_static && next_bucket_ < buckets_.size()) {
    if (!finds_unused()) {
      // Another backward of this forward's outputs brings the rest. Where nothing has come (the parameters were frozen
      // meanwhile) none need follow.
      const bool any_came = next_bucket_ > 0 || std::find(ready_.begin(), ready_.end(), true) != ready_.end();
      if (!any_came && !static_graph_) passing_ = false;
      return;
    }
    leave_out_what_is_missing();
  }
  if (is_first_static) {
    // Everything was put off: now it is known what this graph brings.
    require_used_by_others();
    unused_ = static_graph_.unused();
    unused_marked_ = false;
    mark_unused();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!ready_[i]) mark_ready(i);
    }
  }
  const trace::Range range(traced::gradients, {.rank = group().rank()});
  const auto start = std::chrono::steady_clock::now();
  try {
    for (Bucket& bucket : buckets_) collect(bucket);
    wait(usage_.take_work(), group::Core::of(groups_.own()).host_values_device());
  } catch (...) {
    note_failure(group::first_line_of(std::current_exception()).text());
    if (follower_ != nullptr) follower_->fail(std::current_exception());
    throw;
  }
  stats_.last_wait = std::chrono::steady_clock::now() - start;
  stats_.wait += stats_.last_wait;
  restore_unused();
  if (order_.is_open() && rebuilds()) order_.share(groups_.own(), parameters_.size());
  if (static_graph_) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) left_out_[i] = !static_graph_.uses(i);
  }
  static_graph_.end_pass();
  expecting_ = false;
  passing_ = false;
  ++stats_.passes;
}

DdpStats Reducer::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace weft::parallel
