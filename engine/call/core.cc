// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

#include <c10/core/StreamGuard.h>

#include <weft/base/config.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/inbound.h>
#include <weft/engine/call/message.h>
#include <weft/engine/call/peer.h>
#include <weft/engine/codec/sent_bytes.h>
#include <weft/engine/store/store.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/profiling/trace/dump.h>

namespace weft::rpc {

namespace {

// How long the end of an agent waits for its GPUs at most.
constexpr auto kReclaim = std::chrono::seconds(5);

Error unmapped(const c10::Device& from, const WorkerInfo& self, const WorkerInfo& to, Way way) {
  const std::string what = "a tensor on " + from.str() + " cannot be sent ";
  switch (way) {
    case Way::Call:
      return Error(Blame::Caller, what + "to " + describe(to) + ": rpc::Options::device_maps[\"" +
                                      to.name +
                                      "\"] has no entry for it; add one, or send tensor.cpu()");
    case Way::Reply:
      return Error(
          Blame::Caller,
          what + "back to " + describe(to) +
              ": there is no response device mapping for it; have rpc::Options::device_maps[\"" +
              self.name + "\"] of " + to.name + " map one of its devices to " + from.str() +
              ", or return tensor.cpu()");
    case Way::Back: break;
  }
  return Error(Blame::Caller, "a gradient on " + from.str() + " cannot be sent back to " +
                                  describe(to) + ": rpc::Options::device_maps[\"" + self.name +
                                  "\"] of " + to.name + " maps none of its devices to " +
                                  from.str());
}

}  // namespace

Error Outcome::error() const { return Error(blame_from(blame), text).with_ranks(ranks); }

Outcome outcome_of(const std::exception_ptr& error) {
  return error ? Outcome(to_error(error, Blame::Remote)) : Outcome();
}

std::string describe(const WorkerInfo& worker) {
  return worker.name + " (rank " + std::to_string(worker.rank) + ")";
}

namespace {

// An error's text names only the first and the last of the calls that it has passed through.
constexpr std::size_t kFirstNamed = 4;
constexpr std::size_t kLastNamed = 4;
constexpr std::string_view kThrew = " threw: ";
constexpr std::string_view kBetween = " calls between …";

// The number of calls that a part of such a text stands for.
std::size_t calls_of(std::string_view part) {
  constexpr std::string_view kBegin = "… ";
  std::size_t number = 1;
  if (part.starts_with(kBegin) && part.ends_with(kBetween))
    std::from_chars(part.data() + kBegin.size(), part.data() + part.size(), number);
  return number;
}

// Shortens the text of an error that has passed through nested calls, each of which has added "f on
// worker1 threw: " in front. Of many calls, the text keeps the first ones, the last ones, the
// cause, and the number of the calls between.
std::string shortened(const std::string& text) {
  std::vector<std::string_view> parts;  // the last is the cause
  std::size_t begin = 0;
  for (auto end = text.find(kThrew); end != std::string::npos; end = text.find(kThrew, begin)) {
    parts.push_back(std::string_view(text).substr(begin, end - begin));
    begin = end + kThrew.size();
  }
  if (parts.size() <= kFirstNamed + kLastNamed + 1) return text;
  std::string result;
  std::size_t between = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const bool is_named = i < kFirstNamed || i + kLastNamed >= parts.size();
    if (!is_named) {
      between += calls_of(parts[i]);
      if (i + kLastNamed + 1 < parts.size()) continue;
      result += "… " + std::to_string(between) + std::string(kBetween);
    } else {
      result += parts[i];
    }
    result += kThrew;
  }
  return result + text.substr(begin);
}

}  // namespace

RemoteError::RemoteError(std::string worker, std::string function, std::string text,
                         const std::vector<int>& ranks)
    : Error(Error(Blame::Remote, function + " on " + worker + std::string(kThrew) + shortened(text))
                .with_ranks(ranks)),
      worker_(std::move(worker)),
      function_(std::move(function)),
      text_(shortened(text)) {}

