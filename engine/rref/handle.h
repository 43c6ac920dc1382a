// SPDX-License-Identifier: Apache-2.0
// A value at its owner (Owned), and one worker's reference to a value (Handle).
//
// The agent's references share an Owned with the calls that use it; the copies of an RRef share a
// Handle. Usable from every thread. Nothing here blocks, except OwnedValue::value(), which waits
// for the creation.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/call/types.h>
#include <weft/engine/future/future.h>

namespace weft::call {
class AgentCore;
}

namespace weft::rref {

// Both are unique in a job: the rank that made it in the top 16 bits, a counter below.
using Id = std::uint64_t;
using ForkId = std::uint64_t;
// "(2, 17)".
WEFT_API std::string to_text(std::uint64_t id);
using call::rank_in;

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
  // as a RemoteError (call::detail::thrown_by).
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
  Handle(std::weak_ptr<call::AgentCore> core, Id id, call::Member owner,
         std::shared_ptr<Owned> owned);
  // For a user. `confirmed`: the owner knows the fork. `created`: only if this worker asked for the
  // creation.
  Handle(std::weak_ptr<call::AgentCore> core, Id id, ForkId fork, call::Member owner,
         Future<void> confirmed, std::optional<Future<void>> created, const Origin& origin);
  // Ends a user's reference: tells the owner, once the owner knows of it.
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // Throws Caller if the agent has shut down.
  std::shared_ptr<call::AgentCore> core() const;
  Id id() const { return id_; }
  ForkId fork() const { return fork_; }
  const rpc::WorkerInfo& owner() const { return owner_.worker; }
  // The owner in its generation, not a later worker with its rank.
  call::Recipient to_owner() const { return {owner_.worker.rank, owner_.generation}; }
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
  const std::weak_ptr<call::AgentCore> core_;
  const Id id_;
  const ForkId fork_ = 0;
  const call::Member owner_;
  const std::shared_ptr<Owned> owned_;
  const Future<void> confirmed_;
  const std::optional<Future<void>> created_;
  const Origin origin_;
};

// "RRef (0, 3), fork (0, 4), of worker1 (rank 1)"; for the owner's own: "RRef (0, 3), owned here".
WEFT_API std::string describe(const Handle& handle);

}  // namespace weft::rref
