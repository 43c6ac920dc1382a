// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <map>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/engine/checkpoint/checkpoint_parts.h>
#include <weft/engine/checkpoint/folder.h>
#include <weft/engine/checkpoint/job_checkpoint.h>
#include <weft/engine/checkpoint/job_owner.h>
#include <weft/engine/checkpoint/loading.h>
#include <weft/engine/checkpoint/part_contents.h>
#include <weft/engine/checkpoint/save_arguments.h>
#include <weft/engine/checkpoint/saving_thread.h>
#include <weft/engine/group/collective_error.h>

namespace weft::checkpoint {

struct JobContents {
  static const std::vector<JobPart::Owned>& owned(const JobPart& part) { return part.owned_; }
  static const std::optional<Part>& own(const JobPart& part) { return part.own_; }
};

namespace {

using group::error_of;
using job::Answer;

struct Owner {
  rpc::WorkerInfo worker;
  job::OwnedParts parts;
  std::vector<std::size_t> places;  // of the parts in the checkpoint
  Answer staged;
};

// The destination of calls to an owner. Calls to this worker itself have no limit: they use the
// caller's parts, which must not be used any more once save_async() or load() has ended.
rpc::Destination destination_of(const Owner& owner, const rpc::Agent& agent) {
  const rpc::Destination destination(owner.worker);
  const bool is_self = owner.worker.rank == agent.self().rank;
  return is_self ? destination.timeout(std::chrono::milliseconds(0)) : destination;
}

// Asks all owners, also behind one that cannot be asked, and waits for them. Throws what one says,
// or the loss of one, naming it.
std::vector<Answer> ask(const std::vector<Owner>& owners,
                        const std::function<Future<Answer>(const Owner&, std::size_t)>& call) {
  std::vector<std::optional<Future<Answer>>> asked(owners.size());
  std::vector<std::optional<Error>> failures;
  for (std::size_t i = 0; i < owners.size(); ++i)
    failures.push_back(error_of([&] { asked[i] = call(owners[i], i); }));
  std::vector<Answer> answers(owners.size());
  std::optional<Error> failure;
  for (std::size_t i = 0; i < owners.size(); ++i) {
    auto one = failures[i];
    if (!one) {
      one = error_of([&] {
        answers[i] = asked[i]->get();
        if (answers[i].blame >= 0) throw Error(blame_from(answers[i].blame), answers[i].text);
      });
    }
    if (!one) continue;
    const bool is_cause = one->blame() == Blame::PeerLost;
    if (!failure || (is_cause && failure->blame() != Blame::PeerLost))
      failure = one->within("worker '" + owners[i].worker.name + "'");
  }
  if (failure) throw *failure;
  return answers;
}

// All parts, in order, under the names that they have in the checkpoint.
std::vector<std::string> names_of(const std::vector<JobPart>& parts) {
  std::vector<std::string> names;
  for (const JobPart& part : parts) {
    if (JobContents::own(part)) names.push_back(part.name());
    for (const auto& owned : JobContents::owned(part)) names.push_back(owned.name);
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (std::find(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(i), names[i]) !=
        names.begin() + static_cast<std::ptrdiff_t>(i))
      throw Error(Blame::Caller, "the checkpoint has two parts named '" + names[i] + "'");
  }
  if (names.empty()) throw Error(Blame::Caller, "the checkpoint has no parts");
  refuse_ambiguous(names);
  return names;
}

// The owners in the order of their ranks. Each makes its parts, from references that are sent to
// it.
std::vector<Owner> owners_of(const std::vector<JobPart>& parts, const rpc::Agent& agent) {
  std::map<int, Owner> owners;
  std::size_t place = 0;
  const auto add = [&](const rpc::WorkerInfo& worker, RRef<detail::OwnedPart> part) {
    Owner& owner = owners[worker.rank];
    owner.worker = worker;
    owner.parts.push_back(std::move(part));
    owner.places.push_back(place++);
  };
  for (const JobPart& part : parts) {
    if (const auto& own = JobContents::own(part))
      add(agent.self(), RRef<detail::OwnedPart>(agent, detail::OwnedPart{*own, nullptr}));
    for (const auto& owned : JobContents::owned(part)) add(owned.owner, owned.make(agent));
  }
  std::vector<Owner> all;
  for (auto& [rank, owner] : owners) all.push_back(std::move(owner));
  return all;
}

// The last save of each agent of this process.
class LastSaves {
 public:
  // Notes a save, and returns the earlier one.
  Ended exchange(const rpc::Agent& agent, Ended ended) {
    MutexLock lock(mutex_);
    std::erase_if(all_, [](const auto& item) { return item.second.first.expired(); });
    auto& mine = all_[agent.shared_core().get()];
    mine.first = agent.shared_core();
    return std::exchange(mine.second, std::move(ended));
  }
  // Blocks until the agent's last save has ended.
  void wait_for(const rpc::Agent& agent) {
    Ended last;
    {
      MutexLock lock(mutex_);
      const auto found = all_.find(agent.shared_core().get());
      if (found != all_.end()) last = found->second.second;
    }
    if (last.valid()) last.wait();
  }