AgentCore::AgentCore(Parts parts)
    : parts_(std::move(parts)),
      member_(parts_.self.rank < 0
                  ? trace::Member()
                  : trace::Member::join({"agent", parts_.self.name, parts_.self.rank, {}})),
      loop_(std::make_shared<EventLoop>("rpc " + parts_.self.name, EventLoop::Thread::Given)),
      routes_(parts_.options.transports),
      thread_pool_(ThreadPool::make(parts_.self.name, parts_.options.worker_threads, loop_)),
      directory_(parts_.store, parts_.self, parts_.world_size, !parts_.options.secret.empty(),
                 {parts_.devices->count(), parts_.options.devices, parts_.options.device_maps}),
      own_calls_(trace::depth(trace::Queue::Calls, parts_.self.name)),
      timeout_(parts_.options.timeout.count()),
      references_(parts_.make_references(*this)),
      contexts_(parts_.make_contexts(*this)) {}

std::shared_ptr<AgentCore> AgentCore::make(Parts parts, const std::string& local_address,
                                           Deadline deadline) {
  std::shared_ptr<AgentCore> core(new AgentCore(std::move(parts)));
  core->listen(local_address, deadline);
  return core;
}

void AgentCore::listen(const std::string& local_address, Deadline deadline) {
  transport::ListenOptions options;
  options.loop = loop_;
  options.interface_address = local_address;
  const auto accepts = [&](bool carries_devices) {
    options.accepted = [weak = weak_from_this(),
                        carries_devices](std::shared_ptr<transport::Connection> connection) {
      if (const auto core = weak.lock()) core->accept(std::move(connection), carries_devices);
    };
    return routes_.listen(options);
  };
  std::vector<transport::Offer> offers;
  std::vector<transport::Offer> device_offers;
  try {
    token_ = directory_.token(deadline);
    offers = accepts(false);
    // A connection that carries device memory must be made so at both ends, and the maps of the
    // other workers are not known yet.
    if (tensor::CudaDevices::built()) device_offers = accepts(true);
  } catch (...) {
    if (parts_.world_size) give_up_rank(*parts_.store, parts_.self.rank);
    throw;
  }
  const long announcements = parts_.world_size ? 0 : announced(*parts_.store);
  generation_ = directory_.join(
      offers, device_offers, deadline,
      [this](const Directory::Entry& worker, Deadline limit) { return knock(worker, limit); },
      parts_.options.wait_reports);
  if (parts_.self.rank < 0) {
    parts_.self = directory_.self();
    member_ = trace::Member::join({"agent", parts_.self.name, parts_.self.rank, {}});
  }
  gpus_ = directory_.gpus();
  parts_.devices->prepare_connections(gpus_);
  // Other workers may have joined earlier and have called already. The functions that they call
  // must find all workers.
  std::vector<Early> early;
  {
    std::lock_guard lock(mutex_);
    joined_ = true;
    generations_.emplace(parts_.self.rank, generation_);
    early.swap(early_);
  }
  for (auto& one : early) serve(std::move(one.connection), one.carries_devices);
  loop_->post(Task([weak = weak_from_this()] {
    if (const auto core = weak.lock()) core->look_for_waits();
  }));
  if (!parts_.world_size) follow_others(announcements);
}

AgentCore::~AgentCore() {
  leave();
  reclaiming_.may_block = !loop_->inside();
}

AgentCore::Reclaiming::~Reclaiming() {
  devices.end_connections();
  if (may_block) devices.reclaim(Deadline::in(kReclaim));
}

void AgentCore::accept(std::shared_ptr<transport::Connection> connection, bool carries_devices) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    if (!joined_) return early_.push_back({std::move(connection), carries_devices});
  }
  serve(std::move(connection), carries_devices);
}

void AgentCore::serve(std::shared_ptr<transport::Connection> connection, bool carries_devices) {
  if (carries_devices) {
    try {
      connection = parts_.devices->connection_over(std::move(connection), loop_);
    } catch (const Error& error) {
      return log::warn(describe(parts_.self) +
                       " refused a connection that carries device memory: " + error.text());
    }
  }
  const auto inbound =
      std::make_shared<Inbound>(weak_from_this(), std::move(connection), carries_devices);
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    inbound_.emplace(inbound.get(), inbound);
  }
  inbound->start();
}

void AgentCore::require_own() const {
  if (is_inherited()) made_in_.throw_inherited("agent " + describe(parts_.self));
}

void AgentCore::require_open() const {
  require_own();
  if (!closed_) return;
  if (taken_for_lost_) throw why_gone();
  throw Error(
      Blame::Caller,
      "agent " + describe(parts_.self) +
          " is not initialized any more: it has shut down or left, and is used after deletion");
}

