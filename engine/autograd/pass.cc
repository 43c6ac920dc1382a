// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>
#include <utility>

#include <c10/core/GradMode.h>

#include <weft/base/log.h>
#include <weft/engine/autograd/messages.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/call/core.h>
#include <weft/profiling/trace/dump.h>
#include <weft/profiling/trace/host_time.h>
#include <weft/profiling/trace/trace.h>

namespace weft::autograd {

namespace {

// How long backward() of a failed pass waits until the other workers have been told.
constexpr auto kTold = std::chrono::seconds(2);

thread_local Pass* running = nullptr;

namespace traced {
constinit trace::Name gradient{trace::Layer::Engine, "backward of a gradient"};
constinit trace::Name roots{trace::Layer::Engine, "backward of the roots"};
}  // namespace traced

// A gradient on its way, described alike at both ends. With a retained graph, each pass sends one.
trace::About shown(const char* name, const MessageId& message, PassId pass, int peer,
                   std::uint64_t bytes) {
  return {.name = name,
          .sequence = message.call * 2 + (message.reply ? 1 : 0),
          .peer = peer,
          .tag = static_cast<int>(pass & 0x7fffffff),
          .bytes = bytes};
}

template <class Tensors>
std::uint64_t bytes_of(const Tensors& tensors) {
  std::uint64_t bytes = 0;
  for (const at::Tensor& tensor : tensors)
    bytes += tensor.defined() ? tensor.numel() * tensor.itemsize() : 0;
  return bytes;
}

class Running {
 public:
  explicit Running(Pass* pass) : before_(std::exchange(running, pass)) {}
  ~Running() { running = before_; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  Pass* before_;
};

}  // namespace

Pass::Pass(std::shared_ptr<call::AgentCore> core, std::shared_ptr<Context> context, PassName name,
           std::uint64_t order, Deadline deadline)
    : core_(std::move(core)),
      context_(std::move(context)),
      name_(std::move(name)),
      order_(order),
      deadline_(deadline),
      begins_here_(root_of(name_.pass) == core_->self().rank),
      started_(core_->thread_pool()),
      traced_(trace::Operation::begin(core_->identity().member, trace::Kind::Backward,
                                      {.name = "backward", .sequence = name_.pass})),
      adopted_(begins_here_),
      local_(begins_here_),
      gradients_(*context_, name_),
      ending_(core_->thread_pool()) {}

Pass* Pass::current() { return running; }

void Pass::watch() {
  if (deadline_.is_never()) return;
  ending_.watch(*core_->loop(), deadline_, Task([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->expire();
  }));
}

void Pass::start(const std::vector<torch::autograd::Edge>& roots, variable_list gradients) {
  const trace::Range range(traced::roots, {.rank = core_->self().rank});
  const trace::ServeScope counted;
  traced_.runs_here();
  work(local_.start(roots, std::move(gradients)));
  if (local_.end_one()) end_local();
  set_started();
}

void Pass::set_started() {
  if (!has_started_.exchange(true)) started_.set();
}

void Pass::arrive(const NodePtr<SendNode>& send, variable_list gradients) {
  if (gradients.size() > send->num_inputs()) {
    throw Error(Blame::Protocol, "the peer sent " + std::to_string(gradients.size()) +
                                     " gradients for a message of " +
                                     std::to_string(send->num_inputs()) + " tensors");
  }
  if (!local_.take(send->message())) {
    if (ending_.has_ended()) return;
    throw Error(Blame::Caller,
                "a gradient that this pass does not expect, or that has come already");
  }
  const trace::Range range(traced::gradient, {.rank = core_->self().rank});
  const trace::ServeScope counted;
  auto came = trace::Operation::begin(
      core_->identity().member, trace::Kind::Gradient,
      shown("gradient", send->message(), name_.pass, send->to(), bytes_of(gradients)));
  came.runs_here();
  // The gradients were received on this call's streams, which are current.
  torch::autograd::InputBuffer inputs(send->num_inputs());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const auto producer = torch::autograd::InputMetadata(gradients[i]).stream();
    inputs.add(i, std::move(gradients[i]), producer, send->stream(), send.get());
  }
  std::vector<Ready> ready;
  ready.push_back({send, std::move(inputs)});
  work(std::move(ready));
  came.end();
}

// Each task has been counted in the local part.
void Pass::work(std::vector<Ready> ready) {
  const auto self = shared_from_this();
  const Running scope(this);
  const c10::AutoGradMode no_grad(false);
  std::make_heap(ready.begin(), ready.end(), runs_later);
  while (!ready.empty()) {
    std::pop_heap(ready.begin(), ready.end(), runs_later);
    Ready task = std::move(ready.back());
    ready.pop_back();
    if (!ending_.has_ended()) {
      const auto node = task.node;
      try {
        evaluate(std::move(task), ready);
      } catch (...) {
        show_forward(*node);
        caught("in " + node->name());
      }
    }
    if (local_.end_one()) end_local();
  }
}

void Pass::evaluate(Ready&& task, std::vector<Ready>& ready) {
  const auto node = task.node;
  const auto stream = node->stream();
  variable_list outputs =
      run_node(std::move(task), name_.retain_graph,
               [this](const at::Tensor& parameter, const at::Tensor& gradient, std::size_t held) {
                 gradients_.add(parameter, gradient, held);
               });
  if (!ending_.has_ended()) local_.deliver(*node, std::move(outputs), stream, ready);
}

void Pass::send(const RecvNode& node, std::vector<at::Tensor> gradients) {
  const rpc::WorkerInfo& to = node.from();
  auto sent = trace::Operation::begin(
      core_->identity().member, trace::Kind::Gradient,
      shown("send gradient", node.message(), name_.pass, to.rank, bytes_of(gradients)));
  const std::string where = "sending a gradient to " + describe(to);
  sent_.sent(to.rank);
  try {
    // The message belongs to neither the user's call nor its context.
    const weft::detail::ExecutionContextScope outside(nullptr);
    messages::send_gradient(core_, to.rank, {name_, node.message(), std::move(gradients)},
                            deadline_)
        .on_done_light([self = shared_from_this(), where, sent,
                        rank = to.rank](const Future<Outcome>& answered) mutable {
          if (const auto error = answered.error()) {
            const Outcome why = self->context_->outcome(error, where);
            sent.fail(why.error());
            // The call has the same deadline as the pass, and its timer may fire first.
            if (why.blame == static_cast<int>(Blame::Timeout)) {
              self->expire();
            } else {
              self->fail(why);
            }
          } else {
            self->sent_.answered(rank);
            if (answered.value().failed()) self->fail(answered.value());
          }
          sent.end();  // does nothing if it has failed
          self->end_one();
        });
  } catch (...) {
    const Outcome why = context_->outcome(std::current_exception(), where);
    sent.fail(why.error());
    fail(why);
    end_one();
  }
}

void Pass::end_local() {
  if (ending_.has_ended()) return;
  try {
    const Running scope(this);
    const c10::AutoGradMode no_grad(false);
    for (;;) {
      const auto callbacks = local_.take_callbacks();
      if (callbacks.empty()) break;
      for (const auto& callback : callbacks) callback();
    }
    gradients_.renew();
  } catch (...) {
    caught("at the end of its local part");
  }
  end_one();
}

void Pass::end_one() {
  if (!sent_.end_one() || !ending_.succeed()) return;
  const auto freed = name_.retain_graph ? std::vector<MessageId>() : local_.messages();
  context_->passes().succeeded(name_, gradients_.take(), freed);
  traced_.end();
  ending_.set(Outcome());
}

void Pass::fail(const Outcome& why) {
  if (!ending_.fail()) return;
  const Error error = why.error();
  traced_.fail(error);
  if (trace::is_worth_a_dump(error)) trace::dump_after("a backward pass", error);
  const bool news = context_->passes().failed(name_, why);
  local_.stop();
  // The root always tells the others: once backward() returns, no worker has anything of the pass
  // left.
  if (news || begins_here_) tell(why);
  ending_.set(why);
  set_started();
}

// Tells the other workers that the pass has failed.
void Pass::tell(const Outcome& why) {
  const Promise<void> told(core_->thread_pool());
  ending_.tell(told.future());
  const auto end = [told, is_set = std::make_shared<std::atomic<bool>>(false)] {
    if (!is_set->exchange(true)) told.set();
  };
  // On the thread pool, because connecting may take a while and this thread may be the event
  // loop's.
  core_->thread_pool()->run(Task([core = core_, context = context_, name = name_, why, end] {
    core->pauses().after(kTold, Task(end));
    messages::end_pass(core, context, name, why).on_done_light([end](const Future<void>&) {
      end();
    });
  }));
}

void Pass::caught(const std::string& where) noexcept {
  fail(context_->outcome(std::current_exception(), where));
}

void Pass::expire() {
  const LocalPart::Missing missing = local_.missing();
  const std::set<int> others = sent_.unanswered();
  std::string waits, unsaid;
  for (const auto& [rank, gradients] : missing.gradients) {
    waits += (waits.empty() ? "" : ", ") + std::to_string(gradients) + " from rank " +
             std::to_string(rank);
  }
  for (const int rank : others)
    unsaid += (unsaid.empty() ? "rank " : ", rank ") + std::to_string(rank);
  std::string text = "backward in context " + to_text(context_->id()) +
                     " was not done in time on " + describe(core_->self());
  if (!missing.has_counted) text += ": not all workers have said which messages lead to the roots";
  if (!waits.empty()) text += ": gradients have not come: " + waits;
  if (waits.empty() && !unsaid.empty()) text += ": the part of the pass has not ended on " + unsaid;
  // That pass may be missing gradients, and its own error may arrive later than this one.
  if (name_.plan == 0 && !(waits.empty() && unsaid.empty())) {
    text +=
        "; BackwardMode::Fast expects every recorded message to lead to the loss: if a result is "
        "not used, or a call failed, use BackwardMode::Exact";
  }
  if (waits.empty()) text += "; rpc::Agent::set_timeout() sets the limit";
  std::vector<int> ranks(others.begin(), others.end());
  if (!missing.gradients.empty()) ranks.clear();  // those of the missing gradients alone are named
  for (const auto& [rank, gradients] : missing.gradients) ranks.push_back(rank);
  fail(Outcome(Error(Blame::Timeout, text).with_ranks(ranks)));
}

}  // namespace weft::autograd
