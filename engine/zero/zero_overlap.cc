// SPDX-License-Identifier: Apache-2.0
#include <unordered_set>

#include <c10/core/GradMode.h>

#include <weft/engine/ddp/ddp.h>
#include <weft/engine/ddp/flat.h>
#include <weft/engine/future/when_all.h>
#include <weft/engine/group/access.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/engine/zero/zero_overlap.h>
#include <weft/profiling/trace/host_time.h>
#include <weft/profiling/trace/trace.h>

namespace weft::parallel {

namespace traced {
namespace {
constinit trace::Name step{trace::Layer::Engine, "optimizer step"};
}  // namespace
}  // namespace traced

namespace {

const void* key_of(const at::Tensor& parameter) { return parameter.unsafeGetTensorImpl(); }

// Ends the group on an error of this rank. An error of the group itself is passed to group.fail():
// the other ranks have seen it themselves, with a better text.
void end_group(const group::WeakGroup& group, const char* what, const std::exception_ptr& why) {
  try {
    std::rethrow_exception(why);
  } catch (const Error& error) {
    const Blame blame = error.blame();
    const bool is_groups =
        blame == Blame::PeerLost || blame == Blame::Timeout || blame == Blame::Cancelled;
    is_groups ? group.fail(error) : group.abort(what + error.text());
  } catch (const std::exception& error) {
    group.abort(what + tensor::text_of(error));
  } catch (...) {
    group.abort(std::string(what) + "an exception without a text");
  }
}

constexpr const char* kNoAverages =
    "ZeroRedundancyOptimizer: backward ended there without averages: ";

// Steps a shard on its owner, on the thread that completes the averages.
struct Step {
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  std::vector<at::Tensor> parameters;
  at::Tensor copy;  // to be filled, if the parameters lie apart
  std::shared_ptr<HostFlag> flag;
  std::shared_ptr<Failure> failure;