Recipient AgentCore::recipient(const Destination& destination) {
  require_open();
  return std::visit([this](const auto& target) { return directory_.recipient(target); },
                    destination.target());
}

std::chrono::milliseconds usable_limit(std::chrono::milliseconds given, const std::string& what) {
  if (given.count() < 0) {
    throw Error(Blame::Caller,
                what + " is " + weft::describe(given) + "; it must be positive, or 0 for no limit");
  }
  return given == kNoTimeout ? std::chrono::milliseconds(0)
                             : std::min(given, group::kLongestTimeout);
}

std::chrono::milliseconds AgentCore::limit_of(const Destination& destination) const {
  const auto given = destination.timeout();
  return given && *given != kAgentTimeout ? usable_limit(*given, "a call's time limit") : timeout();
}

void AgentCore::set_timeout(std::chrono::milliseconds limit) {
  timeout_ = usable_limit(limit, "the time limit of calls").count();
}

std::shared_ptr<Peer> AgentCore::peer(const Recipient& to) {
  for (int again = 0;; ++again) {
    std::shared_ptr<Peer> other;  // a peer of another generation that has the rank
    {
      std::lock_guard lock(mutex_);
      if (const auto found = peers_.find(to.rank); found != peers_.end()) {
        if (to.fits(found->second->generation())) return found->second;
        other = found->second;
        if (other->generation() < to.generation) peers_.erase(found);
      }
    }
    if (other && to.generation < other->generation()) {
      // The outdated generation may come from the directory.
      directory_.forget_before(to.rank, other->generation());
      throw has_left(to);
    }
    if (other) {  // it has left, but its connection has not ended yet
      loop_->post([self = shared_from_this(), other] {
        const Error left(Blame::PeerLost,
                         "the connection has ended: " + describe(other->worker()) + " has left");
        if (const auto lane = other->close(left); lane != 0) self->lane_ended(*other, lane, left);
      });
    }
    Directory::Entry entry = found(to);
    // False if a successor was met before the store's list named it.
    if (!meets(entry.worker, entry.generation)) {
      directory_.forget_before(to.rank, entry.generation + 1);
      if (to.generation != kAnyLife || again > 1) throw has_left(to);
      continue;
    }
    auto bytes = std::make_shared<BytesInFlight>(bytes_in_flight(),
                                                 [loop = std::weak_ptr(loop_)](const void* turn) {
                                                   if (const auto alive = loop.lock())
                                                     alive->recall(turn);
                                                 });
    auto made = std::make_shared<Peer>(weak_from_this(), parts_.self, std::move(entry),
                                       device_maps(), std::move(bytes));
    std::lock_guard lock(mutex_);
    require_open();  // leave() has closed only the peers that it found
    const auto& known = peers_.emplace(to.rank, std::move(made)).first->second;
    if (to.fits(known->generation())) return known;
  }
}

Directory::Entry AgentCore::found(const Recipient& to) {
  const KnownDevices here{
      parts_.self.name,
      {parts_.devices->count(), parts_.options.devices, parts_.options.device_maps}};
  const auto find = [&] {
    auto found = directory_.find(to);
    // A worker that joined later was not checked when this one joined.
    if (!parts_.world_size)
      check_device_maps({here, {found.worker.name, found.devices}}, /*more_may_come=*/true);
    return found;
  };
  try {
    return find();
  } catch (const NotThere&) {
    throw;
  } catch (const Error&) {  // the entry may be a predecessor's
    if (!directory_.forget(to.rank)) throw;
    return find();
  }
}

std::string AgentCore::name_of(int rank) const {
  if (rank == parts_.self.rank) return describe(parts_.self);
  if (const auto known = directory_.known(rank)) return describe(*known);
  const auto known = known_peer(rank);
  return known ? describe(known->worker()) : "rank " + std::to_string(rank);
}

std::shared_ptr<Peer> AgentCore::known_peer(int rank) const {
  std::lock_guard lock(mutex_);
  const auto found = peers_.find(rank);
  return found == peers_.end() ? nullptr : found->second;
}

// Users' calls carry the context in which they are made. Weft's own calls carry none.
std::shared_ptr<CallContext> AgentCore::context_of(const CallOptions& options) const {
  return is_users(options.kind) ? contexts_->current() : nullptr;
}

