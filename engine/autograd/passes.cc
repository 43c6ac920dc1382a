// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/contexts.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/autograd/passes.h>
#include <weft/engine/call/core.h>

namespace weft::autograd {

namespace {

// Removes the matching passes. The caller destroys them after the lock: one may be the last owner
// of a graph.
std::vector<Passes::Running> taken_if(std::vector<Passes::Running>& all,
                                      bool (*matches)(const Passes::Running& one)) {
  std::vector<Passes::Running> taken;
  std::erase_if(all, [&](const Passes::Running& one) {
    if (!matches(one)) return false;
    taken.push_back(one);
    return true;
  });
  return taken;
}

bool has_ended(const Passes::Running& one) { return one.ended.done(); }
bool has_succeeded(const Passes::Running& one) { return one.ended.done() && !one.ended.failed(); }

}  // namespace

Passes::Joined Passes::join(const std::shared_ptr<call::AgentCore>& core, const PassName& name,
                            Deadline deadline) {
  MutexLock lock(mutex_);
  if (const Outcome* ended = ended_.find(name.pass)) return {nullptr, *ended};
  if (closed_) {
    return {
        nullptr,
        {static_cast<int>(Blame::Cancelled),
         "context " + to_text(context_.id()) + " has been released on " + describe(core->self())}};
  }
  if (const auto found = running_.find(name.pass); found != running_.end())
    return {found->second, {}};
  const int root = root_of(name.pass);
  if (gradients_.is_settled(name.pass) || root == self_) {
    return {nullptr,
            {static_cast<int>(Blame::Cancelled), "backward in context " + to_text(context_.id()) +
                                                     ": a message of a pass that is over came to " +
                                                     describe(core->self())}};
  }
  gradients_.settle(root, name.settled);
  gradients_.fold();
  PassName ours = name;
  ours.failed = context_.failed_passes().untold();
  auto pass = std::make_shared<Pass>(core, context_.shared_from_this(), std::move(ours), ++begun_,
                                     deadline);
  running_.emplace(name.pass, pass);
  pass->watch();
  pass->local().expect(sends_in(name.plan));
  return {pass, {}};
}

std::shared_ptr<Pass> Passes::begin(const std::shared_ptr<call::AgentCore>& core, PassName name,
                                    bool makes_plan, Deadline deadline) {
  std::vector<Running> ended;
  MutexLock lock(mutex_);
  if (closed_) {
    throw Error(Blame::Caller,
                "backward(): autograd context " + to_text(context_.id()) +
                    " was released by another thread while backward() began; keep the "
                    "AutogradContext until backward() has returned");
  }
  name.pass = contexts_of(*core).next_pass();
  if (makes_plan) name.plan = name.pass;
  unsettled_.insert(name.pass);
  name.settled = *unsettled_.begin();
  name.failed = context_.failed_passes().untold();
  gradients_.fold();
  ended = taken_if(running_here_, &has_ended);
  auto pass = std::make_shared<Pass>(core, context_.shared_from_this(), name, ++begun_, deadline);
  running_.emplace(name.pass, pass);
  pass->watch();
  return pass;
}

void Passes::count(Pass& pass, const Edges& roots) {
  MutexLock lock(mutex_);
  pass.local().expect(sends_in(pass.name().plan), roots);
}

Recording::Sends Passes::sends_in(PassId plan) const {
  if (plan == 0) return context_.recording().all();
  const auto* messages = plans_.messages_of(plan);
  return messages == nullptr ? Recording::Sends() : context_.recording().sends_among(*messages);
}

// Null if the pass is not running. The caller destroys it after the lock.
std::shared_ptr<Pass> Passes::take(PassId pass) {
  const auto found = running_.find(pass);
  if (found == running_.end()) return nullptr;
  std::shared_ptr<Pass> taken = std::move(found->second);
  running_.erase(found);
  return taken;
}

void Passes::succeeded(const PassName& name, Gradients&& gradients,
                       const std::vector<MessageId>& freed) {
  std::shared_ptr<Pass> dropped;
  Recording::Sends graphs;  // these two and `dropped` are destroyed after the lock
  Plans::Plan plan;
  MutexLock lock(mutex_);
  dropped = take(name.pass);
  unsettled_.erase(name.pass);  // at its root a pass ends after all other workers' parts
  if (closed_ || ended_.find(name.pass) != nullptr) return;
  ended_.note(name.pass, {});
  plan = plans_.ended(name, /*has_failed=*/false);
  graphs = context_.recording().take(freed);
  if (dropped && !gradients.empty())
    gradients_.add(dropped->order(), name.pass, std::move(gradients));
}

bool Passes::failed(const PassName& name, const Outcome& why) {
  std::shared_ptr<Pass> pass;
  Gradients discarded;
  Plans::Plan plan;
  {
    MutexLock lock(mutex_);
    const Outcome* ended = ended_.find(name.pass);
    if (ended != nullptr && ended->failed()) return false;
    ended_.note(name.pass, why);
    plan = plans_.ended(name, why.failed());
    unsettled_.erase(name.pass);
    context_.failed_passes().add(name.pass);
    pass = take(name.pass);
    discarded = gradients_.discard(name.pass);
  }
  if (pass) pass->fail(why);
  return true;
}

void Passes::fail_all(const Outcome& why) {
  std::vector<std::shared_ptr<Pass>> passes;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, pass] : running_) passes.push_back(pass);
  }
  for (const auto& pass : passes) pass->fail(why);
}

