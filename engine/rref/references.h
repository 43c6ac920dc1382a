// SPDX-License-Identifier: Apache-2.0
// The references of one agent: values that it owns and that others hold, and its references to
// others' values. docs/wire.md ("References") has the protocol. Usable from every thread;
// nothing here blocks.
//
// An owner keeps a value while it knows any fork of it. A fork is one worker's reference. Each fork
// was made by a parent: the owner itself, or a fork that is kept until the owner knows the child.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/export.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/extension.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/call/types.h>
#include <weft/engine/codec/stream.h>
#include <weft/engine/future/future.h>

namespace weft::rpc {
class AgentCore;
}

namespace weft::rref {

// Both are unique in a job: the rank that made it in the top 16 bits, a counter below.
using Id = std::uint64_t;
using ForkId = std::uint64_t;
// "(2, 17)".
WEFT_API std::string to_text(std::uint64_t id);
using rpc::rank_in;

// Where a user's reference came from.
struct Origin {
  // The function given to remote(), as text that lives as long as the program; "" for copy_to().
  std::string_view function;
  int from = -1;     // or the rank of the worker that sent it
  Place place = {};  // where remote() was called, if known
};

// A value at its owner, before and after its creation.
class WEFT_API Owned {
 public:
  Owned(std::shared_ptr<weft::detail::Executor> executor, const std::type_info& type, Id id)
      : promise_(std::move(executor)), type_(type), id_(id) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  virtual ~Owned() = default;
  // Done when the value has been created; fails with a CreationError.
  Future<void> created() const { return promise_.future(); }
  // Does nothing if the value has been created or has failed. A function's own exception is passed
  // as a RemoteError (rpc::detail::thrown_by).
  void fail(const std::exception_ptr& cause) noexcept;
  const std::type_info& type() const { return type_; }
  // True if destroying the value costs next to nothing and runs no user code.
  virtual bool ends_at_once() const = 0;

 protected:
  // True for the first call.
  bool end() noexcept { return !ended_.exchange(true); }
  // Destroys a value outside of the event loop, where the last call on it may end: its destructor
  // belongs to the user and may block.
  void let_go_of(std::shared_ptr<void> value) noexcept;
  Promise<void> promise_;

 private:
  std::atomic<bool> ended_{false};
  const std::type_info& type_;
  const Id id_;
};

template <class T>
class OwnedValue final : public Owned {
 public:
  OwnedValue(std::shared_ptr<weft::detail::Executor> executor, Id id)
      : Owned(std::move(executor), typeid(OwnedValue), id) {}
  ~OwnedValue() override { let_go(std::move(value_)); }
  // The value can be used when `work` has run on the devices.
  void set(std::shared_ptr<T> value, weft::detail::DeviceWorkRef work) {
    if (!end()) return let_go(std::move(value));
    value_ = std::move(value);
    promise_.set_with(std::move(work), {});
  }
  // After created(); throws its error. Makes the current streams wait for the value.
  const std::shared_ptr<T>& value() const {
    promise_.future().get();
    return value_;
  }
  // After created() has succeeded, for callers that make streams wait themselves.
  const std::shared_ptr<T>& made() const { return value_; }
  bool ends_at_once() const final {
    return std::is_void_v<T> || std::is_arithmetic_v<T> || std::is_same_v<T, std::string> ||
           std::is_same_v<T, at::Tensor>;
  }

