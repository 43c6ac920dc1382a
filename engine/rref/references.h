// The references of one agent: values that it owns and that others hold, and its references to
// others' values. The protocol is docs/rref.md; ids are explained there. Usable from every thread;
// nothing here blocks.
//
// An owner keeps a value while any fork of it is known. A fork is one worker's reference; each was
// made by a parent: the owner itself, or a fork that is kept until the owner knows the child.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/export.h>
#include <weft/engine/call/extension.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/call/types.h>
#include <weft/engine/codec/stream.h>
#include <weft/engine/future/future.h>

namespace weft::rpc {
class AgentCore;
}

namespace weft::rref {

// Both unique in a job: the rank that made it in the top 16 bits, a counter below.
using Id = std::uint64_t;
using ForkId = std::uint64_t;
// "(2, 17)".
WEFT_API std::string to_text(std::uint64_t id);
using rpc::rank_in;

// How a user's reference came to this worker.
struct Origin {
  std::string_view
      function;   // what remote() was called with; lives as long as the program; "" for copy_to()
  int from = -1;  // or the rank of the worker that sent it
  Place place = {};  // of the call of remote(), where it is known
};

// A value at its owner, before and after it has been created.
class WEFT_API Owned {
 public:
  Owned(std::shared_ptr<weft::detail::Executor> executor, const std::type_info& type, Id id)
      : promise_(std::move(executor)), type_(type), id_(id) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  virtual ~Owned() = default;
  // Fails with a CreationError.
  Future<void> created() const { return promise_.future(); }
  // Does nothing once it is created or has failed. What a function threw comes as a RemoteError
  // (rpc::detail::thrown_by).
  void fail(const std::exception_ptr& cause) noexcept;
  const std::type_info& type() const { return type_; }
  // Whether destroying the value costs next to nothing, and runs nothing of the user's.
  virtual bool ends_at_once() const = 0;