std::shared_ptr<const Member> AgentCore::send_call(const Function& function,
                                                   const CallOptions& options,
                                                   const std::function<void(codec::Packer&)>& pack,
                                                   std::unique_ptr<PendingCall> pending) {
  require_open();
  const auto worker = peer(options.to);
  const auto references =
      references_->references_to(Recipient(options.to.rank, worker->generation()));
  std::shared_ptr<Outgoing> message;
  std::shared_ptr<const Member> callee(worker, &worker->member());
  Slot slot;
  if (is_users(options.kind)) {
    slot = Slot::take(worker->unanswered(), calls_in_flight());
    if (!slot) {
      const Error full(
          Blame::Busy,
          std::to_string(calls_in_flight()) +
              " calls to it are unanswered; wait for some before issuing more, or raise "
              "rpc::Options::calls_in_flight of both workers");
      pending->fail(
          std::make_exception_ptr(full.within(in_words(&function, describe(worker->worker())))));
      return callee;
    }
  }
  const auto context = context_of(options);
  codec::Writer writer(references.get());
  const bool records = context && contexts_->records_calls();
  if (records) writer.tensors().record_gradients();
  if (is_users(options.kind) && config().debug == DebugLevel::Detail) writer.tensors().watch();
  Peer::Lane lane;
  HeldBytes held;
  std::chrono::nanoseconds left = options.limit;
  try {
    message = std::make_shared<Outgoing>(
        address(writer.write(pack), options.back ? worker->map_back() : worker->map(),
                worker->worker(), options.back ? Way::Back : Way::Call));
    try {
      held = hold_back(options, *worker, bytes_of(message->message), left);
    } catch (const Error& error) {
      references->undo();
      pending->fail(
          std::make_exception_ptr(error.within(in_words(&function, describe(worker->worker())))));
      return callee;
    }
    try {
      lane = worker->lane(routes_);
    } catch (const Error& error) {
      throw error.within(in_words(&function, describe(worker->worker())));
    }
  } catch (...) {
    references->undo();
    throw;
  }
  Head head;
  head.kind = FrameKind::Call;
  head.flags = (options.on_loop ? kOnLoop : 0) | (contexts_->records_calls() ? 0 : kNoGrad);
  head.message = static_cast<std::uint8_t>(options.kind);
  head.call = next_call();
  // Before the call waits, because failing the call forgets these records.
  if (context) {
    head.context = context->id();
    context->sent({parts_.self.rank, head.call, /*reply=*/false}, options.to.rank,
                  writer.tensors().take_recorded());
  }
  add_waiting(head.call, function, options,
              left.count() == 0 ? Deadline::never() : Deadline::in(left), std::move(pending),
              {lane.number, bytes_of(message->message), worker->in_flight(), std::move(slot),
               std::move(held)},
              context, references);
  head.name = function.id.name;
  head.signature = function.id.signature;
  head.time_left = left.count();
  const bool sent = send_frame(options.kind, [self = shared_from_this(), lane, head, message,
                                              references, &function, worker] {
    lane.pass([self, connection = lane.connection, head, message, references, &function, worker] {
      const bool is_behind_streams = message->ready.source() != nullptr;
      const auto watched = std::move(message->message.watched);
      const Op op = send_message(*connection, head, std::move(*message));
      // The caller may change the bytes, or the GPU may fail, while they are being sent.
      if (watched || (is_behind_streams && !op.ended())) {
        return op.on_ended([self, op, call = head.call, references, watched, &function, worker] {
          const auto error = op.error();
          if (!error && watched) self->check_unchanged(call, function, *worker, *watched);
          if (!error || !is_of_message(*error)) return;
          references->undo();
          self->fail_here(call, *error);
        });
      }
      if (!op.ended() || !op.error()) return;
      // A connection that has failed ends all its calls itself. Here only this message was refused.
      references->undo();
      self->fail_here(head.call, *op.error());
    });
  });
  if (sent) {
    // If the context was released while the message was packed, that worker may not have been told.
    if (context && context->released()) contexts_->tell_ended(options.to.rank, context->id());
    return callee;
  }
  references->undo();
  fail_here(head.call, Error(Blame::PeerLost, "the connection to " + describe(worker->worker()) +
                                                  " refused the message (an injected fault)"));
  return callee;
}

