// SPDX-License-Identifier: Apache-2.0
// save_async: the ranks copy their shares together, and a thread of each writes them. The threads
// meet over the group's store, since the group's operations belong to the program.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <iterator>
#include <list>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include <weft/base/deadline.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/base/patience.h>
#include <weft/engine/checkpoint/checkpoint.h>
#include <weft/engine/checkpoint/checkpoint_parts.h>
#include <weft/engine/checkpoint/folder.h>
#include <weft/engine/checkpoint/host_memory.h>
#include <weft/engine/checkpoint/part_values.h>
#include <weft/engine/checkpoint/save_arguments.h>
#include <weft/engine/checkpoint/saving_thread.h>
#include <weft/engine/checkpoint/shares.h>
#include <weft/engine/checkpoint/slice_file.h>
#include <weft/engine/checkpoint/together.h>
#include <weft/engine/checkpoint/value_copies.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/group/objects.h>

namespace weft::checkpoint {

namespace {

using group::error_of;

constexpr std::size_t kPiece = 1 << 20;
constexpr std::chrono::milliseconds kLongestAfterLoss{5000};
// Rank 0 adds this to the key "decided", and a rank that gives it up adds 1: the first one decides.
constexpr long kDecides = 1L << 32;

// A rank tells the others in the store nothing, a text, or an error: its blame, the ranks that it
// names, and its text on the next line.
std::string told(const std::optional<Error>& failure, const std::string& text) {
  if (!failure) return "0" + text;
  std::string said = std::to_string(1 + static_cast<int>(failure->blame()));
  for (const int rank : failure->ranks()) said += " " + std::to_string(rank);
  return said + "\n" + failure->text();
}

std::string heard(const std::string& said) {
  if (said.starts_with("0")) return said.substr(1);
  const std::size_t line = said.find('\n');
  if (line == std::string::npos)
    throw Error(Blame::Protocol, "a rank has said something unreadable");
  std::istringstream numbers(said.substr(0, line));
  int blame = 0;
  numbers >> blame;
  std::vector<int> ranks;
  for (int rank = 0; numbers >> rank;) ranks.push_back(rank);
  throw Error(blame_from(blame - 1), said.substr(line + 1)).with_ranks(std::move(ranks));
}

// One rank's work behind one save_async(), on a thread of its own.
class Job {
 public:
  Job(ProcessGroup group, OpenFolder checkpoint, int number, SaveOptions options)
      : group_(std::move(group)),
        checkpoint_(std::move(checkpoint)),
        key_("weft/checkpoint/" + std::to_string(number) + "/"),
        options_(options) {}

  // Makes memory for the copies, or takes that of an earlier save. `kept` gets it at the end.
  void prepare(Share share, std::shared_ptr<KeptBytes> kept) {
    share_ = std::move(share);
    kept_ = std::move(kept);
    memory_ = memory_for(share_);
  }

  // Copies the values. The other ranks learn of a failure from run().
  void copy() {
    uncopied_ = error_of([&] { copies_.start(share_, memory_, options_.stage_on_gpu); });
    share_.tensors.clear();
  }

  // Rank 0 gives it the checkpoint's folder and manifest.
  void take(std::unique_ptr<Numbered> numbered, Manifest manifest) {
    numbered_ = std::move(numbered);
    manifest_ = std::move(manifest);
  }

  std::optional<Error> run() {
    std::string file;
    auto failure = error_of([&] { file = write(); });
    if (failure) failure = failure->within("rank " + std::to_string(group_.rank()));
    const auto ended = error_of(
        [&] { group_.rank() == 0 ? lead(told(failure, file)) : follow(told(failure, file)); });
    numbered_.reset();
    return ended;
  }

 private:
  std::string write() {
    if (uncopied_) throw Error(*uncopied_);
    copies_.wait();
    const SavedFile file =
        write_slices(checkpoint_, file_name_of(group_.rank()), std::move(share_.slices),
                     memory_.const_data_ptr(), share_.bytes);
    kept_->keep(std::exchange(memory_, {}));
    return encode(file);
  }

