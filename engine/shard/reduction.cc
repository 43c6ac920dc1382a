// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/group/access.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/shard/reduction.h>

namespace weft::shard {

void Reduction::wait() {
  order->advance(*this);
  for (Bucket& bucket : buckets) {
    if (bucket.on_host) {
      bucket.on_host->order();
    } else {
      bucket.work.wait();
    }
    bucket.lent.end_behind(bucket.work, /*current_waits=*/true);
  }
}

void Reduction::wait_for_host() {
  for (Bucket& bucket : buckets) {
    if (bucket.on_host) bucket.on_host->wait();
  }
}

void Reduction::finish(std::vector<at::Tensor>& gradients,
                       const std::vector<at::ScalarType>& dtypes) const {
  for (const Bucket& bucket : buckets) {
    const at::Tensor& values = bucket.on_host ? bucket.on_host->values() : bucket.output;
    auto number = values.numel() - static_cast<std::int64_t>(bucket.slots.size());
    for (const std::size_t slot : bucket.slots) {
      const std::int64_t here = number++;
      const bool converts = gradients[slot].defined() && values.scalar_type() != dtypes[slot];
      if (bucket.on_host && (converts || !came[slot])) bucket.on_host->wait();
      // Read, which waits for the device, only if the answer is not known here.
      if (!came[slot] && values.narrow(0, here, 1).item<double>() == 0) {
        gradients[slot].reset();
      } else if (gradients[slot].defined()) {
        if (bucket.on_host) gradients[slot] = bucket.on_host->part(gradients[slot]);
        if (converts) gradients[slot] = gradients[slot].to(dtypes[slot]);
      }
    }
  }
}

std::shared_ptr<ReductionOrder> ReductionOrder::over(const ProcessGroup& replicas) {
  static Mutex mutex;
  static std::vector<std::weak_ptr<ReductionOrder>> all;
  if (!replicas) return std::shared_ptr<ReductionOrder>(new ReductionOrder({}));
  MutexLock lock(mutex);
  std::erase_if(all, [](const auto& order) { return order.expired(); });
  for (const auto& known : all) {
    auto order = known.lock();
    if (order && group::are_same(order->replicas_, replicas)) return order;
  }
  std::shared_ptr<ReductionOrder> made(new ReductionOrder(replicas));
  all.push_back(made);
  return made;
}

void ReductionOrder::add(const std::shared_ptr<Reduction>& reduction) {
  MutexLock lock(mutex_);
  advance_begun();
  begun_.push_back(reduction);
}

void ReductionOrder::advance(Reduction& reduction) {
  MutexLock lock(mutex_);
  if (replicas_) advance_begun();
  advance_one(reduction);
}

void ReductionOrder::forget() {
  MutexLock lock(mutex_);
  begun_.clear();
}

void ReductionOrder::advance_begun() {
  for (const auto& begun : std::exchange(begun_, {})) {
    if (const auto reduction = begun.lock()) advance_one(*reduction);
  }
}

void ReductionOrder::advance_one(Reduction& reduction) {
  if (std::exchange(reduction.has_advanced, true)) return;
  for (Reduction::Bucket& bucket : reduction.buckets) {
    bucket.work.wait();
    bucket.lent.end_behind(bucket.work, /*current_waits=*/true);
    if (replicas_) {
      const group::CalledBy by(reduction.called_by);
      const at::Tensor values = reduction.offload ? bucket.output : bucket.lent.lend(bucket.output);
      bucket.work = group::all_reduce(replicas_, values, ReduceOp::Sum, {0, reduction.unit});
    }
    if (reduction.offload) {
      bucket.on_host = reduction.offload->take_out(std::exchange(bucket.output, {}), bucket.kept_as,
                                                   bucket.work);
    }
  }
}

}  // namespace weft::shard