// With WEFT_DEBUG=detail. If an argument has changed, the callee may have a mix of its old and new
// bytes.
void AgentCore::check_unchanged(std::uint64_t call, const Function& function, const Peer& to,
                                const codec::SentBytes& sent) {
  const auto changed = sent.changed();
  if (!changed) return;
  const Error why(
      Blame::Caller,
      in_words(&function, describe(to.worker())) +
          ": an argument was changed while its bytes were being sent (" + *changed +
          "), and the callee may have received a mix of old and new bytes: leave the tensors of a "
          "call alone "
          "until its future is done (of remote(): until created() is), or send clone()");
  log::error(why.text());
  fail_here(call, why);
}

Outgoing AgentCore::address(codec::Encoded message, const DeviceMap& map, const WorkerInfo& to,
                            Way way) const {
  Outgoing outgoing(std::move(message));
  bool is_behind_streams = false;
  for (const codec::Part& part : outgoing.message.parts) {
    const c10::Device from = part.device();
    const auto mapped = map.find(from);
    if (!mapped) throw unmapped(from, parts_.self, to, way);
    if (from.is_cuda() && part.storage.nbytes() > 0 &&
        part.storage.data_ptr().get_context() == nullptr) {
      throw Error(
          Blame::Caller,
          "a tensor on " + from.str() +
              " over memory that is not its own (from_blob) cannot be sent; send tensor.clone()");
    }
    is_behind_streams = is_behind_streams || from.is_cuda();
    outgoing.to.push_back(tensor::device_of(*mapped));
  }
  if (is_behind_streams) {
    for (const int gpu : gpus_) {
      parts_.devices->refuse_capture(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(gpu)),
                                     "a message with CUDA tensors",
                                     "it is sent only once, not at each launch of the graph");
    }
    outgoing.ready = parts_.devices->recorded(tensor::CudaDevices::current_streams(gpus_));
  }
  return outgoing;
}

bool AgentCore::send_frame(MessageKind kind, std::function<void()> send) {
  const Faults& faults = parts_.options.faults;
  if (const auto found = faults.fail_first.find(kind); found != faults.fail_first.end()) {
    std::lock_guard lock(mutex_);
    if (refused_[kind] < found->second) {
      ++refused_[kind];
      return false;
    }
  }
  if (faults.drop.contains(kind)) return true;
  if (const auto found = faults.delay.find(kind); found != faults.delay.end()) {
    std::shared_ptr<void> on_its_way;
    // This may be the verdict on a shutdown. A worker that leaves waits until it is sent, as for
    // every reply.
    if (kind == MessageKind::Shutdown) {
      count_replies(+1);
      on_its_way = {nullptr, [weak = weak_from_this()](void*) {
                      if (const auto core = weak.lock()) core->count_replies(-1);
                    }};
    }
    after(found->second, Task([send = std::move(send), kept = std::move(on_its_way)] { send(); }));
    return true;
  }
  send();
  return true;
}

Error AgentCore::gone(const Error& why, int rank) const {
  if (why.blame() != Blame::PeerLost) return why;
  return why.with_text(name_of(rank) + " has left, or its process has ended (" + why.text() + ")")
      .with_ranks({rank});
}

std::uint64_t AgentCore::next_call() { return first_id() + next_call_++; }

std::uint64_t AgentCore::after(std::chrono::milliseconds pause, Task task) {
  std::lock_guard lock(mutex_);
  if (closed_) return 0;
  const std::uint64_t number = next_pause_++;
  pauses_[number] = {std::move(task),
                     loop_->at(Deadline::in(pause), Task([weak = weak_from_this(), number] {
                                 const auto core = weak.lock();
                                 if (!core) return;
                                 Pause over;
                                 {
                                   std::lock_guard map_lock(core->mutex_);
                                   over = std::move(core->pauses_[number]);
                                   core->pauses_.erase(number);
                                 }
                                 if (over.task) over.task();
                               }))};
  return number;
}

void AgentCore::drop_pause(std::uint64_t number) {
  Pause dropped;
  std::lock_guard lock(mutex_);
  const auto found = pauses_.find(number);
  if (found == pauses_.end()) return;
  dropped = std::move(found->second);
  pauses_.erase(found);
}

