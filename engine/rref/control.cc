// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/make_error.h>
#include <weft/engine/call/core.h>
#include <weft/engine/rref/control.h>

namespace weft::rref {

namespace {
// The most references that one message asks for, so that it is answered in time.
constexpr std::size_t kMostAtOnce = 4096;
}  // namespace

namespace internal {

namespace {
References& here(const char* what) { return references_of(*call::current_call(what).core()); }
}  // namespace

void fork(Id id, ForkId fork) {
  here("fork()").values().add_fork(
      id, fork, call::current_call("fork()").call().worker_generation(), nullptr);
}
void child_accepted(ForkId child) { here("child_accepted()").parents().child_accepted(child); }
void user_delete(Id id, ForkId fork) {
  here("user_delete()")
      .values()
      .remove_fork(id, fork, call::current_call("user_delete()").call().caller.rank);
}
void will_not_come(Id id, rpc::Outcome why) {
  here("will_not_come()").values().give_up(id, std::make_exception_ptr(why.error()));
}
void give_back(std::vector<std::pair<Id, ForkId>> owned, std::vector<ForkId> children) {
  const auto& call = call::current_call("give_back()");
  const auto& core = call.core();
  const int giver = call.call().caller.rank;
  for (const auto& [id, fork] : owned) {
    if (references_of(*core).has_or_ends(fork)) continue;
    control<&user_delete>(core, giver, rpc::MessageKind::UserDelete, {id, fork},
                          {.keeps_on = true});
  }
  for (const ForkId child : children) {
    if (references_of(*core).has_or_ends(child)) continue;
    control<&child_accepted>(core, giver, rpc::MessageKind::ChildAccept, {child},
                             {.keeps_on = true});
  }
}
void take_back_reply(std::uint64_t call) {
  const auto& here_now = call::current_call("take_back_reply()");
  here_now.core()->incoming_calls().take_back_reply(here_now.call().caller.rank, call);
}

}  // namespace internal

void tell_will_not_come(const std::shared_ptr<call::AgentCore>& core, int owner, Id id,
                        const call::Outcome& why) {
  if (core->closed()) return;
  control<&internal::will_not_come>(core, owner, rpc::MessageKind::UserDelete, {id, why});
}

void References::ask_which_arrived(int worker,
                                   const std::vector<std::shared_ptr<call::SentReferences>>& sent) {
  std::vector<std::pair<Id, ForkId>> owned;
  std::vector<ForkId> children;
  for (const auto& forks : sent) {
    if (forks) static_cast<const ForkWriter&>(*forks).list_open(owned, children);
  }
  const auto begin_of = [](const auto& all, std::size_t at) {
    return all.begin() + std::min(at, all.size());
  };
  for (std::size_t at = 0; at < std::max(owned.size(), children.size()); at += kMostAtOnce) {
    control<&internal::give_back>(core_.shared_from_this(), worker, rpc::MessageKind::Fork,
                                  {{begin_of(owned, at), begin_of(owned, at + kMostAtOnce)},
                                   {begin_of(children, at), begin_of(children, at + kMostAtOnce)}},
                                  {.keeps_on = true});
  }
}

void References::give_back_reply(int callee, std::uint64_t call) {
  if (core_.closed()) return;
  control<&internal::take_back_reply>(core_.shared_from_this(), callee,
                                      rpc::MessageKind::ChildAccept, {call}, {.keeps_on = true});
}

std::shared_ptr<Handle> expect_there(const std::shared_ptr<call::AgentCore>& core,
                                     const call::Member& owner, Id id, ForkId fork,
                                     const Future<call::Outcome>& asked,
                                     const Future<call::Outcome>& made,
                                     std::shared_ptr<Handle> original, Place place) {
  const auto confirmed =
      control<&internal::fork>(core, {owner.worker.rank, owner.generation}, rpc::MessageKind::Fork,
                               {id, fork}, {.keeps_on = true});
  Promise<void> created(core->thread_pool());
  const Origin origin{.place = place};
  const auto handle =
      std::make_shared<Handle>(core, id, fork, owner, confirmed, created.future(), origin);
  made.on_done_light([core, owner = owner.worker.rank, id, created,
                      original = std::move(original)](const Future<call::Outcome>& ended) {
    const auto error = ended.error();
    const call::Outcome outcome =
        error ? call::Outcome(to_error(error, Blame::Remote)) : ended.value();
    if (!outcome.failed()) return created.set();
    created.set_error(std::make_exception_ptr(outcome.error()));
    tell_will_not_come(core, owner, id, outcome);
  });
  // Keeps the handle until `asked` is done, so that the fork ends after anything that may still
  // arrive: its owner does not remember ended forks for ever.
  asked.on_done_light([handle](const Future<call::Outcome>&) {});
  return handle;
}

void ForkWriter::pack(codec::Packer& packer, const std::shared_ptr<Handle>& handle,
                      std::uint64_t type) {
  if (!handle) {
    packer.pack_array(0);  // nil would be an empty optional around the RRef
    return;
  }
  if (handle->core().get() != &core_) {
    throw Error(Blame::Caller,
                "RRef " + to_text(handle->id()) +
                    " belongs to another agent of this process; send it with that one");
  }
  handle->require_created();
  References& references = references_of(core_);
  const ForkId fork = references.next_id();
  const call::WorkerGeneration worker_generation{to_.rank,
                                                 static_cast<std::uint16_t>(to_.generation)};
  if (handle->is_owner()) {
    references.values().add_fork(handle->id(), fork, worker_generation, handle->owned());
    forks_.emplace_back(handle->id(), fork);
  } else {
    references.keep_parent(fork, handle, worker_generation);
    children_.push_back(fork);
  }
  packer.pack(ReferenceRecord{handle->id(), handle->owner().rank, handle->owner().name,
                              handle->to_owner().generation, fork, type});
}

void ForkWriter::list_open(std::vector<std::pair<Id, ForkId>>& owned,
                           std::vector<ForkId>& children) const {
  References& references = references_of(core_);
  MutexLock lock(mutex_);
  for (const auto& fork : forks_) {
    if (references.values().holds(fork.first, fork.second)) owned.push_back(fork);
  }
  for (const ForkId child : children_) {
    if (references.parents().keeps_parent_of(child)) children.push_back(child);
  }
}

bool ForkWriter::is_over() const {
  std::vector<std::pair<Id, ForkId>> owned;
  std::vector<ForkId> children;
  list_open(owned, children);
  return owned.empty() && children.empty();
}

void ForkWriter::undo() {
  std::vector<std::pair<Id, ForkId>> owned;
  std::vector<ForkId> children;
  {
    MutexLock lock(mutex_);
    owned.swap(forks_);
    children.swap(children_);
  }
  for (const auto& [id, fork] : owned)
    references_of(core_).values().remove_fork(id, fork, to_.rank);
  for (const ForkId child : children) references_of(core_).parents().child_accepted(child);
}

std::shared_ptr<Handle> ForkReader::unpack(
    const msgpack::object& object, std::uint64_t type,
    const std::function<std::shared_ptr<Owned>(References&, Id)>& own) {
  if (object.type == msgpack::type::ARRAY && object.via.array.size == 0) return nullptr;
  const auto [id, owner, owner_name, generation, fork, sent_type] =
      codec::unpacked<ReferenceRecord>(object);
  if (sent_type != type)
    throw Error(Blame::Caller,
                "RRef " + to_text(id) + " has another type than the RRef that receives it");
  const auto core = core_.shared_from_this();
  References& references = references_of(core_);
  if (owner == core_.self().rank) {
    if (generation != core_.identity().generation) throw call::has_left({owner, generation});
    auto handle = std::make_shared<Handle>(core, id, call::Member{core_.self(), generation},
                                           own(references, id));
    control<&internal::child_accepted>(core, from_, rpc::MessageKind::ChildAccept, {fork},
                                       {.keeps_on = true});
    return handle;
  }
  if (references.values().has_ended(fork)) {
    throw Error(Blame::Cancelled,
                "RRef " + to_text(id) + " came in a message that its sender takes for lost");
  }
  const call::Recipient to_owner(owner, generation);
  // The name comes with the message and is not looked up: this runs on the event loop, which must
  // not wait for the store.
  call::check_name(owner_name);
  const call::Member worker{{owner_name, owner}, generation};
  if (owner == from_) {
    Promise<void> known;
    known.set();
    return std::make_shared<Handle>(core, id, fork, worker, known.future(), std::nullopt,
                                    Origin{.from = from_});
  }
  // A function that takes the reference waits only for the first attempts. The giver keeps its own
  // reference until the owner knows this one or is gone, since nothing else may keep the value
  // meanwhile.
  const auto confirmed =
      control<&internal::fork>(core, to_owner, rpc::MessageKind::Fork, {id, fork});
  Promise<void> known(core->thread_pool());
  confirmed.on_done_light([core, from = from_, to_owner, id, fork,
                           known](const Future<void>& told) {
    const auto end = [core, from, fork, known](const Future<void>& told_at_last) {
      told_at_last.failed() ? known.set_error(told_at_last.error()) : known.set();
      control<&internal::child_accepted>(core, from, rpc::MessageKind::ChildAccept, {fork},
                                         {.keeps_on = true});
    };
    if (!told.failed() || core->closed() || call::is_not_there(told.error())) return end(told);
    control<&internal::fork>(core, to_owner, rpc::MessageKind::Fork, {id, fork}, {.keeps_on = true})
        .on_done_light(end);
  });
  unconfirmed_.push_back(confirmed);
  return std::make_shared<Handle>(core, id, fork, worker, known.future(), std::nullopt,
                                  Origin{.from = from_});
}

}  // namespace weft::rref