std::size_t Passes::size() const {
  MutexLock lock(mutex_);
  return running_.size();
}

void Passes::require_no_other(const PassName& pass) const {
  MutexLock lock(mutex_);
  const auto is_other = [&](const auto& one) { return one.first != pass.pass; };
  const bool runs = pass.settled < pass.pass || std::ranges::any_of(running_, is_other);
  if (!runs && !gradients_.may_lose_any()) return;
  throw Error(Blame::Caller, "another pass of context " + to_text(context_.id()) +
                                 " may not have ended on all workers: its gradients are not known "
                                 "yet, but have to be averaged too. Wait for that pass first, "
                                 "begin all passes on one worker, or use another context");
}

Recording::Sends Passes::reach(const PassName& pass, const std::vector<MessageId>& messages) {
  MutexLock lock(mutex_);
  if (closed_)
    // A released context keeps no new plan.
    throw Error(Blame::Cancelled, "the context has been released");
  if (const Outcome* ended = ended_.find(pass.pass); ended != nullptr && ended->failed())
    throw ended->error();
  return plans_.add(pass.plan, context_.recording().sends_of(messages));
}

std::optional<PassId> Passes::planned_for(const Edges& roots) const {
  MutexLock lock(mutex_);
  return plans_.planned_for(roots);
}

void Passes::remember_plan(const Edges& roots, PassId plan) {
  MutexLock lock(mutex_);
  if (closed_ || ended_.find(plan) != nullptr) return;
  plans_.complete(plan, roots);
}

std::size_t Passes::plans() const {
  MutexLock lock(mutex_);
  return plans_.size();
}

void Passes::began(Running pass) {
  std::vector<Running> ended;
  MutexLock lock(mutex_);
  ended = taken_if(running_here_, &has_ended);
  if (!closed_) running_here_.push_back(std::move(pass));
}

std::vector<Passes::Running> Passes::running_here() {
  std::vector<Running> ended;
  MutexLock lock(mutex_);
  ended = taken_if(running_here_, &has_succeeded);
  return running_here_;
}

void Passes::require_alive() const {
  if (!closed_) return;
  throw Error(
      Blame::Caller,
      "autograd context " + to_text(context_.id()) +
          " has been released, and its gradients with it: read them, and step, before it ends");
}

at::Tensor Passes::gradient(const at::Tensor& parameter) {
  MutexLock lock(mutex_);
  require_alive();
  return gradients_.gradient(parameter);
}

std::vector<std::pair<at::Tensor, at::Tensor>> Passes::gradients() {
  MutexLock lock(mutex_);
  require_alive();
  return gradients_.all();
}

void Passes::close(const Outcome& why) {
  Plans plans;
  ContextGradients gradients(self_);
  std::vector<Running> running;  // each holds its pass, which holds this context
  {
    MutexLock lock(mutex_);
    closed_ = true;
    std::swap(plans, plans_);
    std::swap(gradients, gradients_);
    running.swap(running_here_);
  }
  fail_all(why);
}

}  // namespace weft::autograd
