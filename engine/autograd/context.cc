// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <unordered_map>
#include <utility>

#include <c10/util/hash.h>

#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/contexts.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/call/core.h>
#include <weft/engine/rref/references.h>

namespace weft::autograd {

std::string to_text(ContextId id) { return rref::to_text(id); }

Outcome outcome_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const rpc::RemoteError& caught) {
    Outcome outcome(static_cast<int>(Blame::Remote), caught.text());
    outcome.ranks = caught.ranks();
    return outcome;
  } catch (const Error& caught) {
    return Outcome(caught);
  } catch (...) {
    return {static_cast<int>(Blame::Remote), rpc::text_of(error)};
  }
}

std::shared_ptr<rpc::AgentCore> Context::core() const { return core_.shared_from_this(); }

void Context::add_worker(int rank) {
  MutexLock lock(mutex_);
  workers_.insert(rank);
  lost_.erase(rank);
}

bool Context::worker_lost(int rank) {
  MutexLock lock(mutex_);
  return workers_.contains(rank) && lost_.insert(rank).second;
}

bool Context::has_lost(int rank) const {
  MutexLock lock(mutex_);
  return lost_.contains(rank);
}

bool Context::concerns(int rank) const {
  MutexLock lock(mutex_);
  return !lost_.contains(rank) && (workers_.contains(rank) || rank == owner());
}

void Context::remove_worker(int rank) {
  MutexLock lock(mutex_);
  workers_.erase(rank);
  for (auto& [pass, who] : untold_) who.erase(rank);
  std::erase_if(untold_, [](const auto& one) { return one.second.empty(); });
}

std::set<int> Context::workers() const {
  MutexLock lock(mutex_);
  return workers_;
}

void Context::sent(const MessageId& message, int to, const std::vector<at::Tensor>& tensors) {
  auto send = tensors.empty() ? nullptr : make_node<SendNode>(message, to, tensors);
  MutexLock lock(mutex_);
  workers_.insert(to);
  lost_.erase(to);
  if (send && !released_) sends_.emplace(message, std::move(send));
}

void Context::forget(const MessageId& message) {
  NodePtr<SendNode> dropped;
  MutexLock lock(mutex_);
  const auto found = sends_.find(message);
  if (found == sends_.end()) return;
  dropped = std::move(found->second);
  sends_.erase(found);
}

codec::AttachGradient Context::receiver(const MessageId& message, const rpc::WorkerInfo& from) {
  auto recv = std::make_shared<NodePtr<RecvNode>>();
  return
      [weak = weak_from_this(), message, from, recv](const at::Tensor& tensor, std::size_t slot) {
        if (!*recv) *recv = make_node<RecvNode>(message, from, weak);
        (*recv)->attach(tensor, slot);
      };
}

NodePtr<SendNode> Context::send_of(const MessageId& message) const {
  MutexLock lock(mutex_);
  const auto found = sends_.find(message);
  return found == sends_.end() ? nullptr : found->second;
}

std::vector<NodePtr<SendNode>> Context::sends() const {
  std::vector<NodePtr<SendNode>> all;
  MutexLock lock(mutex_);
  for (const auto& [message, send] : sends_) all.push_back(send);
  return all;
}

Context::Joined Context::join(const std::shared_ptr<rpc::AgentCore>& core, const PassName& name,
                              Deadline deadline) {
  MutexLock lock(mutex_);
  if (const auto ended = ended_.find(name.pass); ended != ended_.end())
    return {nullptr, ended->second};
  if (released_) {
    return {nullptr,
            {static_cast<int>(Blame::Cancelled),
             "context " + to_text(id_) + " has been released on " + describe(core->self())}};
  }
  if (const auto found = passes_.find(name.pass); found != passes_.end())
    return {found->second, {}};
  PassId& settled = settled_[root_of(name.pass)];
  if (name.pass < settled || root_of(name.pass) == core->self().rank) {
    return {nullptr,
            {static_cast<int>(Blame::Cancelled), "backward in context " + to_text(id_) +
                                                     ": a message of a pass that is over came to " +
                                                     describe(core->self())}};
  }
  settled = std::max(settled, name.settled);
  fold();
  PassName ours = name;
  ours.failed = to_name();
  auto pass = std::make_shared<Pass>(core, shared_from_this(), std::move(ours), ++begun_, deadline);
  passes_.emplace(name.pass, pass);
  pass->watch();
  pass->expect(sends_in(name.plan));
  return {pass, {}};
}

