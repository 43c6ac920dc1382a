// What workers tell each other about contexts and passes: calls like any other, of functions that
// Weft has.
#pragma once

#include <memory>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/engine/autograd/context.h>
#include <weft/engine/future/future.h>

namespace weft::autograd {

// Gradients for the tensors of a message, by slot; undefined where there is none, as are those
// behind the last.
struct GradientMessage {
  PassName name;
  MessageId message;
  std::vector<at::Tensor> gradients;
  WEFT_FIELDS(name, message, gradients)
};

// The functions that are called.
namespace internal {
Future<Outcome> gradient(GradientMessage message);
Future<void> pass_failed(PassName name, Outcome why);
Future<Outcome> reach(PassName name, std::vector<MessageId> messages);
void clean_up(ContextId context);
}  // namespace internal

namespace messages {

// Answered when the pass has ended there, if this is the first of it; else once it has run as far
// as this takes it. Throws what sending throws.
Future<Outcome> send_gradient(const std::shared_ptr<rpc::AgentCore>& core, int to,
                              GradientMessage message, Deadline deadline);
// Tells all that know the context that the pass has failed, and they tell others; in the place of
// one that is gone, all workers. Done when those that are not gone have answered, or cannot be
// told, and are told with the next pass; never fails.
Future<void> end_pass(const std::shared_ptr<rpc::AgentCore>& core,
                      const std::shared_ptr<Context>& context, const PassName& name,
                      const Outcome& why);
// What another worker names as failed: what is news ends here, and goes on. Throws Caller for more
// than kMostNamed.
void hear_failed(const std::shared_ptr<rpc::AgentCore>& core,
                 const std::shared_ptr<Context>& context, const std::vector<PassId>& failed);
// What the nodes lead to on other workers, and what that leads to, takes part in the pass's plan.
// Gives how that failed, at once; never fails itself.
Future<Outcome> reach(const std::shared_ptr<rpc::AgentCore>& core,
                      const std::shared_ptr<Context>& context, const PassName& name,
                      const std::vector<torch::autograd::Node*>& nodes, Deadline deadline);
// Retried for minutes; nobody waits for it. If that worker cannot be told, all others are, for it
// may have passed the context on.
void clean_up(const std::shared_ptr<rpc::AgentCore>& core, int to, ContextId context);

}  // namespace messages
}  // namespace weft::autograd
