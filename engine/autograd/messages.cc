// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <map>
#include <set>

#include <weft/engine/autograd/contexts.h>
#include <weft/engine/autograd/graph.h>
#include <weft/engine/autograd/messages.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>
#include <weft/engine/future/when_all.h>
#include <weft/engine/rref/control.h>
#include <weft/engine/tensor/torch_releases.h>

namespace weft::autograd {

namespace {

std::chrono::milliseconds limit_of(Deadline deadline) {
  return deadline.is_never() ? std::chrono::milliseconds(0)
                             : std::max(deadline.remaining(), std::chrono::milliseconds(1));
}

call::CallOptions call_options(int to, rpc::MessageKind kind, Deadline deadline) {
  return {.to = to, .limit = limit_of(deadline), .kind = kind};
}

template <auto F>
auto send(const std::shared_ptr<call::AgentCore>& core, int to, rpc::MessageKind kind,
          Deadline deadline, typename call::detail::FunctionBody<F>::Arguments arguments) {
  return call::issue<call::detail::FunctionBody<F>>(core, call_options(to, kind, deadline),
                                                    std::move(arguments));
}

// Decrements `count` unless it is zero; true if this made it zero.
bool count_down(std::atomic<std::size_t>& count) {
  std::size_t before = count;
  while (before > 0 && !count.compare_exchange_weak(before, before - 1)) continue;
  return before == 1;
}

// Pause between attempts to end a context on a worker. With it, a context has ended everywhere 10 s
// after its end, if messages arrive again by then, even some workers away from its owner.
constexpr auto kCleanUpPause = std::chrono::seconds(1);

// Ends the context on all workers in place of a lost one: it would have told other workers, which
// are not known here.
void clean_up_behind(const std::shared_ptr<call::AgentCore>& core, int lost, ContextId context) {
  try {
    for (const auto& worker : core->directory().workers()) {
      if (worker.rank == lost || worker == core->self()) continue;
      rref::control<&internal::clean_up>(core, worker.rank, rpc::MessageKind::ContextCleanup,
                                         {context},
                                         {.keeps_on = true, .patient_pause = kCleanUpPause});
    }
  } catch (const std::exception&) {
    // The agent or the store has left: then the job ends.
  }
}

Future<void> tell_failed(const std::shared_ptr<call::AgentCore>& core, int rank,
                         const PassName& name, const Outcome& why) {
  return rref::control<&internal::pass_failed>(core, rank, rpc::MessageKind::Backward, {name, why},
                                               {.on_loop = false});
}

bool is_gone(call::AgentCore& core, int rank, const std::exception_ptr& error) {
  return call::is_not_there(error) || core.liveness().is_lost(rank);
}

// Tells all other workers in place of a lost one, as clean_up_behind() does: they may have
// succeeded.
void tell_failed_behind(const std::shared_ptr<call::AgentCore>& core,
                        const std::shared_ptr<Context>& context, int lost, const PassName& name,
                        const Outcome& why) {
  std::set<int> others;
  try {
    for (const auto& worker : core->directory().workers()) {
      if (worker.rank != lost && worker != core->self()) others.insert(worker.rank);
    }
  } catch (const std::exception&) {
    return;  // the agent or the store has left: then the job ends
  }
  context->failed_passes().replace(name.pass, lost, others);
  for (const int rank : others) {
    tell_failed(core, rank, name, why)
        .on_done_light([core, context, rank, pass = name.pass](const Future<void>& said) {
          if (!said.failed() || is_gone(*core, rank, said.error()))
            context->failed_passes().told(pass, rank);
        });
  }
}

Future<Outcome> released_on(const call::AgentCore& core, ContextId context) {
  return Future<Outcome>::ready({static_cast<int>(Blame::Cancelled),
                                 "backward in context " + to_text(context) + ": " +
                                     describe(core.self()) + " has released the context"});
}

}  // namespace

namespace internal {

// Runs the nodes that the gradients make ready, on the thread pool.
Future<Outcome> gradient(GradientMessage message) {
  const call::CallExecutionContext& here = call::current_call("gradient()");
  const auto core = here.core();
  const auto context = contexts_of(*core).find(message.name.context);
  if (!context) return released_on(*core, message.name.context);
  const auto send = context->recording().send_of(message.message);
  if (!send && context->released()) return released_on(*core, message.name.context);
  const std::string where = "given a gradient by " + describe(here.call().caller);
  if (!send) {
    const Error unknown(Blame::Caller,
                        "an earlier backward has freed this graph: give that one retain_graph, or "
                        "compute the loss again; or its message has not been recorded here");
    return Future<Outcome>::ready(context->outcome(std::make_exception_ptr(unknown), where));
  }
  if (message.gradients.size() > send->num_inputs()) {
    throw Error(Blame::Caller, where + ": there are " + std::to_string(message.gradients.size()) +
                                   " for " + std::to_string(send->num_inputs()) +
                                   " tensors that were sent");
  }
  messages::hear_failed(core, context, message.name.failed);
  const auto joined = context->passes().join(core, message.name, here.call().deadline);
  if (!joined.pass) return Future<Outcome>::ready(joined.outcome);
  const auto ended = joined.pass->ending().outcome();
  const bool first = joined.pass->adopt();
  joined.pass->arrive(send, std::move(message.gradients));
  if (first || ended.done()) return ended;
  return Future<Outcome>::ready({});
}

Future<void> pass_failed(PassName name, Outcome why) {
  if (!why.failed())
    throw Error(Blame::Protocol, "the peer says that a pass has failed, but not with which error");
  const auto core = call::current_call("pass_failed()").core();
  const auto context = contexts_of(*core).find(name.context);
  if (!context || !context->passes().failed(name, why)) return Future<void>::ready();
  return messages::end_pass(core, context, name, why);
}

Future<Outcome> reach(PassName name, std::vector<MessageId> reached) {
  const call::CallExecutionContext& here = call::current_call("reach()");
  const auto core = here.core();
  const auto context = contexts_of(*core).find(name.context);
  if (!context) return released_on(*core, name.context);
  std::vector<NodePtr<SendNode>> fresh;
  try {
    fresh = context->passes().reach(name, reached);
  } catch (const Error&) {
    if (context->released()) return released_on(*core, name.context);
    return Future<Outcome>::ready(context->outcome(
        std::current_exception(),
        "asked which messages lead to the roots by " + describe(here.call().caller)));
  }
  std::vector<Node*> nodes;
  for (const auto& send : fresh) nodes.push_back(send.get());
  return messages::reach(core, context, name, nodes, here.call().deadline);
}

void clean_up(ContextId context) {
  const call::CallExecutionContext& here = call::current_call("clean_up()");
  const auto core = here.core();
  // On the thread pool, because a context may take long to destroy.
  core->thread_pool()->run(Task([core, context, from = here.call().caller] {
    if (const auto known = contexts_of(*core).find(context)) known->remove_worker(from.rank);
    contexts_of(*core).release(context, "it was released on " + describe(from));
  }));
}

}  // namespace internal

namespace messages {

Future<Outcome> send_gradient(const std::shared_ptr<call::AgentCore>& core, int to,
                              GradientMessage message, Deadline deadline) {
  auto way = call_options(to, rpc::MessageKind::Gradient, deadline);
  // Sends the gradients to the devices that the tensors came from: by the inverse of the device map
  // for a call's tensors, by the map itself for a reply's.
  way.back = message.message.caller == to;
  return call::issue<call::detail::FunctionBody<&internal::gradient>>(core, way,
                                                                      {std::move(message)});
}

Future<void> end_pass(const std::shared_ptr<call::AgentCore>& core,
                      const std::shared_ptr<Context>& context, const PassName& name,
                      const Outcome& why) {
  const weft::detail::ExecutionContextScope outside(nullptr);
  std::vector<Future<void>> told;
  for (const int rank : context->recording().workers()) {
    if (rank == core->self().rank || core->closed()) continue;
    const auto behind = [core, context, rank, name, why] {
      if (core->closed()) return;
      core->thread_pool()->run(Task([=] { tell_failed_behind(core, context, rank, name, why); }));
    };
    if (context->recording().has_lost(rank)) {
      behind();
      continue;
    }
    // Repeated until the worker answers: it may have succeeded, and must discard the pass's
    // gradients.
    Promise<void> answered(core->thread_pool());
    tell_failed(core, rank, name, why)
        .on_done_light(
            [core, context, rank, pass = name.pass, behind, answered](const Future<void>& said) {
              if (!said.failed()) {
                context->failed_passes().told(pass, rank);
              } else if (is_gone(*core, rank, said.error())) {
                behind();
              }
              answered.set();
            });
    told.push_back(answered.future());
  }
  return when_all(std::move(told));
}

void hear_failed(const std::shared_ptr<call::AgentCore>& core,
                 const std::shared_ptr<Context>& context, const std::vector<PassId>& failed) {
  if (failed.size() > kMostNamed)
    throw Error(Blame::Protocol, "the peer names " + std::to_string(failed.size()) +
                                     " failed passes; at most " + std::to_string(kMostNamed) +
                                     " fit into a message");
  for (const PassId pass : failed) {
    const Outcome why(static_cast<int>(Blame::Cancelled),
                      "backward in context " + to_text(context->id()) + " has failed; " +
                          describe(core->self()) + " had not been told before");
    // It drops the plan that the pass may have made.
    const PassName name{.context = context->id(), .pass = pass, .plan = pass};
    if (context->passes().failed(name, why)) end_pass(core, context, name, why);
  }
}

Future<Outcome> reach(const std::shared_ptr<call::AgentCore>& core,
                      const std::shared_ptr<Context>& context, const PassName& name,
                      const std::vector<Node*>& nodes, Deadline deadline) {
  const weft::detail::ExecutionContextScope outside(nullptr);
  std::map<rpc::WorkerInfo, std::vector<MessageId>> reached;
  for (const Node* node : reachable_from(nodes)) {
    if (const auto* recv = dynamic_cast<const RecvNode*>(node))
      reached[recv->from()].push_back(recv->message());
  }
  if (reached.empty()) return Future<Outcome>::ready({});
  const Promise<Outcome> all(core->thread_pool());
  // Zero once all have answered without error, or one has failed.
  const auto missing = std::make_shared<std::atomic<std::size_t>>(reached.size());
  for (auto& [worker, messages] : reached) {
    const auto end = [all, missing](const Outcome& how) {
      if (how.failed() ? missing->exchange(0) > 0 : count_down(*missing)) all.set(how);
    };
    const std::string where = "asking " + describe(worker) + " which messages lead to the roots";
    try {
      send<&internal::reach>(core, worker.rank, rpc::MessageKind::Backward, deadline,
                             {name, std::move(messages)})
          .on_done_light([core, context, where, end](const Future<Outcome>& answered) {
            const auto error = answered.error();
            end(error ? context->outcome(error, where) : answered.value());
          });
    } catch (...) {
      end(context->outcome(std::current_exception(), where));
    }
  }
  return all.future();
}

void clean_up(const std::shared_ptr<call::AgentCore>& core, int to, ContextId context) {
  const weft::detail::ExecutionContextScope outside(nullptr);
  const auto behind = [core, to, context] {
    if (!core->closed())
      core->thread_pool()->run(Task([core, to, context] { clean_up_behind(core, to, context); }));
  };
  rref::control<&internal::clean_up>(
      core, to, rpc::MessageKind::ContextCleanup, {context},
      {.overdue = behind, .keeps_on = true, .patient_pause = kCleanUpPause});
}

}  // namespace messages
}  // namespace weft::autograd
