// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/contexts.h>
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
    return {static_cast<int>(Blame::Remote), call::text_of(error)};
  }
}

Context::Context(call::AgentCore& core, ContextId id, std::uint64_t steps)
    : core_(core),
      id_(id),
      steps_before_(steps),
      recording_(owner_of(id)),
      failed_passes_(recording_, core.self().rank),
      passes_(*this, core.self().rank) {}

std::shared_ptr<call::AgentCore> Context::core() const { return core_.shared_from_this(); }

codec::AttachGradient Context::receiver(const MessageId& message, const rpc::WorkerInfo& from) {
  auto recv = std::make_shared<NodePtr<RecvNode>>();
  return
      [weak = weak_from_this(), message, from, recv](const at::Tensor& tensor, std::size_t slot) {
        if (!*recv) *recv = make_node<RecvNode>(message, from, weak);
        (*recv)->attach(tensor, slot);
      };
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

void Context::remove_worker(int rank) {
  recording_.remove_worker(rank);
  failed_passes_.remove_worker(rank);  // afterwards: see failed_passes.h
}

void Context::release(const std::string& why) {
  if (released_.exchange(true)) return;
  // The passes first: a pass that begins until then finds its messages, and fails.
  passes_.close({static_cast<int>(Blame::Cancelled),
                 "backward in context " + to_text(id_) + " was cancelled: " + why});
  recording_.close();
}

}  // namespace weft::autograd
