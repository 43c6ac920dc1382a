// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

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

Pass::Pass(std::shared_ptr<rpc::AgentCore> core, std::shared_ptr<Context> context, PassName name,
           std::uint64_t order, Deadline deadline)
    : core_(std::move(core)),
      context_(std::move(context)),
      name_(std::move(name)),
      order_(order),
      deadline_(deadline),
      begins_here_(root_of(name_.pass) == core_->self().rank),
      promise_(core_->thread_pool()),
      started_(core_->thread_pool()),
      traced_(trace::Operation::begin(core_->identity().member, trace::Kind::Backward,
                                      {.name = "backward", .sequence = name_.pass})),
      adopted_(begins_here_),
      told_(Future<void>::ready()) {}

Pass* Pass::current() { return running; }

void Pass::watch() {
  if (deadline_.is_never()) return;
  MutexLock lock(mutex_);
  timer_ = core_->loop()->at(deadline_, Task([weak = weak_from_this()] {
                               if (const auto self = weak.lock()) self->expire();
                             }));
}

void Pass::expect(std::vector<NodePtr<SendNode>> sends,
                  const std::vector<torch::autograd::Edge>& roots) {
  MutexLock lock(mutex_);
  std::vector<NodePtr<Node>> from;
  for (const auto& send : sends) {
    from.push_back(send);
    expected_.emplace(send->message(), send->to());
  }
  for (const auto& root : roots) {
    from.push_back(root.function);
    graph_.count_edge(root);
  }
  graph_.count_from(from);
  local_ += static_cast<std::int64_t>(sends.size());
  sends_ = std::move(sends);
  has_counted_ = true;
  // Only the root starts; other workers wait for gradients alone.
  if (!begins_here_) --local_;
}