std::size_t AgentCore::pauses() const {
  std::lock_guard lock(mutex_);
  return pauses_.size();
}

void AgentCore::call_here(const Function& function, const CallOptions& options,
                          const std::optional<Future<void>>& first,
                          std::unique_ptr<PendingCall> pending,
                          const std::function<Task(std::uint64_t id)>& make) {
  require_open();
  auto state = std::make_shared<CallState>();
  state->caller = parts_.self;
  state->generation = generation_;
  state->context = context_of(options);
  state->no_grad = !contexts_->records_calls();
  state->streams = tensor::CudaDevices::current_streams(gpus_);
  const std::uint64_t id = next_call();
  add_waiting(id, function, options, options.deadline(), std::move(pending), {0, 0, own_calls_},
              state->context, nullptr, state);
  // Computed after the call's own deadline, and so not earlier: a function that returns at this
  // deadline is too late for its caller.
  state->deadline = options.deadline();
  auto task = std::make_shared<Task>(make(id));
  const auto go = [self = shared_from_this(), id, state, on_loop = options.on_loop, task] {
    start_function(self, state, on_loop, std::move(*task),
                   [self, id](const Error& why) { self->fail_here(id, why); });
  };
  const bool sent = send_frame(options.kind, [self = shared_from_this(), id, first, go] {
    if (!first) return go();
    first->on_done_light([self, id, go](const Future<void>& ended) {
      if (const auto error = ended.error())
        return self->complete_here(id, [&](PendingCall& call) { call.fail(error); });
      go();
    });
  });
  if (sent) return;
  complete_here(id, [](PendingCall& call) {
    call.fail(std::make_exception_ptr(
        Error(Blame::PeerLost, "the call was refused (an injected fault)")));
  });
}

void AgentCore::lane_ended(Peer& peer, std::uint64_t lane, const Error& why) {
  const WorkerInfo worker = peer.worker();
  std::vector<WaitingCall> forgotten;  // destroyed outside the lock
  std::shared_ptr<Peer> gone;
  // Another worker may have the rank by now. Forget the old one first, so that a program that calls
  // again when a call fails below does not call it.
  const bool is_forgotten = directory_.forget(worker.rank);
  {
    std::lock_guard lock(mutex_);
    if (const auto known = peers_.find(worker.rank);
        is_forgotten && known != peers_.end() && known->second.get() == &peer) {
      gone = std::move(known->second);
      peers_.erase(known);
    }
    for (auto it = late_.begin(); it != late_.end();) {
      if (it->second.to != worker.rank || it->second.lane != lane) {
        ++it;
        continue;
      }
      forgotten.push_back(std::move(it->second));
      it = late_.erase(it);
    }
    forgotten_.erase({worker.rank, lane});
  }
  if (gone) {
    // The peer may have a new connection by now, for a call that waits already.
    const std::uint64_t newer =
        gone->close(Error(Blame::PeerLost, "the connection has ended: " + why.text()));
    if (newer != 0) lane_ended(*gone, newer, why);
  }
  auto failed = fail(calls_.take_all_to(worker.rank, lane), [&](const WaitingCall& call) {
    const bool kept = why.blame() == Blame::Timeout || why.blame() == Blame::Cancelled ||
                      why.blame() == Blame::Caller || why.blame() == Blame::Busy ||
                      why.blame() == Blame::Protocol;
    const Error ended(kept ? why.blame() : Blame::PeerLost,
                      "the connection has ended: " + why.text());
    return this->gone(ended, worker.rank)
        .within(in_words(call.function, describe(worker)))
        .with_ranks({worker.rank});
  });
  std::vector<std::shared_ptr<SentReferences>> given;
  for (auto& [id, call] : failed) given.push_back(std::move(call.references));
  for (auto& call : forgotten) given.push_back(std::move(call.references));
  off_loop(worker.rank,
           Task([self = shared_from_this(), rank = worker.rank, given = std::move(given)] {
             if (!self->closed_) self->references_->ask_which_arrived(rank, given);
           }));
  look_after(worker.rank);
}

void AgentCore::off_loop(const Recipient& to, Task task) {
  bool is_known = parts_.world_size.has_value() || !loop_->inside();
  if (!is_known) {
    const auto known = known_peer(to.rank);
    is_known = known && to.fits(known->generation());
  }
  is_known ? task() : thread_pool_->run_beside(std::move(task));
}