 private:
  void let_go(std::shared_ptr<T> value) noexcept {
    if (value && !ends_at_once()) let_go_of(std::move(value));
  }
  std::shared_ptr<T> value_;
};

// Shared by the copies of one RRef on one worker.
class WEFT_API Handle {
 public:
  // For the owner.
  Handle(std::weak_ptr<rpc::AgentCore> core, Id id, rpc::Member owner,
         std::shared_ptr<Owned> owned);
  // For a user. `confirmed`: the owner knows the fork. `created`: only if this worker asked for the
  // creation.
  Handle(std::weak_ptr<rpc::AgentCore> core, Id id, ForkId fork, rpc::Member owner,
         Future<void> confirmed, std::optional<Future<void>> created, const Origin& origin);
  // Ends a user's reference: tells the owner, once the owner knows of it.
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // Throws Caller if the agent has shut down.
  std::shared_ptr<rpc::AgentCore> core() const;
  Id id() const { return id_; }
  ForkId fork() const { return fork_; }
  const rpc::WorkerInfo& owner() const { return owner_.worker; }
  // The owner in its generation, not a later worker with its rank.
  rpc::Recipient to_owner() const { return {owner_.worker.rank, owner_.generation}; }
  const std::shared_ptr<Owned>& owned() const { return owned_; }  // null for users
  bool is_owner() const { return owned_ != nullptr; }
  const Origin& origin() const { return origin_; }
  bool confirmed() const { return is_owner() || (confirmed_.done() && !confirmed_.failed()); }
  const std::optional<Future<void>>& created() const { return created_; }
  // created() of a user that has it; failures become CreationErrors.
  Future<void> creation() const;
  // Throws the CreationError if the creation is known to have failed.
  void require_created() const;

 private:
  const std::weak_ptr<rpc::AgentCore> core_;
  const Id id_;
  const ForkId fork_ = 0;
  const rpc::Member owner_;
  const std::shared_ptr<Owned> owned_;
  const Future<void> confirmed_;
  const std::optional<Future<void>> created_;
  const Origin origin_;
};

// "RRef (0, 3), fork (0, 4), of worker1 (rank 1)"; for the owner's own: "RRef (0, 3), owned here".
WEFT_API std::string describe(const Handle& handle);

// The value that a call is for; encoded as its id. The owner looks the value up when the call
// arrives and keeps it until the call has run, since the caller may have dropped its reference long
// before.
struct Target {
  Target() = default;
  Target(Id id_of_it) : id(id_of_it) {}
  template <class Packer>
  void msgpack_pack(Packer& packer) const {
    packer.pack(id);
  }
  void msgpack_unpack(const msgpack::object& object) { object.convert(id); }
  Id id = 0;
  mutable std::shared_ptr<Owned> owned;
};

// An RRef in a message; an empty RRef is an empty array.
struct ReferenceRecord {
  Id id = 0;
  std::int32_t owner = -1;  // rank
  std::string owner_name;
  rpc::Generation generation = 0;  // of the owner
  ForkId fork = 0;
  std::uint64_t type = 0;  // a hash of the type's name
  WEFT_FIELDS(id, owner, owner_name, generation, fork, type)
};

class ForkWriter;

class WEFT_API References final : public rpc::ReferenceExtension {
 public:
  explicit References(rpc::AgentCore& core) : core_(core) {}

  std::shared_ptr<rpc::SentReferences> references_to(const rpc::Recipient& worker) override;
  void with_references_from(int worker,
                            const std::function<void(rpc::ReceivedReferences&)>& read) override;
  void ask_which_arrived(int worker,
                         const std::vector<std::shared_ptr<rpc::SentReferences>>& sent) override;
  void give_back_reply(int callee, std::uint64_t call) override;
  void count(rpc::DebugInfo& info) const override;

  std::uint64_t next_id();

