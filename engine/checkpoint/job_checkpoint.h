// SPDX-License-Identifier: Apache-2.0
// Checkpoints of an RPC job: values that live on several workers, in one folder. One worker saves
// and loads; the others need not call anything.
//
//   const std::vector<weft::checkpoint::JobPart> parts = {
//       {"table", table},          // RRef<Table>, on worker "ps0"
//       {"rows", remote_rows},     // std::vector<RRef<at::Tensor>>, on any workers
//       {"head", head}, {"epoch", epoch}};  // this worker's own
//   weft::checkpoint::Saving saving = weft::checkpoint::save_async("run", agent, parts);
//   …
//   saving.wait();
//   weft::checkpoint::load("run", agent, parts);  // perhaps in a later job, with other owners
//
// The folder is the one of save_async() over a group, with a file of each owner: load() over a
// group reads it too, and load() over an agent reads that of a group. All workers reach the folder
// under one path.
//
// No call is collective; any worker may call them, on any thread, in which they block. The program
// of each owner makes a JobPart of an RRef of the same type somewhere: that registers the functions
// that are called there.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <weft/base/export.h>
#include <weft/engine/checkpoint/checkpoint.h>
#include <weft/engine/rpc/agent.h>

namespace weft::checkpoint {

namespace detail {

// A part on its owner, with the reference that keeps its value alive.
struct OwnedPart {
  Part part;
  std::shared_ptr<const void> kept;
};

// Called on the owner. Waits until the value exists.
template <class T>
WEFT_API OwnedPart owned_part(RRef<T> value, std::string name) {
  auto kept = std::make_shared<RRef<T>>(std::move(value));
  return {Part(std::move(name), kept->local_value()), kept};
}

template <class T>
constexpr bool kIsRemote = false;
template <class T>
constexpr bool kIsRemote<RRef<T>> = true;
template <class T>
constexpr bool kIsRemote<std::vector<RRef<T>>> = true;

}  // namespace detail

// A name, unique in its checkpoint, and a value of the job.
class JobPart {
 public:
  // A value that its owner writes and loads, of any type that a Part takes: a module, its holder or
  // a shared pointer to it, an optimizer, a tensor, a number. Throws Caller for an empty RRef.
  template <class T>
  JobPart(std::string name, RRef<T> value) : name_(std::move(name)) {
    add(name_, std::move(value));
  }
  // Several values, of any owners, as parts NAME.0, NAME.1, …
  template <class T>
  JobPart(std::string name, std::vector<RRef<T>> values) : name_(std::move(name)) {
    for (std::size_t i = 0; i < values.size(); ++i)
      add(name_ + "." + std::to_string(i), std::move(values[i]));
  }
  // A value of the worker that calls save_async() or load(): see Part.
  template <class T>
  requires(!detail::kIsRemote<std::remove_cvref_t<T>>) JobPart(std::string name, T&& value)
      : name_(std::move(name)), own_(Part(name_, std::forward<T>(value))) {}

  // The name under which the value is stored.
  const std::string& name() const { return name_; }

 private:
  friend struct JobContents;
  struct Owned {
    std::string name;
    rpc::WorkerInfo owner;
    std::function<RRef<detail::OwnedPart>(const rpc::Agent& agent)> make;
  };
  template <class T>
  void add(std::string name, RRef<T> value) {
    const rpc::WorkerInfo owner = value.owner();
    owned_.push_back(
        {name, owner, [owner, name, value = std::move(value)](const rpc::Agent& agent) {
           return agent.remote<&detail::owned_part<T>>(owner, value, name);
         }});
  }

  std::string name_;
  std::vector<Owned> owned_;
  std::optional<Part> own_;
};

// Copies the values on their owners, which may change them from then on, and returns. The owners
// then write FOLDER/NUMBER, each its own file, and this worker writes the manifest last: there is
// the old checkpoint or the new one, whole. Waits for earlier calls on this agent. Of calls that
// change values, those that have ended before are in the checkpoint; the program keeps others from
// running at the same time.
//
// Saving::wait() throws what went wrong on an owner, naming it: Busy for a full disk, Caller for a
// folder that cannot be written, PeerLost for an owner that died, Timeout for one that takes longer
// than the agent's timeout (Agent::set_timeout) to copy or to write. The previous checkpoint is
// whole then, and an owner that writes later reaches no other checkpoint. Throws the same itself
// while values are copied, and Caller for parts that are per_rank(), and for what is spread over
// the ranks of a group: sharded models and their optimizers, and a ZeroRedundancyOptimizer.
WEFT_API Saving save_async(std::string folder, const rpc::Agent& agent, std::vector<JobPart> parts,
                           SaveOptions options = {});

// Loads the parts, which may be fewer than were saved: each owner reads its own values from FOLDER
// (the newest whole checkpoint) or FOLDER/NUMBER. All owners compare names, shapes and dtypes, and
// checksums, before any of them changes something. Waits for earlier calls of save_async() on this
// agent. Throws Caller, naming the worker and the difference, if the parts do not fit on one, or if
// there is no checkpoint; PeerLost and Timeout as save_async(). A worker that is lost, or takes
// twice the agent's timeout, in the last moment, when all begin to change their values, leaves the
// other workers with the new ones. A worker that is told too late refuses: once load() has thrown
// Timeout, none begins to change its values.
WEFT_API void load(const std::string& path, const rpc::Agent& agent,
                   const std::vector<JobPart>& parts);

// True if the folder has a whole checkpoint, as this worker sees it.
WEFT_API bool exists(const std::string& path, const rpc::Agent& agent);

}  // namespace weft::checkpoint