void Pass::start(const std::vector<torch::autograd::Edge>& roots, variable_list gradients) {
  const trace::Range range(traced::roots, {.rank = core_->self().rank});
  const trace::ServeScope counted;
  traced_.runs_here();
  std::vector<Ready> ready;
  {
    MutexLock lock(mutex_);
    for (std::size_t i = 0; i < roots.size(); ++i) {
      const auto producer = torch::autograd::InputMetadata(gradients[i]).stream();
      if (auto task = graph_.deliver(roots[i], std::move(gradients[i]), producer))
        ready.push_back(std::move(*task));
    }
    local_ += static_cast<std::int64_t>(ready.size());
  }
  work(std::move(ready));
  if (--local_ == 0) end_local();
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
  {
    MutexLock lock(mutex_);
    if (expected_.erase(send->message()) == 0) {
      if (ended_) return;
      throw Error(Blame::Caller,
                  "a gradient that this pass does not expect, or that has come already");
    }
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

// Each task has been counted in local_.
void Pass::work(std::vector<Ready> ready) {
  const auto self = shared_from_this();
  const Running scope(this);
  const c10::AutoGradMode no_grad(false);
  std::make_heap(ready.begin(), ready.end(), runs_later);
  while (!ready.empty()) {
    std::pop_heap(ready.begin(), ready.end(), runs_later);
    Ready task = std::move(ready.back());
    ready.pop_back();
    if (!ended_) {
      const auto node = task.node;
      try {
        evaluate(std::move(task), ready);
      } catch (...) {
        show_forward(*node);
        caught("in " + node->name());
      }
    }
    if (--local_ == 0) end_local();
  }
}

void Pass::evaluate(Ready&& task, std::vector<Ready>& ready) {
  const auto node = task.node;
  const auto stream = node->stream();
  variable_list outputs =
      run_node(std::move(task), name_.retain_graph,
               [this](const at::Tensor& parameter, const at::Tensor& gradient, std::size_t held) {
                 MutexLock lock(mutex_);
                 gradients_.add(parameter, gradient, held);
               });
  MutexLock lock(mutex_);
  if (ended_) return;
  for (std::size_t i = 0; i < outputs.size() && i < node->num_outputs(); ++i) {
    const auto& edge = node->next_edge(i);
    if (!edge.is_valid()) continue;
    auto next = graph_.deliver(edge, std::move(outputs[i]), stream);
    if (!next) continue;
    ++local_;
    ready.push_back(std::move(*next));
    std::push_heap(ready.begin(), ready.end(), runs_later);
  }
}

void Pass::send(const RecvNode& node, std::vector<at::Tensor> gradients) {
  ++open_;
  const rpc::WorkerInfo& to = node.from();
  auto sent = trace::Operation::begin(
      core_->identity().member, trace::Kind::Gradient,
      shown("send gradient", node.message(), name_.pass, to.rank, bytes_of(gradients)));
  const std::string where = "sending a gradient to " + describe(to);
  {
    MutexLock lock(mutex_);
    reached_.insert(to.rank);
    unanswered_.insert(to.rank);
  }
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
            self->answered(rank);
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

void Pass::answered(int rank) {
  MutexLock lock(mutex_);
  const auto one = unanswered_.find(rank);
  if (one != unanswered_.end()) unanswered_.erase(one);
}

void Pass::at_end(std::function<void()> callback) {
  MutexLock lock(mutex_);
  at_end_.push_back(std::move(callback));
}

bool Pass::reached(int rank) const {
  MutexLock lock(mutex_);
  return reached_.contains(rank);
}

at::Tensor& Pass::gradient(const at::Tensor& parameter) {
  MutexLock lock(mutex_);
  return gradients_.of(parameter);
}

void Pass::end_local() {
  if (ended_) return;
  try {
    const Running scope(this);
    const c10::AutoGradMode no_grad(false);
    for (;;) {
      std::vector<std::function<void()>> callbacks;
      {
        MutexLock lock(mutex_);
        callbacks.swap(at_end_);
      }
      if (callbacks.empty()) break;
      for (const auto& callback : callbacks) callback();
    }
    MutexLock lock(mutex_);
    gradients_.renew();
  } catch (...) {
    caught("at the end of its local part");
  }
  end_one();
}

void Pass::end_one() {
  if (--open_ > 0) return;
  if (ended_.exchange(true)) return;
  Gradients gradients;
  std::vector<MessageId> freed;
  {
    MutexLock lock(mutex_);
    gradients = std::move(gradients_);
    timer_ = {};
    for (const auto& send : sends_) {
      if (!name_.retain_graph) freed.push_back(send->message());
    }
  }
  context_->passes().succeeded(name_, std::move(gradients), freed);
  traced_.end();
  promise_.set(Outcome());
}

void Pass::fail(const Outcome& why) {
  if (ended_.exchange(true)) return;
  *failed_ = true;
  const Error error = why.error();
  traced_.fail(error);
  if (trace::is_worth_a_dump(error)) trace::dump_after("a backward pass", error);
  const bool news = context_->passes().failed(name_, why);
  EventLoop::Registration timer;
  {
    MutexLock lock(mutex_);
    timer = std::move(timer_);
    expected_.clear();
  }
  // The root always tells the others: once backward() returns, no worker has anything of the pass
  // left.
  if (news || begins_here_) {
    const Promise<void> told(core_->thread_pool());
    {
      MutexLock lock(mutex_);
      told_ = told.future();
    }
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
  promise_.set(why);
  set_started();
}

Future<void> Pass::told() const {
  MutexLock lock(mutex_);
  return told_;
}

void Pass::absorb(const at::Tensor& parameter) {
  context_->passes().require_no_other(name_);
  const at::Tensor earlier = context_->passes().gradient(parameter);
  MutexLock lock(mutex_);
  gradients_.absorb(parameter, earlier);
}

void Pass::caught(const std::string& where) noexcept {
  fail(context_->outcome(std::current_exception(), where));
}

void Pass::expire() {
  std::map<int, int> missing;  // number of gradients by the worker that should send them
  std::set<int> others;
  bool has_counted = false;
  {
    MutexLock lock(mutex_);
    has_counted = has_counted_;
    for (const auto& [message, to] : expected_) ++missing[to];
    others.insert(unanswered_.begin(), unanswered_.end());
  }
  std::string waits, unsaid;
  for (const auto& [rank, gradients] : missing) {
    waits += (waits.empty() ? "" : ", ") + std::to_string(gradients) + " from rank " +
             std::to_string(rank);
  }
  for (const int rank : others)
    unsaid += (unsaid.empty() ? "rank " : ", rank ") + std::to_string(rank);
  std::string text = "backward in context " + to_text(context_->id()) +
                     " was not done in time on " + describe(core_->self());
  if (!has_counted) text += ": not all workers have said which messages lead to the roots";
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
  if (!missing.empty()) ranks.clear();  // those of the missing gradients alone are named
  for (const auto& [rank, gradients] : missing) ranks.push_back(rank);
  fail(Outcome(Error(Blame::Timeout, text).with_ranks(ranks)));
}

}  // namespace weft::autograd
