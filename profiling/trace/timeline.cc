// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#include <unistd.h>

#include <weft/base/fork_mutex.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/profiling/trace/called_by.h>
#include <weft/profiling/trace/merge.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/profiling/trace/timeline_part.h>

namespace weft::trace::timeline {

namespace {

// How often the timeline's thread empties the threads' buffers.
constexpr auto kPause = std::chrono::milliseconds(100);

constinit ForkMutex joining(ForkOrder::Timeline);

// Sources polled for finished device spans.
class Sources {
 public:
  void add(std::shared_ptr<Source> source) {
    MutexLock lock(mutex_);
    all_.push_back(std::move(source));
  }
  std::vector<std::shared_ptr<Source>> all() const {
    MutexLock lock(mutex_);
    return all_;
  }

 private:
  // Locked after `joining`: a holder of `joining` waits for the thread that takes this mutex.
  mutable ForkMutex mutex_{ForkOrder::Counts};
  std::vector<std::shared_ptr<Source>> all_ WEFT_GUARDED_BY(mutex_);
};
Sources& sources = *new Sources();  // never destroyed: used while the process ends

class Collector {
 public:
  Collector(std::string asked, const ProcessInJob& place)
      : asked_(std::move(asked)),
        job_(place.job),
        ranks_(place.ranks),
        file_(std::filesystem::absolute(asked_)),
        part_(std::in_place, folder_of_parts(file_), place),
        path_(part_->path()) {
    try {
      thread_ = std::thread([this] { collect(); });
    } catch (const std::system_error& error) {
      std::error_code ignored;
      std::filesystem::remove(path_, ignored);  // no thread would end the part
      throw system_error(Blame::Busy,
                         "cannot start a thread for the timeline; allow this user, or the "
                         "container, more threads (ulimit -u, pids.max)",
                         error.code().value());
    }
  }

  std::shared_ptr<Lane> make_lane() {
    std::array<char, 16> name{};
    pthread_getname_np(pthread_self(), name.data(), name.size());
    MutexLock lock(mutex_);
    lanes_.push_back(
        std::make_shared<Lane>(++made_, ::getpid() == ::gettid() ? "main" : name.data()));
    return lanes_.back();
  }

  // Warns about a job that is joined after the first one and has more ranks.
  void warn_of(const ProcessInJob& later) WEFT_REQUIRES(joining) {
    const bool is_larger = later.job != job_ && ranks_ > 0 && later.ranks > ranks_;
    if (!is_larger || std::exchange(has_warned_, true)) return;
    log::warn(
        "this process's timeline is that of the job with " + std::to_string(ranks_) +
        " ranks, which it joined first, but it has now joined one with " +
        std::to_string(later.ranks) +
        " ranks: the timeline parts of processes that are only in the second job are not merged "
        "with it; join the job of all processes first (rpc::init before init_process_group, "
        "or the other way round)");
  }

  const std::string& asked() const { return asked_; }
  const std::string& file() const { return file_; }
  const std::string& part() const { return path_; }
  void measured_again(const Clock& clock) {
    MutexLock lock(mutex_);
    again_ = clock;
  }
  void count_lost() { lost_.fetch_add(1, std::memory_order_relaxed); }
  void forget_in_child() noexcept {
    if (part_) part_->forget_in_child();
  }

  // Ends the part. Call it once.
  void end_part() {
    std::optional<Clock> again;
    {
      MutexLock lock(mutex_);
      ends_ = true;
      again = again_;
    }
    changed_.notify_all();
    thread_.join();
    drain();
    if (again) part_->add(*again);
    part_->add_end(lost_);
    part_.reset();  // closes the part and releases its lock
  }

 private:
  void collect() {
    pthread_setname_np(pthread_self(), "weft timeline");
    UniqueLock lock(mutex_);
    while (!changed_.wait_for(lock, kPause, [this]() WEFT_REQUIRES(mutex_) { return ends_; })) {
      lock.unlock();
      drain();
      lock.lock();
    }
  }

