// The reducer's buckets: their memory, their rebuilding after the first pass, their results, and
// passes with zeros.
#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <weft/engine/autograd/pass.h>
#include <weft/engine/ddp/bucket.h>
#include <weft/engine/ddp/flat.h>
#include <weft/engine/ddp/reducer.h>
#include <weft/engine/group/access.h>

namespace weft::parallel {

// Plans the buckets in that order of all parameters; they hold those that are or have been trained.
void Reducer::build_buckets(const std::vector<std::size_t>& order) {
  bucket_order_ = order;
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
  stats_.bucket_bytes.clear();
  for (const PlannedBucket& plan : plan_buckets(planned, planned_order, limits)) {
    Bucket bucket;
    for (const std::size_t gradient : plan.gradients)
      bucket.parameters.push_back(planned_parameters[gradient]);
    bucket.limit = plan.limit;
    const at::Tensor& first = parameters_[bucket.parameters.front()].tensor;
    bucket.sparse = parameters_[bucket.parameters.front()].sparse_gradient;
    std::int64_t elements = 0;
    for (std::size_t slot = 0; slot < bucket.parameters.size(); ++slot) {
      places_[bucket.parameters[slot]] = Place{buckets_.size(), slot};
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
      stats_.bucket_bytes.push_back(bucket.flat.nbytes());
    }
    buckets_.push_back(std::move(bucket));
  }
}

bool Reducer::trains_others() const {
  std::lock_guard lock(mutex_);
  const std::vector<bool> now = parameters_.trained_now();
  if (std::find(now.begin(), now.end(), true) == now.end()) return false;
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (now[i] != parameters_.is_trained(i) || (parameters_.was_ever_trained(i) && !travels(i)))
      return true;
  }
  return false;
}

void Reducer::take_over_trained() {
  std::lock_guard lock(mutex_);
  std::vector<bool> trained = parameters_.trained_now();
  std::vector<std::size_t> changed;
  std::vector<std::size_t> added;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (trained[i] != parameters_.is_trained(i)) changed.push_back(i);
    if (parameters_.was_ever_trained(i) && !travels(i)) added.push_back(i);
  }
  if (!changed.empty() && static_graph_) {
    throw Error(Blame::Caller,
                "static_graph: requires_grad was changed for " + parameters_.names_of(changed) +
                    ", and the graph with it; switch static_graph off, or make a new "
                    "DistributedDataParallel");
  }
  if (!added.empty() && follower_ != nullptr) {
    throw Error(Blame::Caller,
                "requires_grad was switched on for " + parameters_.names_of(added) +
                    ", and an optimizer steps in the backward of this DistributedDataParallel, "
                    "which would leave them out; make both again");
  }
  if (!added.empty() && passing_) throw unfinished_pass();
  parameters_.compare(changed.empty() ? added : changed);
  parameters_.set_trained(std::move(trained));
  if (added.empty()) return;
  for (const std::size_t parameter : added) parameters_.set_layout(parameter);
  build_buckets(bucket_order_);
}

// Takes over rank 0's order of arrival, which was sent at the end of the first pass, at the next
// forward.
void Reducer::take_over_order() {
  if (!order_.is_due()) return;
  const auto start = std::chrono::steady_clock::now();
  const auto order = order_.take();
  stats_.wait += std::chrono::steady_clock::now() - start;
  build_buckets(order);
  stats_.rebuilt = true;
}

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

}  // namespace

// Leaves errors of the future itself to get().
template <class T>
void Reducer::wait_for_hook(const Future<T>& future, const Bucket& bucket) const {
  if (future.done()) return;
  constexpr auto kLook = std::chrono::milliseconds(50);
  const auto* const pass = autograd::Pass::current();
  const Deadline deadline =
      pass == nullptr
          ? Deadline::in(group::timeout_of(group()))
          : Deadline::sooner(pass->deadline(), Deadline::in(group::timeout_of(group())));
  const std::string what = "the comm hook of bucket " + std::to_string(&bucket - buckets_.data());
  group::Waits::LocalWait wait = group::local_wait(
      group(), what,
      "the future that it returned is not done; the hook must complete it on every rank");
  for (;;) {
    const auto look = std::clamp(deadline.remaining(), std::chrono::milliseconds(1), kLook);
    try {
      return future.wait(look);
    } catch (const Error& error) {
      if (future.done()) return;
      if (error.blame() != Blame::Timeout) throw;
    }
    group::throw_if_refused(group());
    if (deadline.passed()) break;
    wait.look();
  }
  const Error late(
      Blame::Timeout,
      what + " of DistributedDataParallel: the future that it returned was not done within " +
          describe(group::timeout_of(group())));
  group::fail(group(), late);
  throw Error(late);
}