  // Rank 0 hears of all ranks, writes the manifest, and tells them. It returns when all have heard:
  // the store may end with it.
  void lead(const std::string& own) {
    if (group_.size() > 1) set("written", "");
    const Deadline deadline = Deadline::in(group::timeout_of(group_));
    std::optional<Error> failure;
    for (int rank = 0; rank < group_.size(); ++rank) {
      const auto one = error_of([&] {
        const std::string said = rank == 0 ? own : get(std::to_string(rank), deadline, rank);
        manifest_.files.push_back(parse_file(heard(said)));
      });
      if (one && !failure) failure = one;
      if (failure && failure->blame() == Blame::PeerLost) break;
    }
    if (!failure) {
      failure = error_of([&] {
        decide();
        publish();
      });
    }
    if (group_.size() > 1) {
      // The checkpoint is whole, or has failed, by now: a rank that is lost later changes nothing.
      const auto untold = error_of([&] { tell(failure); });
      if (untold) log::debug("checkpoint::save_async: " + untold->text());
    }
    if (failure) throw *failure;
    numbered_->remove_old(options_.keep);
  }

  // Either rank 0 decides to publish, or a rank gives it up, and no rank succeeds.
  void decide() {
    if (group_.size() == 1) return;
    throw_given_up();
    if (store().add(key_ + "decided", kDecides) == kDecides) return;
    throw_given_up();
    throw Error(Blame::Timeout, "rank 0 has not written its part before another rank gave it up")
        .with_ranks({0});
  }

  // Throws the error of a rank that waits for this one no longer.
  void throw_given_up() {
    for (int rank = 1; rank < group_.size(); ++rank) {
      const std::string key = "heard/" + std::to_string(rank);
      if (store().exists(key_ + key)) heard(get(key, Deadline::in(group::timeout_of(group_)), 0));
    }
  }

  // Returns when the ranks that live have heard how it has ended. After a loss, some of them may be
  // lost as well without this rank's knowing.
  void tell(const std::optional<Error>& failure) {
    set("end", told(failure, ""));
    const bool is_lost = failure && failure->blame() == Blame::PeerLost;
    const auto limit = group::timeout_of(group_);
    const Deadline heard = Deadline::in(is_lost ? std::min(limit, kLongestAfterLoss) : limit);
    auto uninterrupted = group::uninterrupted_store_of(group_);
    auto& told_by = is_lost ? uninterrupted : store();  // that of the group throws after a loss
    bool have_all_heard = true;
    for (int rank = 1; rank < group_.size(); ++rank) {
      if (failure && std::ranges::count(failure->ranks(), rank) > 0) {
        have_all_heard = false;
        continue;
      }
      const std::string key = key_ + "heard/" + std::to_string(rank);
      told_by.get(key, heard);
      told_by.erase(key);
    }
    if (!have_all_heard) return;  // a late rank has yet to read these keys
    store().erase(key_ + "written");
    store().erase(key_ + "decided");
    store().erase(key_ + "end/0");
    store().erase(key_ + "end");
  }

  void follow(const std::string& own) {
    set(std::to_string(group_.rank()), own);
    std::string said;
    auto failure = error_of([&] {
      // Rank 0 waits for the others from then on, and it alone decides that one of them is late.
      get("written", Deadline::in(group::timeout_of(group_)), 0);
      said = get("end", Deadline::in(2 * group::timeout_of(group_)), 0);
    });
    if (failure && failure->blame() == Blame::Timeout) {
      bool has_decided = false;
      // Fails if rank 0, which keeps the group's store, is frozen.
      const auto unasked =
          error_of([&] { has_decided = store().add(key_ + "decided", 1) >= kDecides; });
      if (!unasked && has_decided) {
        failure =
            error_of([&] { said = get("end", Deadline::in(2 * group::timeout_of(group_)), 0); });
      }
    }
    const std::string rank = std::to_string(group_.rank());
    const std::string thrown = failure ? told(failure->within("rank " + rank), "") : "";
    // Fails only if rank 0 has ended, which needs no answer then.
    const auto unheard = error_of([&] { set("heard/" + rank, thrown); });
    if (failure) throw *failure;
    if (unheard) log::debug("checkpoint::save_async: " + unheard->text());
    heard(said);
  }