std::shared_ptr<Pass> Context::begin(const std::shared_ptr<rpc::AgentCore>& core, PassName name,
                                     bool makes_plan, Deadline deadline) {
  MutexLock lock(mutex_);
  if (released_)
    throw Error(Blame::Caller,
                "backward(): autograd context " + to_text(id_) + " has just been released");
  name.pass = contexts_of(*core).next_pass();
  if (makes_plan) name.plan = name.pass;
  unsettled_.insert(name.pass);
  name.settled = *unsettled_.begin();
  name.failed = to_name();
  fold();
  std::erase_if(running_, [](const Running& one) { return one.ended.done(); });
  auto pass = std::make_shared<Pass>(core, shared_from_this(), name, ++begun_, deadline);
  passes_.emplace(name.pass, pass);
  pass->watch();
  return pass;
}

void Context::count(Pass& pass, const std::vector<torch::autograd::Edge>& roots) {
  MutexLock lock(mutex_);
  pass.expect(sends_in(pass.name().plan), roots);
}

void Context::told(PassId pass, int rank) {
  MutexLock lock(mutex_);
  const auto found = untold_.find(pass);
  if (found == untold_.end()) return;
  found->second.erase(rank);
  if (found->second.empty()) untold_.erase(found);
}

void Context::untold(PassId pass, int lost, const std::set<int>& others) {
  MutexLock lock(mutex_);
  const auto found = untold_.find(pass);
  if (found == untold_.end()) return;
  found->second.insert(others.begin(), others.end());
  found->second.erase(lost);
  if (found->second.empty()) untold_.erase(found);
}

std::vector<PassId> Context::untold() const {
  MutexLock lock(mutex_);
  return to_name();
}

std::vector<PassId> Context::to_name() const {
  std::vector<PassId> passes;
  for (const auto& [pass, who] : untold_) passes.push_back(pass);
  return passes;
}

void Context::require_no_other(const PassName& pass) const {
  MutexLock lock(mutex_);
  const auto is_other = [&](const auto& one) { return one.first != pass.pass; };
  const auto may_fail = [&](const auto& one) {
    return root_of(one.second.pass) != core_.self().rank;
  };
  const bool runs = pass.settled < pass.pass || std::ranges::any_of(passes_, is_other);
  if (!runs && std::ranges::none_of(fresh_, may_fail)) return;
  throw Error(Blame::Caller, "another pass of context " + to_text(id_) +
                                 " may not have ended on all workers: its gradients are not known "
                                 "yet, but have to be averaged too. Wait for that pass first, "
                                 "begin all passes on one worker, or use another context");
}

std::vector<NodePtr<SendNode>> Context::sends_in(PassId plan) const {
  std::vector<NodePtr<SendNode>> sends;
  const auto planned = plans_.find(plan);
  if (plan != 0 && planned == plans_.end()) return sends;
  for (const auto& [message, send] : sends_) {
    if (plan == 0 || planned->second.messages.contains(message)) sends.push_back(send);
  }
  return sends;
}

void Context::succeeded(const PassName& name, Gradients&& gradients,
                        const std::vector<MessageId>& freed) {
  const PassId pass = name.pass;
  std::shared_ptr<Pass> dropped;
  std::vector<NodePtr<SendNode>> graphs;  // these two and `dropped` are destroyed after the lock
  Plan plan;
  MutexLock lock(mutex_);
  if (const auto found = passes_.find(pass); found != passes_.end()) {
    dropped = std::move(found->second);
    passes_.erase(found);
  }
  unsettled_.erase(pass);  // at its root a pass ends after all other workers' parts
  if (released_ || ended_.contains(pass)) return;
  plan = remember(name, {});
  for (const MessageId& message : freed) {
    const auto found = sends_.find(message);
    if (found == sends_.end()) continue;
    graphs.push_back(std::move(found->second));
    sends_.erase(found);
  }
  if (dropped && !gradients.empty())
    fresh_.insert_or_assign(dropped->order(), Fresh{pass, std::move(gradients)});
}