  void operator()(const Future<void>& averages) {
    const char* what = kNoAverages;
    try {
      averages.get();
      what = kStepThrew;
      const trace::Range range(traced::step);
      const trace::ServeScope counted;
      optimizer->step();
      // libtorch's own optimizers write without autograd.
      for (const at::Tensor& parameter : parameters)
        parameter.unsafeGetTensorImpl()->bump_version();
      if (copy.defined()) flatten_into(copy, parameters);
      if (flag) flag->raise();
    } catch (...) {
      failure->set(what, std::current_exception());
      throw;
    }
  }
};

// Like then(), but runs the step neither on this thread, which goes on with the backward, nor on a
// thread of the backend.
Future<void> on_thread_of(ProcessGroup& group, const Future<void>& averages, Step step) {
  const auto executor = group::continuations_of(group);
  Promise<void> stepped(executor);
  averages.on_done([executor, stepped, step = std::move(step)](const Future<void>& done) mutable {
    executor->run([done, stepped, step = std::move(step)]() mutable {
      try {
        step(done);
        stepped.set();
      } catch (...) {
        stepped.set_error(std::current_exception());
      }
    });
  });
  return stepped.future();
}

}  // namespace

void Failure::set(const char* what, const std::exception_ptr& why) {
  {
    MutexLock lock(mutex_);
    if (why_) return;
    why_ = why;
  }
  end_group(group_, what, why);
  told_.raise();
}

void Failure::rethrow() const {
  static_cast<void>(told_.synchronize(Deadline::never()));
  std::rethrow_exception(why());
}

std::exception_ptr Failure::why() const {
  MutexLock lock(mutex_);
  return why_;
}

void ShardedOptimizer::overlap_with(Replica& ddp) {
  if (join_scope_ != nullptr || ddp.join_scope_ != nullptr) {
    throw Error(Blame::Caller,
                "overlap_with: cannot be called inside of weft::join, where a rank that has run "
                "out has no backward");
  }
  check_stepped("overlap_with");
  overlap_.reset();
  overlap_ = std::make_unique<Overlap>(*this, ddp.reducer());
}

void ShardedOptimizer::check_join() const {
  if (!overlap_) return;
  throw Error(Blame::Caller,
              "join: this ZeroRedundancyOptimizer steps in the backward of its "
              "DistributedDataParallel, which a rank that has "
              "run out does not have; leave out overlap_with");
}

void ShardedOptimizer::check_stepped(const char* what) const {
  if (!overlap_ || !overlap_->is_under_way()) return;
  throw Error(Blame::Caller,
              std::string("ZeroRedundancyOptimizer: ") + what +
                  " between a backward that steps (overlap_with) and step(); call step() first");
}

ShardedOptimizer::Overlap::Overlap(ShardedOptimizer& zero, const std::shared_ptr<Reducer>& reducer)
    : zero_(zero), reducer_(reducer) {
  if (!group::are_same(reducer->group(), zero.group_)) {
    throw Error(Blame::Caller,
                "overlap_with: the DistributedDataParallel and the optimizer have different "
                "groups; make both with one");
  }
  begin();  // throws if this optimizer does not fit the reducer
  reducer->set_follower(this);
}

ShardedOptimizer::Overlap::~Overlap() {
  if (const auto reducer = reducer_.lock()) reducer->set_follower(nullptr);
}

void ShardedOptimizer::Overlap::before_forward() {
  zero_.check_stepped("a forward");
  zero_.check_layout();
}

ShardedOptimizer::Overlap::Pass ShardedOptimizer::Overlap::begin() {
  std::unordered_set<const void*> averaged;
  if (const auto reducer = reducer_.lock()) {
    for (const at::Tensor& parameter : reducer->averaged_parameters())
      averaged.insert(key_of(parameter));
  }
  Pass pass;
  pass.last = Future<void>::ready();
  pass.failure = std::make_shared<Failure>(zero_.group_);
  pass.missing.resize(zero_.shards_.size());
  pass.needs.resize(zero_.shards_.size());
  pass.begun.resize(zero_.shards_.size());
  shard_of_.clear();
  for (std::size_t i = 0; i < zero_.shards_.size(); ++i) {
    for (const at::Tensor& parameter : zero_.shards_[i].parameters) {
      if (averaged.contains(key_of(parameter))) {
        shard_of_[key_of(parameter)] = i;
        ++pass.missing[i];
      } else if (parameter.requires_grad()) {
        throw Error(
            Blame::Caller,
            "overlap_with: a parameter of this optimizer, of shape " + c10::str(parameter.sizes()) +
                ", does not belong to the DistributedDataParallel, so its gradient is not "
                "averaged; give it to an optimizer of its own, or make it a part of that module");
      }
    }
  }
  return pass;
}

void ShardedOptimizer::Overlap::on_bucket(const std::vector<at::Tensor>& parameters,
                                          const Future<void>& averaged, bool is_last) {
  if (!pass_) {
    zero_.all_.reset();
    pass_ = begin();
  }
  Pass& pass = *pass_;
  if (pass.all_came) zero_.check_stepped("a second backward");
  const std::size_t before = pass.stepped.size();
  std::vector<std::size_t> touched;
  for (const at::Tensor& parameter : parameters) {
    const auto found = shard_of_.find(key_of(parameter));
    if (found == shard_of_.end()) continue;  // stepped by another optimizer
    const std::size_t shard = found->second;
    if (touched.empty() || touched.back() != shard) pass.needs[shard].push_back(averaged);
    touched.push_back(shard);
    if (--pass.missing[shard] == 0) step(shard);
  }
  pass.all_came = is_last;
  const std::size_t due = is_last ? pass.stepped.size() : before;
  while (pass.sent < due) send(pass.stepped[pass.sent++]);
}

void ShardedOptimizer::Overlap::step(std::size_t index) {
  Pass& pass = *pass_;
  Shard& shard = zero_.shards_[index];
  pass.begun[index] = true;
  // From here on the parameters change at any time, on some ranks without autograd.
  for (const at::Tensor& parameter : shard.parameters)
    parameter.unsafeGetTensorImpl()->bump_version();
  Stepped one{.shard = &shard, .ready = when_all(std::exchange(pass.needs[index], {}))};
  at::Tensor copy;
  if (zero_.group_.size() > 1) {
    one.flat = shard.whole_memory();
    if (!one.flat.defined()) one.flat = copy = empty_flat(shard.parameters);
  }
  if (shard.optimizer) {
    zero_.prepare_step(shard);
    const bool on_host = shard.parameters.front().is_cpu();
    if (on_host && one.flat.defined()) one.flag = std::make_shared<HostFlag>();
    Step run{shard.optimizer, shard.parameters, std::move(copy), one.flag, pass.failure};
    if (on_host) {
      one.ready = pass.last =
          on_thread_of(zero_.group_, when_all(pass.last, one.ready), std::move(run));
    } else {
      one.ready = one.ready.then(std::move(run));
    }
  }
  pass.stepped.push_back(std::move(one));
}

void ShardedOptimizer::Overlap::send(const Stepped& one) {
  if (!one.flat.defined()) return;
  const int owner = one.shard->owner;
  Future<void> arrived;
  if (one.flat.is_cpu()) {
    arrived = group::broadcast(zero_.group_, one.flat, owner, one.flag ? Fence(one.flag) : Fence())
                  .future();
  } else if (!one.ready.failed()) {
    weft::detail::run_after(one.ready.device_work(), [&] {
      arrived = group::broadcast(zero_.group_, one.flat, owner).future();
    });
  } else {
    return;  // complete() throws that error, or the group's next operation does
  }
  if (!zero_.is_mine(*one.shard)) {
    arrived = arrived.then(
        [flat = one.flat, parameters = one.shard->parameters] { Shard::land(flat, parameters); });
  }
  pass_->arrivals.push_back(std::move(arrived));
}

void ShardedOptimizer::Overlap::fail(const std::exception_ptr& why) {
  if (!pass_) std::rethrow_exception(why);
  pass_->failure->set(kNoAverages, why);
  pass_->failure->rethrow();
}

std::vector<bool> ShardedOptimizer::Overlap::complete() {
  if (!pass_) return {};
  const Pass pass = std::move(*pass_);
  pass_.reset();
  std::exception_ptr first;
  const auto end = [&](const Future<void>& future) {
    try {
      future.get();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  };
  for (const Stepped& one : pass.stepped) {
    if (one.shard->optimizer) end(one.ready);
  }
  for (const Future<void>& arrival : pass.arrivals) end(arrival);
  if (pass.failure->why()) pass.failure->rethrow();
  if (first) std::rethrow_exception(first);
  if (!pass.all_came) {
    throw Error(
        Blame::Caller,
        "ZeroRedundancyOptimizer: the last backward has failed, or did not bring all gradients, "
        "and has stepped some "
        "parameters already (overlap_with): the ranks' parameters differ; go on from a checkpoint");
  }
  return pass.begun;
}

}  // namespace weft::parallel
