// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include <weft/base/large_copy.h>
#include <weft/base/make_error.h>
#include <weft/transport/mesh/algorithms.h>
#include <weft/transport/mesh/collectives.h>
#include <weft/transport/mesh/core.h>

namespace weft::transport::mesh {

namespace {

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

bool is_aligned(const std::byte* data, Dtype dtype) {
  return reinterpret_cast<std::uintptr_t>(data) % size_of(dtype) == 0;
}

Job job_of(const Operation& operation, const Core& core) {
  return {.call = operation.call,
          .rank = core.rank,
          .ranks = core.ranks,
          .data = operation.data,
          .inputs = operation.inputs,
          .outputs = operation.outputs,
          .layout = &core.layout};
}

}  // namespace

void Collectives::call(std::shared_ptr<Operation> operation) {
  if (core_.is_broken()) return end(*operation, core_.why_broken());
  operation->sequence = next_sequence_++;
  waiting_.push_back(std::move(operation));
  advance();
}

void Collectives::advance() {
  while (!core_.is_broken()) {
    run_released();
    if (core_.is_broken()) return;
    if (!current_) {
      if (!start_next()) return;
      run_released();  // sends first: the peers wait for them
      for (int peer = 0; peer < core_.ranks && !core_.is_broken(); ++peer) consider(peer);
    } else if (current_->steps_left > 0) {
      if (current_->deadline.is_never())
        core_.watch(current_->deadline = Deadline::in(core_.timeout));
      return;
    } else {
      finish();
    }
  }
}

bool Collectives::start_next() {
  if (waiting_.empty()) return false;
  const Fence& ready = waiting_.front()->ready;
  if (!ready.query()) {
    if (awaits_fence_) return false;
    awaits_fence_ = true;
    core_.loop->when(ready, [weak = core_.weak_from_this()] {
      if (const auto core = weak.lock()) core->post(event::Ready());
    });
    return false;
  }
  awaits_fence_ = false;
  current_ = std::move(waiting_.front());
  waiting_.pop_front();
  start(*current_);
  return true;
}

void Collectives::start(Operation& operation) {
  operation.deadline = Deadline::never();  // until it has to wait for peers
  for (int peer = 0; peer < core_.ranks; ++peer) {
    if (const auto& lost = core_.lost(peer)) return core_.fail(*lost);
  }
  const Job job = job_of(operation, core_);
  const Arithmetic arithmetic = arithmetic_of(job.call.dtype, job.call.op, job.ranks);
  // The first barrier ends joining (mesh.cc): along a tree, so that joining opens few connections.
  const bool ends_joining = operation.sequence == 0 && job.call.kind == Kind::Barrier;
  const Choice choice =
      ends_joining ? Choice{Algorithm::Tree}
                   : choose_in_levels(job.call, arithmetic, core_.layout, job.ranks, core_.chooser);
  write(operation.plan, job, choice, core_.scratch);
  operation.steps_left = 0;
  operation.received_bytes = 0;
  held_.resize(static_cast<std::size_t>(core_.ranks));
  start_steps(operation, 0);
}

void Collectives::start_steps(Operation& operation, Plan::Index first) {
  const auto& steps = operation.plan.steps();
  operation.steps_left += static_cast<std::uint32_t>(steps.size()) - first;
  for (Plan::Index index = first; index < steps.size(); ++index) {
    if (steps[index].action == Plan::Action::Receive)
      operation.received_bytes += steps[index].bytes;
    if (steps[index].waits_for == 0) released_.push_back(index);
    // Both ranks of a step need its connection; the higher one opens it.
    if (const int peer = steps[index].peer; peer >= 0) {
      const auto when = core_.rank > peer ? Openings::When::Now : Openings::When::Later;
      core_.expect(peer, Traffic::Collectives, when);
    }
  }
}

void Collectives::run_released() {
  for (std::size_t next = 0; next < released_.size() && !core_.is_broken(); ++next)
    run(released_[next]);
  released_.clear();
}

void Collectives::run(Plan::Index index) {
  Plan::Step& step = current_->plan.steps()[index];
  if (step.state != Plan::State::Waiting) return;
  switch (step.action) {
    case Plan::Action::Send: return send(index);
    case Plan::Action::Copy:
      copy(step);
      if (step.fold != Plan::kNone)
        current_->plan.folds()[step.fold].add_none(current_->plan.arithmetic, core_.scratch);
      return done(step);
    case Plan::Action::Receive:
    case Plan::Action::Fold: return consider(step.peer);
  }
}

void Collectives::copy(const Plan::Step& step) {
  const bool overlap = step.data < step.from + step.bytes && step.from < step.data + step.bytes;
  if (overlap) {
    std::memmove(step.data, step.from, step.bytes);
  } else {
    copy_part(step.data, step.from, step.bytes, current_->received_bytes);
  }
}

void Collectives::send(Plan::Index index) {
  Plan::Step& step = current_->plan.steps()[index];
  step.state = Plan::State::Started;
  Header header;
  header.type = Type::Collective;
  header.call = current_->call;
  header.sequence = current_->sequence;
  header.number = step.number;
  const Op op = core_.send(step.peer, Traffic::Collectives, header,
                           {step.data, step.bytes, Device::host()}, current_);
  if (core_.ended(op, event::StepEnded{current_, index, nullptr, std::nullopt})) done(step);
}

void Collectives::arrived(int peer, const Message& message, const std::byte* in_place) {
  held_.resize(static_cast<std::size_t>(core_.ranks));
  held_[static_cast<std::size_t>(peer)] = {true, message.header, message.payload, in_place};
  consider(peer);
  advance();
}

void Collectives::consider(int peer) {
  Held& held = held_[static_cast<std::size_t>(peer)];
  if (!held.is_here) return;
  if (held.header.sequence < over_) {
    return core_.fail(mismatch(peer, held, last_[held.header.sequence % last_.size()]));
  }
  if (!current_ || held.header.sequence > current_->sequence) return;
  if (differs_in_gathering(held.header.call)) {
    if (held.header.call.bytes > 0) {
      held.is_here = false;
      core_.discard(peer, Traffic::Collectives);  // the peer will send its parts once more
      return;
    }
    stop_gathering();
  }
  if (!fits(peer, held)) return;
  Plan::Step& step = *current_->plan.expected(peer, held.header.number);
  if (step.waits_for == 0) take(peer, step);
}

bool Collectives::differs_in_gathering(const Call& call) const {
  const Call& here = current_->call;
  if (here.kind != Kind::AllToAll || !core_.layout.has_levels()) return false;
  if ((call.bytes == 0) == (here.bytes == 0)) return false;
  Call same = call;
  same.bytes = here.bytes;
  return same == here;
}

// A rank that does not gather sends to every rank by itself, and none of the ranks that gather can
// end before it has had that rank's parts. So each of them gets here before its end, and then sends
// its own parts to every rank as well. The others drop the parts that it has gathered before.
void Collectives::stop_gathering() {
  Operation& operation = *current_;
  operation.call.bytes = 0;
  operation.steps_left -= operation.plan.abandon();
  const Plan::Index first = operation.plan.next();
  append(operation.plan, job_of(operation, core_), {Algorithm::Direct}, core_.scratch);
  start_steps(operation, first);
}

// Returns true if the message belongs to a waiting step; otherwise breaks the communicator.
bool Collectives::fits(int peer, const Held& held) const {
  if (held.header.call != current_->call) {
    core_.fail(mismatch(peer, held, current_->call));
    return false;
  }
  const Plan::Step* const step = current_->plan.expected(peer, held.header.number);
  if (step == nullptr || step->state != Plan::State::Waiting) {
    core_.fail(Error(Blame::Protocol, rank_text(peer) + " sent a part of " +
                                          describe(current_->call) +
                                          " that this rank does not expect: part " +
                                          std::to_string(held.header.number))
                   .with_ranks({peer}));
    return false;
  }
  if (held.payload != step->bytes) {
    core_.fail(Error(Blame::Caller, describe(current_->call) + ": " + rank_text(peer) + " sends " +
                                        elements_text(held.payload, current_->call.dtype) + " to " +
                                        rank_text(core_.rank) + ", which expects " +
                                        elements_text(step->bytes, current_->call.dtype)));
    return false;
  }
  return true;
}

Error Collectives::mismatch(int peer, const Held& held, const Call& here) const {
  const bool is_known = held.header.sequence + last_.size() >= over_;
  return {Blame::Caller,
          "as operation " + std::to_string(held.header.sequence) + " of the group " +
              rank_text(peer) + " called " + describe(held.header.call) + " and " +
              rank_text(core_.rank) + " called " + (is_known ? describe(here) : "something else") +
              "; all ranks must call the same operations in the same order, with tensors of "
              "the same size and dtype"};
}

void Collectives::take(int peer, Plan::Step& step) {
  Plan& plan = current_->plan;
  const std::byte* const in_place = held_[static_cast<std::size_t>(peer)].in_place;
  held_[static_cast<std::size_t>(peer)].is_here = false;
  step.state = Plan::State::Started;
  event::StepEnded ended{current_, plan.index_of(step), nullptr, std::nullopt};
  if (step.action == Plan::Action::Receive) {
    if (core_.ended(receive(peer, step, in_place), std::move(ended))) done(step);
    return;
  }
  Fold& fold = plan.folds()[step.fold];
  const bool reads_in_place =
      step.bytes == 0 || (in_place != nullptr && is_aligned(in_place, fold.takes(plan.arithmetic)));
  if (reads_in_place) {
    fold.add(in_place, plan.arithmetic, core_.scratch);
    if (core_.ended(core_.discard(peer, Traffic::Collectives), std::move(ended))) done(step);
    return;
  }
  ended.block = core_.scratch.take(step.bytes);
  const Slice memory{ended.block.get(), step.bytes, Device::host()};
  if (!core_.ended(core_.accept(peer, Traffic::Collectives, memory, ended.block), ended)) return;
  fold.add(ended.block.get(), plan.arithmetic, core_.scratch);
  core_.scratch.give(std::move(ended.block), step.bytes);
  done(step);
}

Op Collectives::receive(int peer, const Plan::Step& step, const std::byte* in_place) {
  // The connection knows nothing of the other parts, and would copy this one into the caches.
  if (in_place != nullptr && current_->received_bytes >= kLargeCopyBytes) {
    copy_past_caches(step.data, in_place, step.bytes);
    return core_.discard(peer, Traffic::Collectives);
  }
  return core_.accept(peer, Traffic::Collectives, {step.data, step.bytes, Device::host()},
                      current_);
}

void Collectives::step_ended(event::StepEnded& event) {
  if (event.operation != current_) return landed(event);  // that operation has failed
  Plan::Step& step = current_->plan.steps()[event.step];
  if (event.error) {
    step.state = Plan::State::Done;  // nothing lands there any more, so fail() need not wait for it
    // The close of the connection tells more and names the peer, but it is reported only after the
    // remaining messages. A cancelled Op means that the peer is lost.
    const Blame blame =
        event.error->blame() == Blame::Cancelled ? Blame::PeerLost : event.error->blame();
    return core_.fail(Error(blame, "the connection with " + rank_text(step.peer) +
                                       " has failed: " + event.error->text())
                          .with_ranks({step.peer}));
  }
  if (event.block) {
    current_->plan.folds()[step.fold].add(event.block.get(), current_->plan.arithmetic,
                                          core_.scratch);
    core_.scratch.give(std::move(event.block), step.bytes);
  }
  event.operation.reset();
  done(step);
  advance();
}

void Collectives::done(Plan::Step& step) {
  Plan& plan = current_->plan;
  step.state = Plan::State::Done;
  --current_->steps_left;
  for (Plan::Index link = step.first_link; link != Plan::kNone; link = plan.links()[link].next) {
    const Plan::Index later = plan.links()[link].step;
    if (--plan.steps()[later].waits_for == 0) released_.push_back(later);
  }
}

void Collectives::finish() {
  auto operation = std::move(current_);
  last_[over_++ % last_.size()] = operation->call;
  operation->plan.release(core_.scratch);
  operation->data = Slice();
  operation->ready = Fence();
  const Pin pin = std::move(operation->pin);
  operation->is_over = true;
  auto completion = std::exchange(operation->completion, std::nullopt);
  core_.keep(std::move(operation));
  if (completion) completion->finish();
}

void Collectives::lost(int peer) {
  if (!current_) return;
  for (const Plan::Step& step : current_->plan.steps()) {
    if (step.peer == peer && step.state != Plan::State::Done) return core_.fail(*core_.lost(peer));
  }
}

void Collectives::mark_busy(std::vector<bool>& busy) const {
  for (std::size_t peer = 0; peer < held_.size(); ++peer) {
    if (held_[peer].is_here) busy[peer] = true;
  }
  if (!current_) return;
  for (const Plan::Step& step : current_->plan.steps()) {
    if (step.peer >= 0 && step.state != Plan::State::Done)
      busy[static_cast<std::size_t>(step.peer)] = true;
  }
}

Error Collectives::why_late() const {
  std::vector<int> missing;
  for (int peer = 0; peer < core_.ranks; ++peer) {
    for (const Plan::Step& step : current_->plan.steps()) {
      if (step.peer != peer || step.state == Plan::State::Done) continue;
      missing.push_back(peer);
      break;
    }
  }
  return Error(Blame::Timeout, describe(current_->call) + ": not all ranks took part within " +
                                   weft::describe(core_.timeout) +
                                   "; still expected: " + ranks_text(missing))
      .with_ranks(missing);
}

void Collectives::fail(const Error& why) noexcept {
  released_.clear();
  const auto current = std::move(current_);
  const auto waiting = std::move(waiting_);
  waiting_.clear();
  if (current) {
    const auto& steps = current->plan.steps();
    landing_ = static_cast<std::size_t>(
        std::count_if(steps.begin(), steps.end(), [](const Plan::Step& step) {
          return step.action == Plan::Action::Receive && step.state == Plan::State::Started;
        }));
    if (landing_ > 0) {
      failing_ = current;
    } else {
      end(*current, why);
    }
  }
  for (const auto& operation : waiting) end(*operation, why);
}

void Collectives::landed(const event::StepEnded& event) noexcept {
  if (failing_ == nullptr || event.operation != failing_) return;
  if (failing_->plan.steps()[event.step].action == Plan::Action::Receive && --landing_ == 0)
    let_go();
}

void Collectives::let_go() noexcept {
  if (const auto failing = std::move(failing_)) end(*failing, core_.why_broken());
}

void Collectives::end(Operation& operation, const Error& why) noexcept {
  operation.is_over = true;
  operation.error = why.within(std::string(name(operation.call.kind)) + " " + core_.place);
  if (operation.completion) operation.completion->fail(*operation.error);
}

}  // namespace weft::transport::mesh
