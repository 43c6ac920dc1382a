// SPDX-License-Identifier: Apache-2.0
// The messages of workers about contexts and passes. They are ordinary calls of Weft's own
// functions.
#pragma once

#include <memory>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/engine/autograd/context.h>
#include <weft/engine/future/future.h>

namespace weft::autograd {

// Gradients for the tensors of a message, by slot. An undefined one means none, and missing ones at
// the end do as well.
struct GradientMessage {
  PassName name;
  MessageId message;
  std::vector<at::Tensor> gradients;
  WEFT_FIELDS(name, message, gradients)
};

// The functions that these messages call.
namespace internal {
Future<Outcome> gradient(GradientMessage message);
Future<void> pass_failed(PassName name, Outcome why);
Future<Outcome> reach(PassName name, std::vector<MessageId> messages);
void clean_up(ContextId context);
}  // namespace internal

namespace messages {

// Sends gradients. The first message of a pass to a worker is answered when the pass has ended
// there, later ones when the nodes that they make ready have run. Throws if the message cannot be
// sent.
Future<Outcome> send_gradient(const std::shared_ptr<call::AgentCore>& core, int to,
                              GradientMessage message, Deadline deadline);
// Tells all workers that know the context that the pass has failed, and these tell others; in place
// of a lost worker, tells all workers. The future is done when each worker has answered, is lost,
// or could not be told; the latter is told by the next pass. It never fails.
Future<void> end_pass(const std::shared_ptr<call::AgentCore>& core,
                      const std::shared_ptr<Context>& context, const PassName& name,
                      const Outcome& why);
// Fails the passes that another worker names as failed, unless they are known to have failed, and
// tells other workers. Throws Caller for more than kMostNamed.
void hear_failed(const std::shared_ptr<call::AgentCore>& core,
                 const std::shared_ptr<Context>& context, const std::vector<PassId>& failed);
// Adds to the pass's plan the messages that the nodes lead to on other workers, and the messages
// that those lead to. The future has the outcome, at once if one worker fails; it never fails
// itself.
Future<Outcome> reach(const std::shared_ptr<call::AgentCore>& core,
                      const std::shared_ptr<Context>& context, const PassName& name,
                      const std::vector<torch::autograd::Node*>& nodes, Deadline deadline);
// Ends the context on that worker. Retried for minutes; nobody waits for it. If the worker cannot
// be told, tells all others, since it may have passed the context on.
void clean_up(const std::shared_ptr<call::AgentCore>& core, int to, ContextId context);

}  // namespace messages
}  // namespace weft::autograd