bool Context::failed(const PassName& name, const Outcome& why) {
  const PassId id = name.pass;
  std::shared_ptr<Pass> pass;
  Gradients discarded;
  Plan plan;
  {
    MutexLock lock(mutex_);
    const auto ended = ended_.find(id);
    if (ended != ended_.end() && ended->second.failed()) return false;
    plan = remember(name, why);
    unsettled_.erase(id);
    std::set<int> others = workers_;
    others.erase(core_.self().rank);
    if (!others.empty()) untold_.insert_or_assign(id, std::move(others));
    if (untold_.size() > kMostNamed) untold_.erase(untold_.begin());
    if (const auto found = passes_.find(id); found != passes_.end()) {
      pass = std::move(found->second);
      passes_.erase(found);
    }
    const auto found =
        std::ranges::find_if(fresh_, [&](const auto& one) { return one.second.pass == id; });
    if (found != fresh_.end()) {
      discarded = std::move(found->second.gradients);
      fresh_.erase(found);
    }
  }
  if (pass) pass->fail(why);
  return true;
}

// Returns a plan that no other pass will use, or its roots; the caller destroys that after the
// lock.
Context::Plan Context::remember(const PassName& pass, const Outcome& outcome) {
  if (ended_.insert_or_assign(pass.pass, outcome).second) endings_.push_back(pass.pass);
  if (endings_.size() > kRememberedPasses) {
    ended_.erase(endings_.front());
    endings_.pop_front();
  }
  const auto found = plans_.find(pass.plan);
  if (found == plans_.end()) return {};
  Plan& plan = found->second;
  const auto kept = planned_.find(plan.roots);
  // Other passes use a plan only after the pass that made it has succeeded.
  if (!pass.retain_graph || (outcome.failed() && pass.plan == pass.pass)) {
    if (kept != planned_.end() && kept->second == found->first) planned_.erase(kept);
    Plan dropped = std::move(plan);
    plans_.erase(found);
    return dropped;
  }
  if (plan.roots.empty()) return {};
  if (kept == planned_.end()) {
    planned_.emplace(plan.roots, found->first);
  } else if (kept->second != found->first) {
    // A pass that ran at the same time has kept a plan for these roots first.
    return {.messages = {}, .roots = std::exchange(plan.roots, {})};
  }
  return {};
}

void Context::began(Running pass) {
  MutexLock lock(mutex_);
  std::erase_if(running_, [](const Running& one) { return one.ended.done(); });
  if (!released_) running_.push_back(std::move(pass));
}

std::vector<Context::Running> Context::running_here() {
  MutexLock lock(mutex_);
  std::erase_if(running_,
                [](const Running& one) { return one.ended.done() && !one.ended.failed(); });
  return running_;
}

std::size_t Context::passes() const {
  MutexLock lock(mutex_);
  return passes_.size();
}

void Context::fail_passes(const Outcome& why) {
  std::vector<std::shared_ptr<Pass>> passes;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, pass] : passes_) passes.push_back(pass);
  }
  for (const auto& pass : passes) pass->fail(why);
}

std::vector<NodePtr<SendNode>> Context::reach(const PassName& pass,
                                              const std::vector<MessageId>& messages) {
  std::vector<NodePtr<SendNode>> fresh;
  MutexLock lock(mutex_);
  if (released_)
    // A released context keeps no new plan.
    throw Error(Blame::Cancelled, "the context has been released");
  if (const auto ended = ended_.find(pass.pass); ended != ended_.end() && ended->second.failed())
    throw ended->second.error();
  auto& planned = plans_[pass.plan].messages;
  for (const MessageId& message : messages) {
    const auto found = sends_.find(message);
    if (found == sends_.end()) {
      throw Error(Blame::Caller,
                  "an earlier backward has freed this graph: give that one retain_graph, or "
                  "compute the loss again; or the loss was not computed in this context");
    }
    if (planned.insert(message).second) fresh.push_back(found->second);
  }
  return fresh;
}

std::size_t Context::plans() const {
  MutexLock lock(mutex_);
  return plans_.size();
}

std::size_t Context::HashOfEdges::operator()(const Edges& edges) const noexcept {
  std::size_t hash = edges.size();
  for (const auto& edge : edges)
    hash = c10::hash_combine(hash, std::hash<torch::autograd::Edge>()(edge));
  return hash;
}

std::optional<PassId> Context::planned_for(const Edges& roots) const {
  MutexLock lock(mutex_);
  const auto found = planned_.find(roots);
  return found == planned_.end() ? std::nullopt : std::optional(found->second);
}

void Context::remember_plan(const Edges& roots, PassId plan) {
  MutexLock lock(mutex_);
  if (released_ || ended_.contains(plan)) return;
  plans_[plan].roots = roots;
}

