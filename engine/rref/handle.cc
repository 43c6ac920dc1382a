// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/call/core.h>
#include <weft/engine/rref/control.h>
#include <weft/engine/rref/handle.h>
#include <weft/engine/rref/references.h>

namespace weft::rref {

namespace {

// The error that uses of a value throw if it was not created. If it was to be made from another
// value that was not created, this is that value's error, so that a chain of any length reports
// only the first cause.
std::exception_ptr not_created(const std::string& reference, const std::exception_ptr& cause) {
  Blame blame = Blame::Remote;
  std::string why;
  std::vector<int> ranks;
  try {
    std::rethrow_exception(cause);
  } catch (const rpc::CreationError&) {
    return cause;
  } catch (const Error& error) {
    blame = error.blame();
    why = error.text();
    ranks = error.ranks();
  } catch (...) {
    why = call::text_of(cause);
  }
  return std::make_exception_ptr(
      rpc::CreationError(Error(blame, reference + " was not created: " + why).with_ranks(ranks)));
}

std::string on_its_owner(const Handle& handle) {
  return "RRef " + to_text(handle.id()) + " on " + describe(handle.owner());
}

}  // namespace

std::string to_text(std::uint64_t id) {
  return "(" + std::to_string(rank_in(id)) + ", " +
         std::to_string(id & ((std::uint64_t{1} << 48) - 1)) + ")";
}

void Owned::fail(const std::exception_ptr& cause) noexcept {
  if (end()) promise_.set_error(not_created("RRef " + to_text(id_), cause));
}

void Owned::let_go_of(std::shared_ptr<void> value) noexcept {
  const auto executor = promise_.future().executor();
  if (executor && executor->inside()) executor->run(Task([kept = std::move(value)] {}));
}

Handle::Handle(std::weak_ptr<call::AgentCore> core, Id id, call::Member owner,
               std::shared_ptr<Owned> owned)
    : core_(std::move(core)), id_(id), owner_(std::move(owner)), owned_(std::move(owned)) {
  references_of(*core_.lock()).values().hold_here(id_, owned_);
}

Handle::Handle(std::weak_ptr<call::AgentCore> core, Id id, ForkId fork, call::Member owner,
               Future<void> confirmed, std::optional<Future<void>> created, const Origin& origin)
    : core_(std::move(core)),
      id_(id),
      fork_(fork),
      owner_(std::move(owner)),
      confirmed_(std::move(confirmed)),
      created_(std::move(created)),
      origin_(origin) {
  const auto agent = core_.lock();
  references_of(*agent).users().enter(*this);
  if (confirmed_.done()) return;
  references_of(*agent).users().count_pending(+1);
  confirmed_.on_done_light([weak = core_](const Future<void>&) {
    if (const auto alive = weak.lock()) references_of(*alive).users().count_pending(-1);
  });
}

Handle::~Handle() {
  if (const auto core = core_.lock(); core && core->lifetime().is_inherited()) return;
  if (is_owner()) {
    if (const auto core = core_.lock()) references_of(*core).values().release_here(id_);
    return;
  }
  if (const auto core = core_.lock()) references_of(*core).users().forget(*this);
  confirmed_.on_done_light(
      [weak = core_, id = id_, fork = fork_, owner = to_owner()](const Future<void>&) {
        const auto core = weak.lock();
        if (core && !core->closed()) {
          control<&internal::user_delete>(core, owner, rpc::MessageKind::UserDelete, {id, fork},
                                          {.keeps_on = true});
        }
      });
}

std::shared_ptr<call::AgentCore> Handle::core() const {
  auto agent = core_.lock();
  if (agent) agent->lifetime().require_own();
  if (!agent || agent->closed()) {
    throw Error(Blame::Caller, "RRef " + to_text(id_) + " of " + describe(owner_.worker) +
                                   " is used after deletion: its agent has shut down or left");
  }
  return agent;
}

void Handle::require_created() const {
  const auto& ended = is_owner() ? std::optional(owned_->created()) : created_;
  if (!ended || !ended->done() || !ended->failed()) return;
  std::rethrow_exception(not_created(on_its_owner(*this), ended->error()));
}

Future<void> Handle::creation() const {
  const Future<void>& created = *created_;
  if (created.done() && !created.failed()) return created;
  Promise<void> promise(created.executor());
  created.on_done_light([promise, reference = on_its_owner(*this)](const Future<void>& ended) {
    if (!ended.failed()) return ended.forward_to(promise);
    promise.set_error(not_created(reference, ended.error()));
  });
  return promise.future();
}

std::string describe(const Handle& handle) {
  const std::string text = "RRef " + to_text(handle.id());
  if (handle.is_owner()) return text + ", owned here";
  return text + ", fork " + to_text(handle.fork()) + ", of " + describe(handle.owner());
}

}  // namespace weft::rref