  void publish() {
    const auto torn = error_of([&] { tensors_of(manifest_); });
    if (torn) {
      throw Error(Blame::Caller, "the ranks have different parts of the checkpoint: " +
                                     torn->text() + "; give all ranks models and optimizers alike");
    }
    numbered_->publish(manifest_);
  }

  // Texts of any length, in pieces that every store takes.
  void set(const std::string& key, const std::string& text) {
    std::size_t pieces = 0;
    for (std::size_t at = 0; at < text.size(); at += kPiece, ++pieces) {
      store().set(key_ + key + "/" + std::to_string(pieces),
                  group::to_bytes(std::string_view(text).substr(at, kPiece)));
    }
    store().set(key_ + key, group::to_bytes(std::to_string(pieces)));
  }

  std::string get(const std::string& key, Deadline deadline, int from) {
    try {
      const int pieces = std::atoi(group::to_text(store().get(key_ + key, deadline)).c_str());
      std::string text;
      for (int i = 0; i < pieces; ++i) {
        const std::string piece = key_ + key + "/" + std::to_string(i);
        text += group::to_text(store().get(piece, deadline));
        if (from != 0) store().erase(piece);
      }
      if (from != 0) store().erase(key_ + key);  // only rank 0 reads it
      return text;
    } catch (const Error& error) {
      if (error.blame() != Blame::Timeout) throw;
      throw Error(Blame::Timeout,
                  "rank " + std::to_string(from) +
                      (key == "end" ? " has not said what became of the checkpoint '"
                                    : " has not written its part of the checkpoint '") +
                      checkpoint_.path() + "' in " + describe_wait(group::timeout_of(group_)) +
                      " after this rank; look at what it does. If its disk is slow, give "
                      "ProcessGroupOptions::timeout more time. The previous checkpoint stays until "
                      "a new one is whole")
          .with_ranks({from});
    }
  }

  group::StoreBootstrap& store() { return group::store_of(group_); }

  ProcessGroup group_;
  const OpenFolder checkpoint_;
  const std::string key_;
  const SaveOptions options_;
  Share share_;
  std::shared_ptr<KeptBytes> kept_;
  at::Tensor memory_;
  std::optional<Error> uncopied_;
  ValueCopies copies_;
  std::unique_ptr<Numbered> numbered_;
  Manifest manifest_;
};

// The saves of this process that still run.
class Running {
 public:
  int add(const ProcessGroup& group, Ended ended) {
    MutexLock lock(mutex_);
    all_.push_back({++last_, group, std::move(ended)});
    return last_;
  }
  void remove(int id) {
    std::list<One> gone;  // destroyed without the lock: its group may leave
    MutexLock lock(mutex_);
    const auto found = std::ranges::find(all_, id, &One::id);
    gone.splice(gone.begin(), all_, found);
  }
  // Blocks until the group's earlier saves have ended.
  void wait_for(const ProcessGroup& group) {
    std::vector<Ended> found;
    {
      MutexLock lock(mutex_);
      for (const One& one : all_) {
        if (group::are_same(one.group, group)) found.push_back(one.ended);
      }
    }
    for (const Ended& ended : found) ended.wait();
  }

