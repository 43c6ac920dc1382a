// SPDX-License-Identifier: Apache-2.0
#include <weft/base/make_error.h>
#include <weft/engine/call/core.h>
#include <weft/engine/rref/control.h>
#include <weft/engine/rref/creation.h>

namespace weft::rref::detail {

std::shared_ptr<Handle> owner_handle(const std::shared_ptr<call::AgentCore>& core, Id id,
                                     std::shared_ptr<Owned> owned) {
  return std::make_shared<Handle>(core, id, call::Member{core->self(), core->identity().generation},
                                  std::move(owned));
}
std::shared_ptr<Handle> user_handle(const std::shared_ptr<call::AgentCore>& core, Id id,
                                    ForkId fork, const call::Member& owner,
                                    const Future<void>& created, const Origin& origin) {
  return std::make_shared<Handle>(core, id, fork, owner, created, created, origin);
}
void will_not_come(const std::shared_ptr<call::AgentCore>& core, int owner, Id id,
                   const std::exception_ptr& why) {
  try {
    std::rethrow_exception(why);
  } catch (const rpc::RemoteError&) {
    return;  // it comes from there
  } catch (const rpc::CreationError&) {
    return;
  } catch (...) {
  }
  tell_will_not_come(core, owner, id, call::Outcome(to_error(why, Blame::Remote)));
}
namespace {
class FinishLocally final : public call::detail::Completion<void> {
 public:
  FinishLocally(std::shared_ptr<call::AgentCore> core, const call::Function& function,
                std::uint64_t id)
      : core_(std::move(core)), function_(function), id_(id) {}
  void succeed(std::monostate, DeviceWorkRef) override {
    core_->outgoing_calls().waiting().complete_here(id_, [](call::PendingCall& call) {
      static_cast<call::PendingResult<void>&>(call).set({}, nullptr);
    });
  }
  void fail(const std::exception_ptr& error) override {
    CoreCalls::fail_here(*core_, function_, id_, error);
  }

 private:
  const std::shared_ptr<call::AgentCore> core_;
  const call::Function& function_;
  const std::uint64_t id_;
};
}  // namespace

CompletionRef<void> ends_here(const std::shared_ptr<call::AgentCore>& core,
                              const call::Function& function, std::uint64_t id) {
  return std::make_shared<FinishLocally>(core, function, id);
}

std::shared_ptr<Handle> create_there(const std::shared_ptr<call::AgentCore>& core,
                                     const call::Function& function,
                                     const call::CallOptions& options, const Packed& packed) {
  References& references = references_of(*core);
  const Id id = references.next_id();
  const ForkId fork = references.next_id();
  Promise<void> promise(core->thread_pool());
  const auto created = promise.future();
  const auto pack = [&](codec::Packer& packer) {
    packer.pack_array(std::tuple_size_v<CreationArguments>);
    packer.pack(id);
    packer.pack(fork);
    packed.pack(packer, packed.arguments);
  };
  const auto owner = core->outgoing_calls().send(
      function, options, pack, std::make_unique<call::PendingResult<void>>(std::move(promise)));
  created.on_done_light(
      [weak = std::weak_ptr(core), to = options.to.rank, id](const Future<void>& ended) {
        const auto alive = weak.lock();
        if (const auto error = ended.error(); error && alive) will_not_come(alive, to, id, error);
      });
  return user_handle(core, id, fork, *owner, created, {function.name, -1, options.place});
}

}  // namespace weft::rref::detail