  // --- as owner
  // The value of that id. If none is known, makes an entry for it: its creation may be behind this
  // message. Throws Caller if the value has another type.
  template <class T>
  std::shared_ptr<OwnedValue<T>> owned(Id id) {
    auto found =
        find_or_expect(id, [&] { return std::make_shared<OwnedValue<T>>(executor(), id); });
    if (found->type() != typeid(OwnedValue<T>))
      wrong_type(id, typeid(OwnedValue<T>), found->type());
    return std::static_pointer_cast<OwnedValue<T>>(found);
  }
  // The creation has come; from now on `holder` holds the fork.
  template <class T>
  std::shared_ptr<OwnedValue<T>> adopt(Id id, ForkId fork, const rpc::WorkerGeneration& holder) {
    auto found =
        arrive(id, fork, holder, [&] { return std::make_shared<OwnedValue<T>>(executor(), id); });
    if (found->type() != typeid(OwnedValue<T>))
      wrong_type(id, typeid(OwnedValue<T>), found->type());
    return std::static_pointer_cast<OwnedValue<T>>(found);
  }
  // From now on `holder` holds the fork, unless that has ended already. Idempotent. `owned` is null
  // if it is not known.
  void add_fork(Id id, ForkId fork, const rpc::WorkerGeneration& holder,
                const std::shared_ptr<Owned>& owned);
  // The worker that held or was to hold the fork does so no longer.
  void remove_fork(Id id, ForkId fork, int holder);
  // True if the fork is known, even if it has ended.
  bool has_fork(Id id, ForkId fork) const;
  // True if the fork is known and has not ended.
  bool holds(Id id, ForkId fork) const;
  bool keeps_parent_of(ForkId child) const;
  // True if a handle of this worker is that fork; if not, it never will be.
  bool has_or_ends(ForkId fork);
  bool has_given_back(ForkId fork) const;
  // Notes why no creation will come: calls that wait for the value fail. Does nothing if a creation
  // has come.
  void give_up(Id id, const std::exception_ptr& why);
  // Count the RRefs of the owner's own that refer to the value.
  void hold_here(Id id, const std::shared_ptr<Owned>& owned);
  void release_here(Id id);

  // --- as user, and as parent
  // Keeps the parent until the receiver says that the owner knows the child.
  void keep_parent(ForkId child, std::shared_ptr<Handle> parent,
                   const rpc::WorkerGeneration& receiver);
  void child_accepted(ForkId child);
  void count_pending(int change) { pending_users_ += change; }
  // Handles of users, while they live.
  void enter(const Handle& user);
  void forget(const Handle& user);
  // Describes each living handle and its origin.
  std::vector<std::string> held() const override;

  // Called when a worker cannot be reached any more, or has left and a worker of generation
  // `successor` has its rank: its forks end.
  void worker_lost(int rank, std::optional<std::uint16_t> successor) override;
  // True if the worker holds a fork, or is expected to create a value or to accept a child.
  bool concerns(int rank) const override;
  // Called when the agent ends: drops values and fails calls that wait for them.
  void close() override;

 private:
  struct Entry {
    std::shared_ptr<Owned> owned;                   // null until a message tells its type
    std::map<ForkId, rpc::WorkerGeneration> forks;  // with their holders
    int here = 0;                                   // the owner's own handles
    bool arrived = false;            // the creation has come, or the value was made here
    std::exception_ptr given_up;     // why no creation will come
    EventLoop::Registration expiry;  // timer, while the creation is expected
    std::chrono::seconds patience{1};
    // True if another worker is to send the value, which may take its time: then the creator's own
    // fork is known before the creation.
    bool is_announced(Id id) const {
      return std::any_of(forks.begin(), forks.end(), [id](const auto& fork) {
        return fork.second.rank == rank_in(id) && rank_in(fork.first) == rank_in(id);
      });
    }
    bool is_expected() const { return !arrived && !given_up; }
    bool is_kept() const { return !forks.empty() || here > 0 || !(arrived || given_up); }
  };
  using Make = std::function<std::shared_ptr<Owned>()>;
  std::shared_ptr<Owned> find_or_expect(Id id, const Make& make);
  std::shared_ptr<Owned> arrive(Id id, ForkId fork, const rpc::WorkerGeneration& holder,
                                const Make& make);
  std::shared_ptr<weft::detail::Executor> executor() const;
  [[noreturn]] static void wrong_type(Id id, const std::type_info& wanted,
                                      const std::type_info& found);
  void bury(ForkId fork) WEFT_REQUIRES(mutex_);
  Entry take_if_unused(Id id) WEFT_REQUIRES(mutex_);
  void let_go(std::shared_ptr<Owned> value) WEFT_EXCLUDES(mutex_);
  // The reason why a creation will not come any more: the creator has left, and another worker has
  // its rank. Null if it may come.
  std::exception_ptr too_late(Id id) const WEFT_EXCLUDES(mutex_);
  void expect(Id id, Entry& entry) WEFT_REQUIRES(mutex_);
  // Ends forks that were just given to a worker that had already left.
  void end_if_late(const rpc::WorkerGeneration& holder) WEFT_EXCLUDES(mutex_);
  void expire(Id id);