 private:
  struct One {
    int id;
    ProcessGroup group;
    Ended ended;
  };
  Mutex mutex_;
  int last_ WEFT_GUARDED_BY(mutex_) = 0;
  std::list<One> all_ WEFT_GUARDED_BY(mutex_);
};

Running& running() {
  static auto* const all = new Running();  // threads may end after static objects are destroyed
  return *all;
}

// The values of all parts on this rank.
std::vector<Value> values_of_parts(const std::vector<Part>& parts, const ProcessGroup& group) {
  std::vector<Value> values;
  for (const Part& part : parts) {
    const auto failure = error_of([&] {
      auto own = values_of(part, group.rank(), group.size());
      std::move(own.begin(), own.end(), std::back_inserter(values));
    });
    if (failure)
      throw failure->within("part '" + part.name() + "' of the checkpoint cannot be saved");
  }
  // libtorch's optimizers list their state in the order of addresses, which differs between ranks.
  std::ranges::stable_sort(values, {}, &Value::name);
  return values;
}

// The values that all ranks must have alike, or have rows of, one line each.
std::vector<std::string> divided(const std::vector<Value>& values, const ProcessGroup& group) {
  std::vector<std::string> lines;
  for (const Value& value : values) {
    if (value.writer != Writer::Any && !value.rows) continue;
    const at::IntArrayRef sizes = value.rows ? value.rows->sizes : value.tensor.sizes();
    std::string line = "'" + value.name + "', " + c10::toString(value.tensor.scalar_type()) + " [";
    for (std::size_t i = 0; i < sizes.size(); ++i)
      line += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
    line += "]";
    if (value.rows) {
      line += " in the rows of " + std::to_string(value.rows->holders) + " ranks" +
              (group::are_same(value.rows->group, group) ? "" : " of another group");
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

// Collective. Rank 0 makes FOLDER/NUMBER; returns it when all ranks see it.
OpenFolder make_numbered(const std::string& folder, ProcessGroup& group,
                         std::unique_ptr<Numbered>& numbered) {
  group::agree(group, error_of([&] {
                 if (group.rank() == 0) numbered = std::make_unique<Numbered>(folder);
               }));
  const std::uint64_t number =
      broadcast_object(numbered ? numbered->number() : std::uint64_t{0}, 0, group);
  const std::string checkpoint = folder + "/" + std::to_string(number);
  std::optional<OpenFolder> opened;
  group::agree(group, error_of([&] {
                 if (!is_folder(checkpoint)) {
                   throw Error(Blame::Caller,
                               "rank " + std::to_string(group.rank()) +
                                   " does not see the folder '" + checkpoint +
                                   "' that rank 0 has made: name a folder on a file system that "
                                   "all ranks share");
                 }
                 const auto refusal = error_of([&] { check_folder_writable(checkpoint); });
                 if (refusal) throw refusal->within("rank " + std::to_string(group.rank()));
                 opened.emplace(checkpoint);
               }));
  return std::move(*opened);
}

}  // namespace

struct Saving::State {
  State() = default;
  ~State() {
    if (thread.joinable()) thread.join();
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Starts the thread, which waits for `begin`: true, or false to end without a word.
  void start(std::unique_ptr<Job> job, std::shared_future<bool> begin, const ProcessGroup& group) {
    std::promise<std::optional<Error>> promise;
    ended = promise.get_future().share();
    const int id = running().add(group, ended);
    try {
      run(std::move(promise), "rank " + std::to_string(group.rank()),
          [job = std::shared_ptr<Job>(std::move(job)), begin = std::move(begin), id]() mutable {
            std::optional<Error> failure;
            if (begin.get()) failure = job->run();
            job.reset();  // the group goes before wait() returns
            running().remove(id);
            return failure;
          });
    } catch (...) {
      running().remove(id);
      throw;
    }
  }

  void run(std::promise<std::optional<Error>> promise, std::string label,
           std::function<std::optional<Error>()> work) {
    try {
      thread = std::thread([promise = std::move(promise), label = std::move(label),
                            work = std::move(work)]() mutable {
        log::set_thread_label(std::move(label));
        std::optional<Error> failure = work();
        work = nullptr;
        promise.set_value(std::move(failure));
      });
    } catch (const std::system_error& error) {
      throw system_error(Blame::Busy, "no thread can be started for checkpoint::save_async",
                         error.code().value());
    }
  }

  std::shared_future<std::optional<Error>> ended;
  std::thread thread;
  const std::shared_ptr<KeptBytes> kept = KeptBytes::make();
  bool is_known = false;  // wait() has thrown the error
};

struct SavingAccess {
  static Saving begin(const std::string& folder, ProcessGroup& group,
                      const std::vector<Part>& parts, const SaveOptions& options) {
    wait_for_saves(group);
    std::vector<std::string> names;
    std::vector<Value> values;
    Share share;
    group::agree(group, error_of([&] {
                   check_options(options);
                   names = check_names(parts);
                   std::vector<std::string> own;
                   for (const Part& part : parts) own.push_back(part.name());
                   refuse_ambiguous(own);
                 }));
    compare_names(group, names, {});
    group::agree(group, error_of([&] { values = values_of_parts(parts, group); }));
    compare_names(group, names, divided(values, group));
    divide_equal_rows(values, group);
    group::agree(group, error_of([&] { share = share_of(values, group.rank(), group.size()); }));
    std::unique_ptr<Numbered> numbered;
    OpenFolder checkpoint = make_numbered(folder, group, numbered);
    auto job = std::make_unique<Job>(group, std::move(checkpoint),
                                     group::next_number(group, "checkpoint::save_async"), options);
    Manifest manifest;
    manifest.ranks = group.size();
    for (std::size_t i = 0; i < parts.size(); ++i)
      manifest.parts.emplace_back(parts[i].name(), names[i]);
    Saving saving;
    saving.state_ = std::make_shared<Saving::State>();
    std::promise<bool> begins;
    Job& begun = *job;  // lives until its thread has begun
    const auto failure = error_of([&] {
      begun.prepare(std::move(share), saving.state_->kept);
      begun.take(std::move(numbered), std::move(manifest));
      saving.state_->start(std::move(job), begins.get_future().share(), group);
    });
    const auto refused = error_of([&] { group::agree(group, failure); });
    // The last collective lies before the copies, so that no collective makes the host wait for a
    // GPU's copies.
    if (!refused) begun.copy();
    begins.set_value(!refused);
    if (!refused) return saving;
    saving.state_.reset();
    throw Error(*refused);
  }

  static Saving begin(std::promise<std::optional<Error>> promise, Ended ended, std::string label,
                      std::function<std::optional<Error>()> work) {
    Saving saving;
    saving.state_ = std::make_shared<Saving::State>();
    saving.state_->ended = std::move(ended);
    try {
      saving.state_->run(std::move(promise), std::move(label), std::move(work));
    } catch (...) {
      saving.state_.reset();  // there is nothing that its destructor could wait for
      throw;
    }
    return saving;
  }
};

Saving start_saving(std::promise<std::optional<Error>> promise, Ended ended, std::string label,
                    std::function<std::optional<Error>()> work) {
  return SavingAccess::begin(std::move(promise), std::move(ended), std::move(label),
                             std::move(work));
}

void wait_for_saves(const ProcessGroup& group) { running().wait_for(group); }

Saving::Saving() = default;
Saving::Saving(Saving&&) noexcept = default;

Saving& Saving::operator=(Saving&& other) noexcept {
  const Saving previous(std::move(*this));
  state_ = std::move(other.state_);
  return *this;
}

Saving::~Saving() {
  if (!state_) return;
  const auto& failure = state_->ended.get();
  if (failure && !state_->is_known) log::error("checkpoint::save_async: " + failure->text());
}

void Saving::wait() {
  if (!state_) return;
  const auto& failure = state_->ended.get();
  state_->is_known = true;
  if (failure) throw Error(*failure);
}

bool Saving::query() const {
  return !state_ || state_->ended.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

Saving save_async(std::string folder, ProcessGroup group, std::vector<Part> parts,
                  SaveOptions options) {
  folder = without_slashes(std::move(folder));
  return on_all("checkpoint::save_async", group,
                [&] { return SavingAccess::begin(folder, group, parts, options); });
}

}  // namespace weft::checkpoint