 protected:
  // Whether it was not ended before.
  bool end() noexcept { return !ended_.exchange(true); }
  // A value's destructor is the user's, and may block: not in a turn of the loop, where the last
  // call on it may end.
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
  // The value is there when the work on devices has run.
  void set(std::shared_ptr<T> value, weft::detail::DeviceWorkRef work) {
    if (!end()) return let_go(std::move(value));
    value_ = std::move(value);
    promise_.set_with(std::move(work), {});
  }
  // After created(); throws its error. The current streams wait for it.
  const std::shared_ptr<T>& value() const {
    promise_.future().get();
    return value_;
  }
  // After created(), which has not failed, for who makes streams wait itself.
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

// What the copies of one RRef on one worker share.
class WEFT_API Handle {
 public:
  // The owner's.
  Handle(std::weak_ptr<rpc::AgentCore> core, Id id, rpc::Member owner,
         std::shared_ptr<Owned> owned);
  // A user's. `confirmed`: the owner knows it. `created` only where this worker asked for the
  // creation.
  Handle(std::weak_ptr<rpc::AgentCore> core, Id id, ForkId fork, rpc::Member owner,
         Future<void> confirmed, std::optional<Future<void>> created, const Origin& origin);
  // A user's reference ends: the owner is told, once it knows it at all.
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // Throws Caller where the agent has shut down.
  std::shared_ptr<rpc::AgentCore> core() const;
  Id id() const { return id_; }
  ForkId fork() const { return fork_; }
  const rpc::WorkerInfo& owner() const { return owner_.worker; }
  // Not another one that has its rank after it.
  rpc::Recipient to_owner() const { return {owner_.worker.rank, owner_.generation}; }
  const std::shared_ptr<Owned>& owned() const { return owned_; }  // null for users
  bool is_owner() const { return owned_ != nullptr; }
  const Origin& origin() const { return origin_; }
  bool confirmed() const { return is_owner() || (confirmed_.done() && !confirmed_.failed()); }
  const std::optional<Future<void>>& created() const { return created_; }
  // The same, of a user that has it, with a CreationError where it fails.
  Future<void> creation() const;
  // Throws the CreationError, if it is known.
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

// "RRef (0, 3), fork (0, 4), of worker1 (rank 1)"; of the owner's own: "RRef (0, 3), owned here".
WEFT_API std::string describe(const Handle& handle);

// The value that a call is for; travels as its id. The owner looks it up when the call comes, and
// keeps it until the call has run: the caller may have given up, and dropped its reference, long
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

// An RRef in a message; one that is empty is an array of nothing.
struct ReferenceRecord {
  Id id = 0;
  std::int32_t owner = -1;  // rank
  std::string owner_name;
  rpc::Generation generation = 0;  // of the owner
  ForkId fork = 0;
  std::uint64_t type = 0;  // a hash of its name
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
  // The value of that id; made, to be created later, where none is known yet: its creation may be
  // behind this message. Throws Caller where it has another type.
  template <class T>
  std::shared_ptr<OwnedValue<T>> owned(Id id) {
    auto found =
        find_or_expect(id, [&] { return std::make_shared<OwnedValue<T>>(executor(), id); });
    if (found->type() != typeid(OwnedValue<T>))
      wrong_type(id, typeid(OwnedValue<T>), found->type());
    return std::static_pointer_cast<OwnedValue<T>>(found);
  }
  // The creation has come: the worker holds the fork from now on.
  template <class T>
  std::shared_ptr<OwnedValue<T>> adopt(Id id, ForkId fork, const rpc::WorkerGeneration& holder) {
    auto found =
        arrive(id, fork, holder, [&] { return std::make_shared<OwnedValue<T>>(executor(), id); });
    if (found->type() != typeid(OwnedValue<T>))
      wrong_type(id, typeid(OwnedValue<T>), found->type());
    return std::static_pointer_cast<OwnedValue<T>>(found);
  }
  // The worker holds a fork from now on, unless it has ended already. Idempotent. `owned` may be
  // null where it is not known.
  void add_fork(Id id, ForkId fork, const rpc::WorkerGeneration& holder,
                const std::shared_ptr<Owned>& owned);
  // The worker that held it, or was to, does so no longer.
  void remove_fork(Id id, ForkId fork, int holder);
  // Whether the owner knows it already.
  bool has_fork(Id id, ForkId fork) const;
  // Whether it is known and has not ended.
  bool holds(Id id, ForkId fork) const;
  bool keeps_parent_of(ForkId child) const;
  // Whether a handle of this worker's is that fork; else it never will be.
  bool has_or_ends(ForkId fork);
  bool has_given_back(ForkId fork) const;
  // No creation will come, and why: who waits for the value fails. Changes nothing where one has
  // come.
  void give_up(Id id, const std::exception_ptr& why);
  // An RRef of the owner's own refers to it, too, and no longer.
  void hold_here(Id id, const std::shared_ptr<Owned>& owned);
  void release_here(Id id);

  // --- as user, and as parent
  // Keeps the parent until the worker says that the owner knows the child.
  void keep_parent(ForkId child, std::shared_ptr<Handle> parent,
                   const rpc::WorkerGeneration& receiver);
  void child_accepted(ForkId child);
  void count_pending(int change) { pending_users_ += change; }
  // Handles of users, while they live.
  void enter(const Handle& user);
  void forget(const Handle& user);
  // Those that live, one a text, with where they came from.
  std::vector<std::string> held() const override;

  // A worker cannot be reached any more: what it holds has ended.
  // Or it has left, and one of that life is its successor.
  void worker_lost(int rank, std::optional<std::uint16_t> successor) override;
  // Whether it holds anything, or its acceptance is waited for.
  bool concerns(int rank) const override;
  // The agent ends: values go, what waits for them fails.
  void close() override;