void AgentCore::inbound_ended(Inbound& inbound, const Error& why) {
  std::shared_ptr<Inbound> ended;
  {
    std::lock_guard lock(mutex_);
    const auto found = inbound_.find(&inbound);
    if (found == inbound_.end()) return;
    ended = std::move(found->second);
    inbound_.erase(found);
  }
  log::debug(describe(parts_.self) + ": the connection from " + describe(ended->worker()) +
             " has ended: " + why.text());
  directory_.forget(ended->worker().rank);
  off_loop(ended->worker().rank, Task([self = shared_from_this(), rank = ended->worker().rank,
                                       given = ended->take_given()] {
             if (!self->closed_) self->references_->ask_which_arrived(rank, given);
           }));
  look_after(ended->worker().rank);
}

void AgentCore::take_back_reply(int caller, std::uint64_t call) {
  contexts_->forget({caller, call, /*reply=*/true});
  std::vector<std::shared_ptr<Inbound>> from;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, inbound] : inbound_) from.push_back(inbound);
  }
  for (const auto& inbound : from) {
    if (inbound->worker().rank == caller) inbound->take_back(call);
  }
}

void AgentCore::leave() noexcept {
  if (is_inherited()) {
    if (!closed_.exchange(true)) loop_->close_inherited();
    return keep_inherited(shared_from_this());
  }
  if (closed_.exchange(true)) return;
  thread_pool_->recall();  // wakes threads that wait in shutdown() for others
  std::unique_ptr<Follower> follower;
  {
    std::lock_guard lock(mutex_);
    follower = std::move(follower_);
  }
  if (follower) follower->stop();
  directory_.leave();
  follower = nullptr;
  news_.close();
  std::map<int, std::shared_ptr<Peer>> peers;
  std::map<const Inbound*, std::shared_ptr<Inbound>> inbound;
  std::map<int, ShuttingDown> shutting_down;
  std::vector<Early> early;
  std::map<std::uint64_t, WaitingCall> late;
  std::map<std::uint64_t, Pause> pauses;
  EventLoop::Registration timer;
  {
    std::lock_guard lock(mutex_);
    peers.swap(peers_);
    inbound.swap(inbound_);
    early.swap(early_);
    shutting_down.swap(shutting_down_);
    late.swap(late_);
    pauses.swap(pauses_);
    timer = std::move(timer_);
  }
  routes_.close();
  references_->close();
  contexts_->close();
  const Error why(Blame::Cancelled, "agent " + describe(parts_.self) + " has left");
  for (const auto& [rank, one] : shutting_down) one.verdict.set_error(why);
  fail(calls_.take_all(), [&](const WaitingCall& call) {
    const auto found = peers.find(call.to);
    return left(call, found != peers.end() ? describe(found->second->worker()) : name_of(call.to));
  });
  for (const auto& [rank, one] : peers) one->close(why);
  for (const auto& [key, one] : inbound) one->close(why);
  for (const auto& one : early) one.connection->close(why);
  // Connections end in a turn of the loop, and nobody turns it once the thread pool has stopped.
  // Connections that a call still holds would stay open, and their peers would wait.
  if (!thread_pool_->inside()) {
    auto turned = std::make_shared<std::atomic<bool>>(false);
    loop_->post([turned] { *turned = true; });
    thread_pool_->drive([turned] { return turned->load(); }, Deadline::in(std::chrono::seconds(1)));
  }
  thread_pool_->stop();
  references_->close();  // again, for calls that came or ran while the rest ended
  contexts_->close();
  keep_until_left(nullptr);
}

void AgentCore::keep_until_left(std::shared_ptr<const void> kept) {
  std::lock_guard lock(mutex_);
  kept_until_left_.swap(kept);
}

std::string AgentCore::transport_to(int rank) const {
  const auto known = known_peer(rank);
  const auto connection = known ? known->standing_lane().connection : nullptr;
  return connection ? std::string(connection->transport()) : std::string();
}

DebugInfo AgentCore::debug_info() const {
  DebugInfo info;
  info.calls_waiting = waiting_;
  info.calls_served = served_;
  info.handlers_busy = running_;
  info.calls_held_back = held_back_;
  references_->count(info);
  contexts_->count(info);
  return info;
}

}  // namespace weft::rpc
