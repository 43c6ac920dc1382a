// SPDX-License-Identifier: Apache-2.0
// The references of one agent: the values that it owns and that others hold (Values), its
// references to others' values (Users), and those that it has given to third workers (Parents).
// docs/wire.md ("References") has the protocol. Usable from every thread; nothing here blocks.
//
// An owner keeps a value while it knows any fork of it. A fork is one worker's reference. Each fork
// was made by a parent: the owner itself, or a fork that is kept until the owner knows the child.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <weft/base/export.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/extension.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/call/types.h>
#include <weft/engine/codec/stream.h>
#include <weft/engine/future/future.h>
#include <weft/engine/rref/handle.h>
#include <weft/engine/rref/parents.h>
#include <weft/engine/rref/users.h>
#include <weft/engine/rref/values.h>

namespace weft::call {
class AgentCore;
}

namespace weft::rref {

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
  call::Generation generation = 0;  // of the owner
  ForkId fork = 0;
  std::uint64_t type = 0;  // a hash of the type's name
  WEFT_FIELDS(id, owner, owner_name, generation, fork, type)
};

class ForkWriter;

class WEFT_API References final : public call::ReferenceExtension {
 public:
  explicit References(call::AgentCore& core) : core_(core), values_(core) {}

  Values& values() { return values_; }
  Users& users() { return users_; }
  Parents& parents() { return parents_; }
  std::uint64_t next_id();

  // Keeps the parent until the receiver says that the owner knows the child.
  void keep_parent(ForkId child, std::shared_ptr<Handle> parent,
                   const call::WorkerGeneration& receiver);
  // True if a handle of this worker is that fork; if not, it never will be.
  bool has_or_ends(ForkId fork);
  // Ends forks that were just given to a worker that had already left.
  void end_if_late(const call::WorkerGeneration& holder);

  std::shared_ptr<call::SentReferences> references_to(const call::Recipient& worker) override;
  void with_references_from(int worker,
                            const std::function<void(call::ReceivedReferences&)>& read) override;
  void ask_which_arrived(int worker,
                         const std::vector<std::shared_ptr<call::SentReferences>>& sent) override;
  void give_back_reply(int callee, std::uint64_t call) override;
  void count(rpc::DebugInfo& info) const override;
  // Describes each living handle of a user and its origin.
  std::vector<std::string> held() const override { return users_.held(); }

  // Called when a worker cannot be reached any more, or has left and a worker of generation
  // `successor` has its rank: its forks end.
  void worker_lost(int rank, std::optional<std::uint16_t> successor) override;
  // True if the worker holds a fork, or is expected to create a value or to accept a child.
  bool concerns(int rank) const override;
  // Called when the agent ends: drops values and fails calls that wait for them.
  void close() override;

 private:
  call::AgentCore& core_;
  std::atomic<std::uint64_t> next_{1};
  Values values_;
  Users users_;
  Parents parents_;
};

// The agent's own.
WEFT_API References& references_of(call::AgentCore& core);

// Makes `target` keep its value. Done when the value has been created.
template <class T>
Future<void> wait_for(References& references, const Target& target) {
  target.owned = references.values().owned<T>(target.id);
  return target.owned->created();
}

// Makes a reference to a value that a third worker is `asked` to send to `owner`, and tells the
// owner that this worker holds it. `made` is `asked`, or fails earlier if the original was not
// created; if it fails, the owner is told that nothing will come. Keeps `original` meanwhile.
WEFT_API std::shared_ptr<Handle> expect_there(const std::shared_ptr<call::AgentCore>& core,
                                              const call::Member& owner, Id id, ForkId fork,
                                              const Future<call::Outcome>& asked,
                                              const Future<call::Outcome>& made,
                                              std::shared_ptr<Handle> original, Place place);

// Tells the owner that no creation of that value will come.
WEFT_API void tell_will_not_come(const std::shared_ptr<call::AgentCore>& core, int owner, Id id,
                                 const call::Outcome& why);
// Writes the references of one message to a worker.
class WEFT_API ForkWriter final : public call::SentReferences {
 public:
  ForkWriter(call::AgentCore& core, const call::Recipient& to) : core_(core), to_(to) {}
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
  call::AgentCore& core_;
  const call::Recipient to_;
  mutable Mutex mutex_;  // guards the members below once the message is written
  std::vector<std::pair<Id, ForkId>> forks_;  // to values owned here
  std::vector<ForkId> children_;
};

// Reads the references of one message from a worker.
class WEFT_API ForkReader final : public call::ReceivedReferences {
 public:
  ForkReader(call::AgentCore& core, int from) : core_(core), from_(from) {}
  // `own` finds the value if this worker is the owner. Null for an empty RRef.
  std::shared_ptr<Handle> unpack(const msgpack::object& object, std::uint64_t type,
                                 const std::function<std::shared_ptr<Owned>(References&, Id)>& own);
  // Done when the owners know all references that have come; the called function starts then.
  std::vector<Future<void>> take_unconfirmed() override { return std::move(unconfirmed_); }

 private:
  call::AgentCore& core_;
  const int from_;
  std::vector<Future<void>> unconfirmed_;
};

}  // namespace weft::rref
