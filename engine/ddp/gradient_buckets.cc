// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>

#include <ATen/ScalarOps.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>

#include <weft/engine/autograd/pass.h>
#include <weft/engine/ddp/bucket_plan.h>
#include <weft/engine/ddp/flat.h>
#include <weft/engine/ddp/gradient_buckets.h>
#include <weft/engine/group/access.h>
#include <weft/engine/tensor/cuda_devices.h>

namespace weft::parallel {

namespace traced {
namespace {
constinit trace::Name gradient{trace::Layer::Engine, "gradient"};  // its slot is filled
constinit trace::Name bucket{trace::Layer::Engine, "bucket"};
}  // namespace
}  // namespace traced

namespace {

// Copies a hook's result into the bucket, unless it is there already.
void adopt(const at::Tensor& result, const at::Tensor& flat) {
  if (result.defined() && result.layout() != at::kStrided) {
    throw Error(Blame::Caller,
                "a comm hook returned a tensor of layout " + c10::str(result.layout()) +
                    " for a bucket of dense gradients; return a strided one (to_dense())");
  }
  if (!result.defined() || result.numel() != flat.numel()) {
    throw Error(Blame::Caller, "a comm hook returned " +
                                   std::to_string(result.defined() ? result.numel() : 0) +
                                   " elements for a bucket of " + std::to_string(flat.numel()) +
                                   "; return as many, in the order of buffer()");
  }
  // A result that shares the bucket's memory may still have another order, or be a lazy view.
  const bool is_flat =
      result.is_alias_of(flat) && result.is_contiguous() && !result.is_conj() && !result.is_neg();
  if (!is_flat) flat.copy_(result.reshape(flat.sizes()));
}

void put(const at::Tensor& view, at::Tensor& gradient, bool as_view) {
  if (as_view) {
    gradient = view;
  } else if (!gradient.defined()) {
    gradient = view.clone();
  } else {
    gradient.copy_(view);
  }
}

// Blocks until `future` is done: the future that the hook of bucket `index` has returned, or its
// continuation. Waits at most the group's timeout. Leaves errors of the future itself to get().
template <class T>
void wait_for_hook(const Future<T>& future, std::size_t index, const ProcessGroup& group) {
  if (future.done()) return;
  constexpr auto kLook = std::chrono::milliseconds(50);
  const auto* const pass = autograd::Pass::current();
  const Deadline deadline =
      pass == nullptr ? Deadline::in(group::timeout_of(group))
                      : Deadline::sooner(pass->deadline(), Deadline::in(group::timeout_of(group)));
  const std::string what = "the comm hook of bucket " + std::to_string(index);
  group::LocalWait wait = group::local_wait(
      group, what,
      "the future that it returned is not done; the hook must complete it on every rank");
  for (;;) {
    const auto look = std::clamp(deadline.remaining(), std::chrono::milliseconds(1), kLook);
    try {
      return future.wait(look);
    } catch (const Error& error) {
      if (future.done()) return;
      if (error.blame() != Blame::Timeout) throw;
    }
    group::throw_if_refused(group);
    if (deadline.passed()) break;
    wait.look();
  }
  const Error late(
      Blame::Timeout,
      what + " of DistributedDataParallel: the future that it returned was not done within " +
          describe(group::timeout_of(group)));
  group::fail(group, late);
  throw Error(late);
}

}  // namespace

void wait_for(const c10::Stream& stream) {
  const c10::Stream current = tensor::CudaDevices::current_stream(stream.device());
  if (stream == current) return;
  c10::Event reached(stream.device_type());
  reached.record(stream);
  reached.block(current);
}

void wait_in_backward(Work work, const c10::Device& device) {
  const auto* const pass = autograd::Pass::current();
  if (pass == nullptr || pass->deadline().is_never() || !device.is_cpu()) return work.wait();
  work.synchronize(std::max(pass->deadline().remaining(), std::chrono::milliseconds(1)));
}

void GradientBucket::note_stream(const c10::Device& device) {
  if (device.is_cpu()) return;
  const c10::Stream stream = tensor::CudaDevices::current_stream(device);
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

void GradientBucket::wait_for_slots() {
  for (const c10::Stream& stream : std::exchange(streams, {})) wait_for(stream);
}

void GradientBucket::drop_pass() {
  work = {};
  reduced = {};
  averaged.reset();
  sparse_sum = {};
  sparse_gradient = at::Tensor();
  streams.clear();
}

GradientBuckets::GradientBuckets(TrainedParameters& parameters, DeviceGroups& groups,
                                 std::uint32_t model, const DdpOptions& options)
    : parameters_(parameters),
      groups_(groups),
      model_(model),
      options_(options),
      filled_(parameters.size()),
      divisor_(groups.own().size()) {
  // Gradients come roughly in the reverse of the order in which the forward pass uses the
  // parameters.
  std::vector<std::size_t> order(parameters_.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = order.size() - 1 - i;
  build(order);
}

void GradientBuckets::build(const std::vector<std::size_t>& order) {
  order_ = order;
  std::vector<std::size_t> planned_parameters;
  std::vector<std::size_t> planned_order;
  std::vector<PlannedGradient> planned;
  for (const std::size_t parameter : order) {
    if (!parameters_.was_ever_trained(parameter)) continue;
    const at::Tensor& tensor = parameters_[parameter].tensor;
    planned_order.push_back(planned.size());
    planned_parameters.push_back(parameter);
    planned.push_back({tensor.nbytes(), tensor.scalar_type(), tensor.device(),
                       parameters_[parameter].sparse_gradient});
  }
  const std::size_t limits[] = {options_.first_bucket_bytes, options_.bucket_bytes};
  buckets_.clear();
  places_.assign(parameters_.size(), std::nullopt);
  for (const PlannedBucket& plan : plan_buckets(planned, planned_order, limits)) {
    GradientBucket bucket;
    for (const std::size_t gradient : plan.gradients)
      bucket.parameters.push_back(planned_parameters[gradient]);
    const at::Tensor& first = parameters_[bucket.parameters.front()].tensor;
    bucket.sparse = parameters_[bucket.parameters.front()].sparse_gradient;
    std::int64_t elements = 0;
    for (std::size_t slot = 0; slot < bucket.parameters.size(); ++slot) {
      places_[bucket.parameters[slot]] = SlotIndex{buckets_.size(), slot};
      elements += parameters_[bucket.parameters[slot]].tensor.numel();
    }
    if (!bucket.sparse) {
      bucket.flat = at::zeros({elements}, first.options().requires_grad(false));
      std::int64_t offset = 0;
      for (const std::size_t parameter : bucket.parameters) {
        const at::Tensor& tensor = parameters_[parameter].tensor;
        bucket.views.push_back(view_like(bucket.flat, offset, tensor));
        offset += tensor.numel();
      }
    }
    buckets_.push_back(std::move(bucket));
  }
}

std::vector<std::size_t> GradientBuckets::bytes() const {
  std::vector<std::size_t> bytes;
  for (const GradientBucket& bucket : buckets_) {
    if (bucket.flat.defined()) bytes.push_back(bucket.flat.nbytes());
  }
  return bytes;
}

void GradientBuckets::begin_pass() {
  next_ = 0;
  std::fill(filled_.begin(), filled_.end(), false);
  for (GradientBucket& bucket : buckets_) bucket.pending = bucket.parameters.size();
}

bool GradientBuckets::fill(std::size_t parameter) {
  if (filled_[parameter]) {
    throw Error(Blame::Caller, "a gradient of " + parameters_.names_of({parameter}) +
                                   " came twice in one backward. A parameter that is used in "
                                   "several parts of a recomputed graph "
                                   "needs DdpOptions::static_graph");
  }
  filled_[parameter] = true;
  const SlotIndex place = *places_[parameter];
  GradientBucket& bucket = buckets_[place.bucket];
  bucket.note_stream(parameters_[parameter].tensor.device());
  {
    const trace::Range range(traced::gradient, {.bytes = parameters_[parameter].tensor.nbytes(),
                                                .rank = groups_.own().rank()});
    fill_slot(bucket, place.slot, parameter);
    if (const auto arrow = trace::Arrow::leave(); arrow.id() != 0) bucket.arrows.push_back(arrow);
  }
  return --bucket.pending == 0;
}

void GradientBuckets::fill_slot(GradientBucket& bucket, std::size_t slot, std::size_t parameter) {
  // Gradients of earlier passes under no_sync() are averaged with this one, as in parameter.grad().
  if (auto* pass = autograd::Pass::current())
    pass->gradients().absorb(parameters_[parameter].tensor);
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
                "the gradient of " + parameters_.names_of({parameter}) +
                    " is sparse, but its module does not declare sparse gradients; use "
                    "torch::nn::Embedding or torch::nn::EmbeddingBag with sparse(true)");
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

// A context keeps its gradients while later passes fill the buckets again, so they are not views.
bool GradientBuckets::gradients_are_views() const {
  return options_.gradient_as_bucket_view && autograd::Pass::current() == nullptr;
}

void GradientBuckets::launch_next(std::uint32_t step, bool compares) {
  const std::size_t index = next_++;
  GradientBucket& bucket = buckets_[index];
  const trace::Range range(
      traced::bucket,
      {.bytes = bucket.flat.defined() ? bucket.flat.nbytes() : 0, .rank = groups_.own().rank()});
  for (const trace::Arrow& arrow : std::exchange(bucket.arrows, {})) arrow.arrive();
  bucket.wait_for_slots();
  if (compares) parameters_.compare_changes(bucket.parameters);
  if (bucket.sparse) return launch_sparse(bucket, index);
  if (!hook_) {
    bucket.work = group::all_reduce(groups_.of(bucket.flat.device()), bucket.flat, ReduceOp::Sum,
                                    {model_, step});
    return;
  }
  std::vector<at::Tensor> parameters;
  for (const std::size_t parameter : bucket.parameters)
    parameters.push_back(parameters_[parameter].tensor);
  GradBucket shown(index, buckets_.size(), bucket.flat, bucket.views, std::move(parameters),
                   groups_.of(bucket.flat.device()));
  bucket.reduced = hook_(shown);
}

void GradientBuckets::launch_sparse(GradientBucket& bucket, std::size_t index) {
  const at::Tensor& parameter = parameters_[bucket.parameters.front()].tensor;
  at::Tensor& gradient = bucket.sparse_gradient;
  if (!gradient.defined()) {
    // No rows; sparse in the first dimension, as embeddings' gradients are.
    auto rows = parameter.sizes().vec();
    rows[0] = 0;
    gradient = at::sparse_coo_tensor(at::empty({1, 0}, parameter.options().dtype(at::kLong)),
                                     at::empty(rows, parameter.options()), parameter.sizes(),
                                     parameter.options().layout(at::kSparse));
  } else if (gradient.layout() != at::kSparse) {
    gradient = gradient.to_sparse(1);
  }
  if (hook_) {
    GradBucket shown(index, buckets_.size(), gradient, {gradient}, {parameter},
                     groups_.of(gradient.device()));
    bucket.reduced = hook_(shown);
    return;
  }
  if (divisor_ != 1)
    gradient = gradient.div(divisor_);  // before the sum, which may be too large for fp16
  bucket.sparse_sum = group::SparseSum(groups_.of(gradient.device()), gradient);
}

void GradientBuckets::launch_zeros(std::uint32_t step, bool compares) {
  next_ = 0;
  for (GradientBucket& bucket : buckets_) {
    if (bucket.flat.defined()) bucket.flat.zero_();
    bucket.sparse_gradient = at::Tensor();
    launch_next(step, compares);
  }
}

void GradientBuckets::follow(BucketFollower& follower,
                             const std::function<bool(std::size_t)>& is_used) {
  GradientBucket& bucket = buckets_[next_ - 1];
  if (bucket.sparse) return follower.on_bucket({}, Future<void>::ready(), are_all_launched());
  std::vector<at::Tensor> all, used;
  for (const std::size_t parameter : bucket.parameters) {
    all.push_back(parameters_[parameter].tensor);
    if (is_used(parameter)) used.push_back(all.back());
  }
  const auto put_all = [all = std::move(all), views = bucket.views,
                        as_views = options_.gradient_as_bucket_view] {
    const c10::AutoGradMode no_grad(false);
    for (std::size_t slot = 0; slot < all.size(); ++slot)
      put(views[slot], all[slot].mutable_grad(), as_views);
  };
  if (hook_) {
    bucket.averaged = bucket.reduced.then([put_all, flat = bucket.flat](const at::Tensor& result) {
      const c10::AutoGradMode no_grad(false);
      adopt(result, flat);
      put_all();
    });
  } else {
    bucket.averaged = bucket.work.future().then(put_all);
  }
  follower.on_bucket(used, *bucket.averaged, are_all_launched());
}

void GradientBuckets::collect() {
  for (std::size_t index = 0; index < buckets_.size(); ++index) collect(buckets_[index], index);
}

void GradientBuckets::collect(GradientBucket& bucket, std::size_t index) {
  if (bucket.sparse) return collect_sparse(bucket, index);
  if (bucket.averaged) {
    bucket.work = {};
    bucket.reduced = {};
    const Future<void> averaged = *std::exchange(bucket.averaged, std::nullopt);
    if (hook_) wait_for_hook(averaged, index, groups_.own());
    return averaged.get();
  }
  if (hook_) {
    const Future<at::Tensor> reduced = std::exchange(bucket.reduced, {});
    wait_for_hook(reduced, index, groups_.own());
    adopt(reduced.get(), bucket.flat);
  } else {
    wait_in_backward(std::exchange(bucket.work, {}), bucket.flat.device());
  }
  for (std::size_t slot = 0; slot < bucket.parameters.size(); ++slot) {
    put(bucket.views[slot], gradient_of(parameters_[bucket.parameters[slot]].tensor),
        gradients_are_views());
  }
}

void GradientBuckets::collect_sparse(GradientBucket& bucket, std::size_t index) {
  const at::Tensor& parameter = parameters_[bucket.parameters.front()].tensor;
  at::Tensor& target = gradient_of(parameter);
  bucket.sparse_gradient = at::Tensor();
  if (hook_) {
    const Future<at::Tensor> reduced = std::exchange(bucket.reduced, {});
    wait_for_hook(reduced, index, groups_.own());
    at::Tensor result = reduced.get();
    if (!result.defined() || result.sizes() != parameter.sizes()) {
      throw Error(Blame::Caller, "a comm hook returned " +
                                     (result.defined() ? c10::str(result.sizes()) : "nothing") +
                                     " for a sparse gradient of " + c10::str(parameter.sizes()));
    }
    target = std::move(result);
    return;
  }
  target = std::exchange(bucket.sparse_sum, {}).finish();
}

void GradientBuckets::drop_pass() {
  for (GradientBucket& bucket : buckets_) bucket.drop_pass();
}

}  // namespace weft::parallel