// Adds to the sum the gradients of passes that cannot fail elsewhere any more: of all passes with
// their root here, which have ended on all other workers, and of another root's passes that the
// root has settled. If a pass that may still fail replaces the sum, the passes that began after it
// wait, since they are added to the sum that it makes.
void Context::fold() {
  for (auto it = fresh_.begin(); it != fresh_.end();) {
    Fresh& one = it->second;
    const int root = root_of(one.pass);
    const auto settled = settled_.find(root);
    if (root == core_.self().rank || (settled != settled_.end() && one.pass < settled->second)) {
      gradients_.merge(std::move(one.gradients));
      it = fresh_.erase(it);
    } else if (one.gradients.replaces_any()) {
      return;
    } else {
      ++it;
    }
  }
}

Outcome Context::outcome(const std::exception_ptr& error, const std::string& where) const {
  Outcome what = outcome_of(error);
  // By libtorch's text for a freed graph: this is the caller's mistake, on any worker.
  if (what.text.find("Trying to backward through the graph a second time") != std::string::npos)
    what.blame = static_cast<int>(Blame::Caller);
  // libtorch reports that a graph's tensor has changed, but not by whom.
  if (what.text.find("modified by an inplace operation") != std::string::npos) {
    if (const auto other = contexts_of(core_).stepped_by_other(id_, steps_before_)) {
      what.text += "; another trainer's step did it: DistributedOptimizer::step() in context " +
                   to_text(*other) + " of rank " + std::to_string(*other >> 48) +
                   " changed weights here between the forward of this context and this backward. "
                   "Let the trainers take "
                   "turns, so that no step comes between another's forward and backward, or take "
                   "torch::optim::SGD, which "
                   "writes weights such that the other's backward uses the new ones";
    }
  }
  what.text = "backward in context " + to_text(id_) + " failed on " + describe(core_.self()) +
              ", " + where + ": " + what.text;
  return what;
}

void Context::require_alive() const {
  if (!released_) return;
  throw Error(
      Blame::Caller,
      "autograd context " + to_text(id_) +
          " has been released, and its gradients with it: read them, and step, before it ends");
}

at::Tensor Context::gradient(const at::Tensor& parameter) {
  MutexLock lock(mutex_);
  require_alive();
  fold();
  const at::Tensor* found = gradients_.find(parameter);
  at::Tensor sum = found == nullptr ? at::Tensor() : *found;
  for (const auto& [order, one] : fresh_) {
    const at::Tensor* more = one.gradients.find(parameter);
    if (more == nullptr || !more->defined()) continue;
    sum = one.gradients.replaces(parameter) ? *more : sum_of(sum, *more);
  }
  return sum;
}

std::vector<std::pair<at::Tensor, at::Tensor>> Context::gradients() {
  MutexLock lock(mutex_);
  require_alive();
  fold();
  auto all = gradients_.all();
  std::unordered_map<const c10::TensorImpl*, std::size_t> places;
  for (const auto& [parameter, gradient] : all)
    places.emplace(parameter.unsafeGetTensorImpl(), places.size());
  for (const auto& [order, one] : fresh_) {
    for (const auto& [parameter, gradient] : one.gradients.all()) {
      const auto [place, is_first] =
          places.try_emplace(parameter.unsafeGetTensorImpl(), all.size());
      if (is_first) {
        all.emplace_back(parameter, gradient);
      } else {
        at::Tensor& sum = all[place->second].second;
        sum = one.gradients.replaces(parameter) ? gradient : sum_of(sum, gradient);
      }
    }
  }
  return all;
}

void Context::release(const std::string& why) {
  std::map<MessageId, NodePtr<SendNode>> sends;
  std::map<PassId, Plan> plans;
  std::unordered_map<Edges, PassId, HashOfEdges> planned;
  std::map<std::uint64_t, Fresh> fresh;
  Gradients gradients;
  std::vector<Running> running;  // each holds its pass, which holds this context
  {
    MutexLock lock(mutex_);
    if (released_.exchange(true)) return;
    running.swap(running_);
    sends.swap(sends_);
    planned.swap(planned_);
    fresh.swap(fresh_);
    plans.swap(plans_);
    std::swap(gradients, gradients_);
  }
  fail_passes({static_cast<int>(Blame::Cancelled),
               "backward in context " + to_text(id_) + " was cancelled: " + why});
}

}  // namespace weft::autograd