  rpc::AgentCore& core_;
  std::atomic<std::uint64_t> next_{1};
  std::atomic<int> pending_users_{0};
  std::atomic<int> ending_{0};  // values that are being destroyed
  mutable Mutex mutex_;
  std::unordered_map<Id, Entry> entries_ WEFT_GUARDED_BY(mutex_);
  struct Parent {
    std::shared_ptr<Handle> handle;
    rpc::WorkerGeneration receiver;
  };
  std::unordered_map<ForkId, Parent> parents_ WEFT_GUARDED_BY(mutex_);
  std::unordered_map<ForkId, const Handle*> users_ WEFT_GUARDED_BY(mutex_);
  // Ended forks and values: late or retried messages about them change nothing.
  std::unordered_set<ForkId> buried_ WEFT_GUARDED_BY(mutex_);
  std::deque<std::pair<Deadline::Clock::time_point, ForkId>> burials_ WEFT_GUARDED_BY(mutex_);
};

// The agent's own.
WEFT_API References& references_of(rpc::AgentCore& core);

// Makes `target` keep its value. Done when the value has been created.
template <class T>
Future<void> wait_for(References& references, const Target& target) {
  target.owned = references.owned<T>(target.id);
  return target.owned->created();
}

// Makes a reference to a value that a third worker is `asked` to send to `owner`, and tells the
// owner that this worker holds it. `made` is `asked`, or fails earlier if the original was not
// created; if it fails, the owner is told that nothing will come. Keeps `original` meanwhile.
WEFT_API std::shared_ptr<Handle> expect_there(const std::shared_ptr<rpc::AgentCore>& core,
                                              const rpc::Member& owner, Id id, ForkId fork,
                                              const Future<rpc::Outcome>& asked,
                                              const Future<rpc::Outcome>& made,
                                              std::shared_ptr<Handle> original, Place place);

// Tells the owner that no creation of that value will come.
WEFT_API void tell_will_not_come(const std::shared_ptr<rpc::AgentCore>& core, int owner, Id id,
                                 const rpc::Outcome& why);
// Writes the references of one message to a worker.
class WEFT_API ForkWriter final : public rpc::SentReferences {
 public:
  ForkWriter(rpc::AgentCore& core, const rpc::Recipient& to) : core_(core), to_(to) {}
  void pack(codec::Packer& packer, const std::shared_ptr<Handle>& handle, std::uint64_t type);
  // Called when the message will not be sent: ends its references. undo() and list_open() are
  // thread-safe.
  void undo() override;
  // Called before other threads know this object.
  bool is_empty() const override { return forks_.empty() && children_.empty(); }
  // Adds the references that have not ended: to values owned here, and children of other owners'
  // values.
  void list_open(std::vector<std::pair<Id, ForkId>>& owned, std::vector<ForkId>& children) const;
  bool is_over() const override;

 private:
  rpc::AgentCore& core_;
  const rpc::Recipient to_;
  mutable Mutex mutex_;  // guards the members below once the message is written
  std::vector<std::pair<Id, ForkId>> forks_;  // to values owned here
  std::vector<ForkId> children_;
};

// Reads the references of one message from a worker.
class WEFT_API ForkReader final : public rpc::ReceivedReferences {
 public:
  ForkReader(rpc::AgentCore& core, int from) : core_(core), from_(from) {}
  // `own` finds the value if this worker is the owner. Null for an empty RRef.
  std::shared_ptr<Handle> unpack(const msgpack::object& object, std::uint64_t type,
                                 const std::function<std::shared_ptr<Owned>(References&, Id)>& own);
  // Done when the owners know all references that have come; the called function starts then.
  std::vector<Future<void>> take_unconfirmed() override { return std::move(unconfirmed_); }

 private:
  rpc::AgentCore& core_;
  const int from_;
  std::vector<Future<void>> unconfirmed_;
};

}  // namespace weft::rref