  void drain() {
    std::vector<std::shared_ptr<Lane>> lanes;
    {
      MutexLock lock(mutex_);
      lanes = lanes_;
    }
    for (const auto& lane : lanes) {
      const bool closed = lane->closed();
      if (known_ < lane->number()) {
        known_ = lane->number();
        part_->add_thread(*lane);
      }
      lane->take([&](const Event& event) { part_->add(*lane, event); });
      if (!closed) continue;
      MutexLock lock(mutex_);
      std::erase(lanes_, lane);
    }
    for (const auto& source : sources.all()) {
      source->collect([&](const DeviceSpan& span) { part_->add(span); });
    }
    part_->flush();
  }

  const std::string asked_;  // the name that a group or an agent gave
  const std::string job_;    // of the first job that was joined, as is ranks_
  const int ranks_;
  bool has_warned_ WEFT_GUARDED_BY(joining) = false;
  const std::string file_;    // absolute, because the process may change its folder
  std::optional<Part> part_;  // used by the timeline's thread, then by end_part()
  const std::string path_;
  int known_ = 0;  // number of the last lane that is in the part
  Mutex mutex_;
  std::condition_variable changed_;
  bool ends_ WEFT_GUARDED_BY(mutex_) = false;
  std::optional<Clock> again_ WEFT_GUARDED_BY(mutex_);
  int made_ WEFT_GUARDED_BY(mutex_) = 0;
  std::vector<std::shared_ptr<Lane>> lanes_ WEFT_GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> lost_{0};
  std::thread thread_;
};

// Never destroyed, because threads may write while the process ends.
std::atomic<Collector*> collector{nullptr};

// This thread's lane. A plain pointer, because it is read while the thread's objects are destroyed.
thread_local Lane* own = nullptr;
thread_local const Collector* own_of = nullptr;
thread_local bool thread_ends = false;
struct OwnLane {
  std::shared_ptr<Lane> lane;
  OwnLane() = default;
  OwnLane(const OwnLane&) = delete;
  OwnLane& operator=(const OwnLane&) = delete;
  ~OwnLane() {
    thread_ends = true;
    own_of = nullptr;
    if (lane) lane->close();
  }
};
thread_local OwnLane kept;

void add(Event event) noexcept {
  Collector* const to = collector.load(std::memory_order_acquire);
  if (to == nullptr || thread_ends) return;
  try {
    if (own_of != to) {
      kept.lane = to->make_lane();
      own = kept.lane.get();
      own_of = to;
    }
    if (!own->add(std::move(event))) to->count_lost();
  } catch (const std::exception&) {
    to->count_lost();
  }
}

Event event_of(Event::What what, const Label& label) {
  Event event;
  event.what = what;
  event.time = now();
  event.text = label.text;
  event.layer = label.layer;
  event.bytes = label.bytes;
  event.rank = label.rank;
  return event;
}

Event arrow_of(Event::What what, std::uint64_t number) {
  Event event;
  event.what = what;
  event.time = now();
  event.ticket = number;
  return event;
}

// Shared by finish() and end_part().
Collector* take_collector() WEFT_REQUIRES(joining) {
  detail::is_on.store(false);
  // Does not delete the collector, because a thread may be about to write to it.
  return collector.exchange(nullptr);
}

// Throws Caller if this process makes a timeline in another file.
void require_here(const std::string& file) WEFT_REQUIRES(joining) {
  const Collector* const made = collector.load();
  if (made == nullptr || made->asked() == file || made->file() == std::filesystem::absolute(file))
    return;
  throw Error(
      Blame::Caller,
      "a timeline was asked for in '" + file + "', and this process makes one in '" +
          made->asked() +
          "' already; give all its groups and agents one file (WEFT_TIMELINE, or the option "
          "timeline)");
}

// Throws Caller, before a job runs for hours, if the file exists and is not a file that may be
// replaced.
void require_place(const std::string& file) {
  const auto refuse = [&](const std::string& why) {
    return Error(Blame::Caller,
                 "a timeline was asked for in '" + file + "', " + why +
                     "; WEFT_TIMELINE and the option timeline name a file, such as run.json");
  };
  const std::filesystem::path path(file);
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  if (std::filesystem::is_directory(status)) throw refuse("which is a folder");
  if (!path.has_filename()) throw refuse("which is not a file name");
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw refuse("which is not a regular file");
}

// A forked process has no thread that collects, and would share the parent's file.
void forget_in_child() {
  detail::is_on.store(false);
  if (Collector* const parents = collector.exchange(nullptr)) parents->forget_in_child();
  if (kept.lane)
    // The lane belongs to the parent: leaks it.
    static_cast<void>(new std::shared_ptr<Lane>(std::move(kept.lane)));
  own_of = nullptr;
}

}  // namespace

void push(const Label& label) noexcept { add(event_of(Event::What::Push, label)); }

void pop() noexcept { add(event_of(Event::What::Pop, {})); }

void mark(const Label& label) noexcept { add(event_of(Event::What::Mark, label)); }

void begin(std::uint64_t ticket, const Member& member, Kind kind, const trace::About& about,
           std::int64_t time) noexcept {
  Event event;
  event.what = Event::What::Begin;
  event.kind = kind;
  event.time = time;
  event.text = about.name;
  if (CalledBy::name() != nullptr) event.called_by = CalledBy::name();
  event.bytes = about.bytes;
  event.peer = about.peer;
  event.tag = about.tag;
  event.ticket = ticket;
  event.sequence = about.sequence;
  event.member = member;
  event.dtype = about.dtype;
  event.dims = static_cast<std::uint8_t>(std::min<std::size_t>(about.shape.size(), 255));
  std::copy_n(about.shape.begin(), std::min(about.shape.size(), kMostDims), event.shape.begin());
  add(std::move(event));
}

void end(std::uint64_t ticket, std::int64_t time, const Error* error, int peer,
         std::uint64_t sequence) noexcept {
  Event event;
  event.what = Event::What::End;
  event.time = time;
  event.ticket = ticket;
  event.peer = peer;
  event.sequence = sequence;
  try {
    if (error != nullptr) event.error = std::make_unique<const std::string>(error->text());
  } catch (const std::bad_alloc&) {
    // recorded without its text then
  }
  add(std::move(event));
}

std::uint64_t next_arrow() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

void leave(std::uint64_t arrow) noexcept { add(arrow_of(Event::What::Leave, arrow)); }

void arrive(std::uint64_t arrow) noexcept { add(arrow_of(Event::What::Arrive, arrow)); }

void arrive_from(std::uint64_t ticket) noexcept { add(arrow_of(Event::What::ArriveFrom, ticket)); }

void ask(std::shared_ptr<Source> source) { sources.add(std::move(source)); }

void join(const std::string& file, const ProcessInJob& place) {
  require_place(file);
  MutexLock lock(joining);
  require_here(file);
  if (Collector* const made = collector.load()) return made->warn_of(place);
  static const int registered = [] {
    std::atexit([] { finish(); });
    return ::pthread_atfork(nullptr, nullptr, forget_in_child);
  }();
  static_cast<void>(registered);
  remove_leftovers(file, place.job);
  collector.store(new Collector(file, place), std::memory_order_release);
  detail::is_on.store(true);
}

void measured_again(const Clock& clock) noexcept {
  MutexLock lock(joining);
  if (Collector* const made = collector.load()) made->measured_again(clock);
}

void require(const std::string& file) {
  require_place(file);
  MutexLock lock(joining);
  require_here(file);
}

void finish() noexcept {
  MutexLock lock(joining);
  Collector* const ending = take_collector();
  if (ending == nullptr) return;
  try {
    ending->end_part();
    merge_if_last(ending->file());
  } catch (const std::exception& error) {
    log::warn(std::string("the timeline was not written: ") + error.what());
  }
}

std::string own_file() {
  MutexLock lock(joining);
  const Collector* const made = collector.load();
  return made == nullptr ? "" : made->file();
}

std::string own_part() {
  MutexLock lock(joining);
  const Collector* const made = collector.load();
  return made == nullptr ? "" : made->part();
}

std::string end_part() {
  MutexLock lock(joining);
  Collector* const ending = take_collector();
  if (ending == nullptr) return "";
  ending->end_part();
  return ending->part();
}

}  // namespace weft::trace::timeline