 private:
  struct Entry {
    std::shared_ptr<Owned> owned;                   // null until a message says what it is
    std::map<ForkId, rpc::WorkerGeneration> forks;  // and who holds it
    int here = 0;                                   // handles of the owner's own
    bool arrived = false;            // the creation has come, or the value was made here
    std::exception_ptr given_up;     // why no creation will come
    EventLoop::Registration expiry;  // until then
    std::chrono::seconds patience{1};
    // What another worker is to send, which may take its time: the creator's own fork is known
    // before.
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
  void bury(ForkId fork);
  Entry take_if_unused(Id id);
  // Not under the mutex.
  void let_go(std::shared_ptr<Owned> value);
  // Why it will not come any more: its creator has left, and another one has its rank. Not under
  // the mutex.
  std::exception_ptr too_late(Id id) const;
  void expect(Id id, Entry& entry);
  // What has just been given to a worker that had left before ends. Not under the mutex.
  void end_if_late(const rpc::WorkerGeneration& holder);
  void expire(Id id);

  rpc::AgentCore& core_;
  std::atomic<std::uint64_t> next_{1};
  std::atomic<int> pending_users_{0};
  std::atomic<int> ending_{0};  // values that are being destroyed
  mutable std::mutex mutex_;    // of the rest
  std::unordered_map<Id, Entry> entries_;
  struct Parent {
    std::shared_ptr<Handle> handle;
    rpc::WorkerGeneration receiver;
  };
  std::unordered_map<ForkId, Parent> parents_;
  std::unordered_map<ForkId, const Handle*> users_;
  // Forks that have ended: a message about one that was retried, or late, changes nothing.
  std::unordered_set<ForkId> buried_;
  std::deque<std::pair<Deadline::Clock::time_point, ForkId>> burials_;
};

// The agent's own.
WEFT_API References& references_of(rpc::AgentCore& core);

// Has the target keep its value, which is there when this is done.
template <class T>
Future<void> wait_for(References& references, const Target& target) {
  target.owned = references.owned<T>(target.id);
  return target.owned->created();
}

// A reference to what a third worker is `asked` to send to `owner`, who is told who will hold it;
// known not to be `made` before that, where its original is not. Where it fails, the owner is told
// that nothing will come. Keeps the original meanwhile.
WEFT_API std::shared_ptr<Handle> expect_there(const std::shared_ptr<rpc::AgentCore>& core,
                                              const rpc::Member& owner, Id id, ForkId fork,
                                              const Future<rpc::Outcome>& asked,
                                              const Future<rpc::Outcome>& made,
                                              std::shared_ptr<Handle> original, Place place);

// To the owner: no creation of that value will come.
WEFT_API void tell_will_not_come(const std::shared_ptr<rpc::AgentCore>& core, int owner, Id id,
                                 const rpc::Outcome& why);
// The references in one message that goes to a worker.
class WEFT_API ForkWriter final : public rpc::SentReferences {
 public:
  ForkWriter(rpc::AgentCore& core, const rpc::Recipient& to) : core_(core), to_(to) {}
  void pack(codec::Packer& packer, const std::shared_ptr<Handle>& handle, std::uint64_t type);
  // The message will not go out: what was made for it ends. As the next, from every thread.
  void undo() override;
  // Before anybody else knows it.
  bool is_empty() const override { return forks_.empty() && children_.empty(); }
  // Adds those that have not ended: values owned here, and children of other owners'.
  void list_open(std::vector<std::pair<Id, ForkId>>& owned, std::vector<ForkId>& children) const;
  bool is_over() const override;

 private:
  rpc::AgentCore& core_;
  const rpc::Recipient to_;
  mutable std::mutex mutex_;                  // of the rest, once the message is written
  std::vector<std::pair<Id, ForkId>> forks_;  // of values that are owned here
  std::vector<ForkId> children_;
};

// Those in one message that came from a worker.
class WEFT_API ForkReader final : public rpc::ReceivedReferences {
 public:
  ForkReader(rpc::AgentCore& core, int from) : core_(core), from_(from) {}
  // `own` finds the value where this worker is the owner. Null for an empty RRef.
  std::shared_ptr<Handle> unpack(const msgpack::object& object, std::uint64_t type,
                                 const std::function<std::shared_ptr<Owned>(References&, Id)>& own);
  // Done when the owners know all the references that have come; a function starts then.
  std::vector<Future<void>> take_unconfirmed() override { return std::move(unconfirmed_); }

 private:
  rpc::AgentCore& core_;
  const int from_;
  std::vector<Future<void>> unconfirmed_;
};

}  // namespace weft::rref