 private:
  Mutex mutex_;
  std::map<const void*, std::pair<std::weak_ptr<call::AgentCore>, Ended>> all_
      WEFT_GUARDED_BY(mutex_);
};

LastSaves& last_saves() {
  static auto* const all = new LastSaves();  // threads may end after static objects are destroyed
  return *all;
}

// One save, behind its copies.
class JobSave {
 public:
  JobSave(rpc::Agent agent, std::string folder, const std::vector<JobPart>& parts, int keep)
      : agent_(std::move(agent)), keep_(keep), numbered_(folder) {
    checkpoint_ = folder + "/" + std::to_string(numbered_.number());
    const std::vector<std::string> names = names_of(parts);
    owners_ = owners_of(parts, agent_);
    auto answers = ask(owners_, [&](const Owner& owner, std::size_t) {
      return agent_.async<&job::stage_save>(destination_of(owner, agent_), owner.parts,
                                            checkpoint_);
    });
    manifest_.ranks = static_cast<int>(owners_.size());
    manifest_.parts.resize(names.size());
    for (std::size_t i = 0; i < owners_.size(); ++i) {
      owners_[i].staged = std::move(answers[i]);
      owners_[i].parts.clear();
      const auto& kinds = owners_[i].staged.kinds;
      if (kinds.size() != owners_[i].places.size()) throw unreadable(owners_[i]);
      for (std::size_t k = 0; k < owners_[i].places.size(); ++k) {
        const std::size_t place = owners_[i].places[k];
        manifest_.parts[place] = {names[place], kinds[k]};
      }
    }
  }

  void write() {
    const auto answers = ask(owners_, [&](const Owner& owner, std::size_t) {
      return agent_.async<&job::write_staged>(destination_of(owner, agent_), owner.staged.staged,
                                              file_of(owner));
    });
    for (std::size_t i = 0; i < owners_.size(); ++i) {
      SavedFile file = parse_file(answers[i].text);
      const bool is_checked =
          !file.header.empty() && std::ranges::all_of(file.slices, [](const SavedSlice& one) {
            return one.slice.bytes == 0 || !one.checksums.empty();
          });
      if (file.name != file_of(owners_[i]) || !is_checked) throw unreadable(owners_[i]);
      manifest_.files.push_back(std::move(file));
    }
    tensors_of(manifest_);  // throws for values that overlap
    numbered_.publish(manifest_);
    numbered_.remove_old(keep_);
  }

 private:
  static std::string file_of(const Owner& owner) { return file_name_of(owner.worker.rank); }
  static Error unreadable(const Owner& owner) {
    return {Blame::Protocol,
            "worker '" + owner.worker.name + "' has answered what no owner of parts answers"};
  }

  rpc::Agent agent_;
  const int keep_;
  Numbered numbered_;
  std::string checkpoint_;
  std::vector<Owner> owners_;
  Manifest manifest_;
};

}  // namespace

Saving save_async(std::string folder, const rpc::Agent& agent, std::vector<JobPart> parts,
                  SaveOptions options) {
  folder = without_slashes(std::move(folder));
  check_options(options);
  std::promise<std::optional<Error>> promise;
  const Ended ended = promise.get_future().share();
  const Ended earlier = last_saves().exchange(agent, ended);
  if (earlier.valid()) earlier.wait();
  std::shared_ptr<JobSave> save;
  try {
    save = std::make_shared<JobSave>(agent, folder, parts, options.keep);
  } catch (...) {
    promise.set_value(std::nullopt);  // a later save may wait for it
    throw;
  }
  parts.clear();
  return start_saving(std::move(promise), ended, agent.self().name,
                      [save = std::move(save)] { return error_of([&] { save->write(); }); });
}

namespace {

// How long after its own staging an owner may begin to change its values: the others may take as
// long as the agent's limit to stage theirs, and the order may be as long on its way.
std::chrono::milliseconds commit_lease(std::chrono::milliseconds timeout) {
  return 2 * std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(10'000));
}

}  // namespace

void load(const std::string& path, const rpc::Agent& agent, const std::vector<JobPart>& parts) {
  const std::string folder = without_slashes(path);
  names_of(parts);
  last_saves().wait_for(agent);  // it removes older checkpoints
  Found found = find(folder);
  const int ranks = std::exchange(found.manifest.ranks, std::max(found.manifest.ranks, 1));
  const std::string manifest = encode(found.manifest);
  std::vector<Owner> owners = owners_of(parts, agent);
  const auto is_self = [&](const Owner& owner) { return owner.worker.rank == agent.self().rank; };
  const std::chrono::milliseconds lease = commit_lease(agent.timeout());
  const std::vector<Answer> staged = ask(owners, [&](const Owner& owner, std::size_t) {
    return agent.async<&job::stage_load>(destination_of(owner, agent), owner.parts,
                                         folder + found.below, manifest, ranks, owner.worker.rank,
                                         is_self(owner) ? 0 : lease.count());
  });
  // An owner's lease has begun before it answered, and so it ends before this call gives up: what
  // the program does after a Timeout is not overwritten.
  ask(owners, [&](const Owner& owner, std::size_t i) {
    auto destination = destination_of(owner, agent);
    if (!is_self(owner)) destination = destination.timeout(lease);
    return agent.async<&job::commit>(destination, staged[i].staged);
  });
}

bool exists(const std::string& path, const rpc::Agent& /*agent*/) {
  const std::string folder = without_slashes(path);
  return is_folder(folder) && has_whole(folder);
}

}  // namespace weft::checkpoint