void Reducer::collect(Bucket& bucket) {
  if (bucket.sparse) return collect_sparse(bucket);
  if (bucket.averaged) {
    bucket.work = {};
    bucket.reduced = {};
    const Future<void> averaged = *std::exchange(bucket.averaged, std::nullopt);
    if (hook_) wait_for_hook(averaged, bucket);
    return averaged.get();
  }
  if (hook_) {
    const Future<at::Tensor> reduced = std::exchange(bucket.reduced, {});
    wait_for_hook(reduced, bucket);
    adopt(reduced.get(), bucket.flat);
  } else {
    wait(std::exchange(bucket.work, {}), bucket.flat.device());
  }
  for (std::size_t slot = 0; slot < bucket.parameters.size(); ++slot) {
    put(bucket.views[slot], gradient_of(parameters_[bucket.parameters[slot]].tensor),
        gradients_are_views());
  }
}

// Runs the work of collect() early, if there is a follower: as a continuation of the operation,
// while this thread goes on with the backward (CUDA: on another stream). Not if usage is counted:
// then the unused parameters are known only at the end of the pass.
void Reducer::follow(std::size_t index) {
  if (follower_ == nullptr || counts_usage()) return;
  Bucket& bucket = buckets_[index];
  const bool is_last = index + 1 == buckets_.size();
  if (bucket.sparse) return follower_->on_bucket({}, Future<void>::ready(), is_last);
  std::vector<at::Tensor> all, used;
  for (const std::size_t parameter : bucket.parameters) {
    all.push_back(parameters_[parameter].tensor);
    if (is_used_anywhere(parameter)) used.push_back(all.back());
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
  follower_->on_bucket(used, *bucket.averaged, is_last);
}

// Known with a static graph once it has been counted; without one, every parameter that takes part
// is used.
bool Reducer::is_used_anywhere(std::size_t parameter) {
  const bool used_here = std::find(unused_.begin(), unused_.end(), parameter) == unused_.end();
  return used_here || usage_.is_anywhere(parameter);
}

void Reducer::launch_sparse(Bucket& bucket) {
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
    GradBucket shown(static_cast<std::size_t>(&bucket - buckets_.data()), buckets_.size(), gradient,
                     {gradient}, {parameter}, groups_.of(gradient.device()));
    bucket.reduced = call_hook(shown);
    return;
  }
  if (divisor_ != 1)
    gradient = gradient.div(divisor_);  // before the sum, which may be too large for fp16
  bucket.sparse_sum = group::SparseSum(groups_.of(gradient.device()), gradient);
}

void Reducer::collect_sparse(Bucket& bucket) {
  const at::Tensor& parameter = parameters_[bucket.parameters.front()].tensor;
  at::Tensor& target = gradient_of(parameter);
  bucket.sparse_gradient = at::Tensor();
  if (hook_) {
    const Future<at::Tensor> reduced = std::exchange(bucket.reduced, {});
    wait_for_hook(reduced, bucket);
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

void Reducer::mirror_pass() {
  const c10::AutoGradMode no_grad(false);
  std::lock_guard lock(mutex_);
  take_over_order();
  ++steps_;  // as the others' backward counts it
  next_bucket_ = 0;
  usage_.forget();
  unused_.clear();
  // If the others count usage, their counts say which parameters they use. The rest have no
  // gradient, as on a rank that zeroes its gradients before each step.
  if (counts_usage() || usage_.is_shared()) {
    std::fill(kept_.begin(), kept_.end(), at::Tensor());
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (travels(i)) unused_.push_back(i);
    }
  }
  leave_out_frozen();
  for (const std::size_t parameter : unused_) {
    const at::Tensor& gradient = gradient_of(parameters_[parameter].tensor);
    if (!parameters_.is_trained(parameter) && gradient.defined())
      kept_[parameter] = gradient.clone();
  }
  for (Bucket& bucket : buckets_) {
    if (bucket.flat.defined()) bucket.flat.zero_();
    bucket.sparse_gradient = at::Tensor();
    launch(next_bucket_++);
  }
  if (counts_usage()) usage_.share(groups_.own());
  for (Bucket& bucket : buckets_) collect(bucket);
  usage_.take_work().wait();
  restore_unused();
  static_graph_.mirror_pass();
  if (order_.is_open() && rebuilds()) order_.share(groups_.own(), parameters_.size());
}

}  // namespace weft::parallel
