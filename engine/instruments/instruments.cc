// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <random>

#include <weft/base/config.h>
#include <weft/base/crash.h>
#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/engine/instruments/instruments.h>
#include <weft/engine/instruments/job_clock.h>
#include <weft/engine/instruments/metrics.h>
#include <weft/engine/instruments/steps.h>
#include <weft/engine/instruments/timeline_upload.h>
#include <weft/engine/store/store.h>
#include <weft/profiling/trace/dump.h>
#include <weft/profiling/trace/host_time.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/progress.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/transport/batched_bootstrap.h>

namespace weft::instruments {

namespace {

constexpr auto kWaitForOthers = std::chrono::seconds(30);  // for ranks that make no timeline
// How long to wait until the other ranks have read why the timelines differ.
constexpr auto kUntilRead = std::chrono::seconds(5);
const std::string kJob = "weft/timeline/job";

// The timeline's name, which the first rank that asks chooses.
std::string job_name(transport::Bootstrap& store, Deadline deadline) {
  if (store.add("weft/timeline/came", 1) == 1) {
    std::array<char, 17> name{};
    std::random_device random;
    std::snprintf(name.data(), name.size(), "%08x%08x", random(), random());
    store.set(kJob, group::to_bytes(name.data()));
  }
  std::string name = group::to_text(store.get(kJob, deadline));
  if (name.size() != 16 || name.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw Error(Blame::PeerLost, "the timeline's name in the job's store is not valid");
  }
  return name;
}

// The clock's offset by the calendar, which machines set by NTP, for jobs whose clocks cannot be
// compared.
trace::timeline::Clock by_calendar(const LocalClock& clock, transport::Bootstrap& store,
                                   Deadline deadline) {
  const std::string mine = clock.host + " " + std::to_string(clock.calendar() - clock.now());
  if (store.add("weft/timeline/dated", 1) == 1)
    store.set("weft/timeline/date", group::to_bytes(mine));
  const std::string theirs = group::to_text(store.get("weft/timeline/date", deadline));
  const auto space = theirs.rfind(' ');
  if (theirs.substr(0, space) == clock.host) return {};
  const std::int64_t epoch = std::strtoll(theirs.c_str() + space + 1, nullptr, 10);
  return {clock.calendar() - clock.now() - epoch, 1'000'000'000};
}

// This rank's part of the timeline, from start() until the last group and agent has ended.
class Recording {
 public:
  Recording(InstrumentedRank participant, std::string job,
            std::shared_ptr<transport::Bootstrap> store, JobClock clock,
            std::vector<std::shared_ptr<const void>> kept, bool away)
      : participant_(std::move(participant)),
        job_(std::move(job)),
        kept_(std::move(kept)),
        store_(std::move(store)),
        clock_(std::move(clock)),
        away_(away) {}
  ~Recording() {
    try {
      if (const auto clock = clock_.at_end()) trace::timeline::measured_again(*clock);
      if (participant_.rank == 0)
        take_parts(*store_, participant_.ranks, participant_.timeline, job_);
      if (away_) send();
    } catch (const std::exception& error) {
      log::warn(std::string("the timeline: ") + error.what());
    }
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  void send() {
    const std::string part = trace::timeline::end_part();
    if (part.empty()) return;
    try {
      send_part(*store_, participant_.rank, part);
    } catch (const Error& error) {
      log::warn("this rank's part of the timeline has not reached rank 0 and stays in '" + part +
                "': " + error.text());
      return;
    }
    std::error_code ignored;
    std::filesystem::remove(part, ignored);
    std::filesystem::remove(trace::timeline::folder_of_parts(participant_.timeline),
                            ignored);  // removed only if it is empty
  }

  const InstrumentedRank participant_;
  const std::string job_;
  const std::vector<std::shared_ptr<const void>> kept_;  // must outlive store_
  const std::shared_ptr<transport::Bootstrap> store_;
  const JobClock clock_;
  const bool away_;
};

constinit ForkMutex recordings_mutex(ForkOrder::Engine);
// By rank: a process has several if its threads are ranks.
std::map<int, std::weak_ptr<const Recording>> recordings WEFT_GUARDED_BY(recordings_mutex);

// Arranges how the parts of all ranks reach rank 0, for a job whose ranks are known.
std::shared_ptr<const Recording> record(const InstrumentedRank& participant, const std::string& job,
                                        const std::shared_ptr<transport::Bootstrap>& store,
                                        JobClock clock,
                                        std::vector<std::shared_ptr<const void>> kept,
                                        Deadline deadline) {
  bool away = false;
  if (participant.rank == 0) {
    show_part(*store, trace::timeline::own_part());
  } else {
    away = is_away(*store, participant.rank, participant.timeline, deadline);
  }
  // Waits until all ranks record: a rank that continued earlier could call one that does not
  // record yet.
  if (store->add("weft/timeline/records", 1) == participant.ranks)
    store->set("weft/timeline/all record", {});
  store->get("weft/timeline/all record", deadline);
  MutexLock lock(recordings_mutex);
  auto& known = recordings[participant.rank];
  if (auto lives = known.lock()) return lives;
  auto made = std::make_shared<const Recording>(participant, job, store, std::move(clock),
                                                std::move(kept), away);
  known = made;
  return made;
}

std::shared_ptr<const void> join_timeline(const InstrumentedRank& participant,
                                          const std::shared_ptr<transport::Bootstrap>& store,
                                          std::vector<std::shared_ptr<const void>> kept,
                                          Deadline deadline) {
  deadline = Deadline::sooner(deadline, Deadline::in(kWaitForOthers));
  trace::timeline::ProcessInJob place;
  place.rank = participant.rank;
  place.ranks = participant.ranks;
  std::optional<JobClock> compared;
  try {
    place.job = job_name(*store, deadline);
    agree_on_file(participant, *store, deadline);
    if (participant.ranks > 0) {
      compared.emplace(participant, store, local_clock(), deadline);
      place.clock = compared->at_start();
    } else {
      place.clock = by_calendar(local_clock(), *store, deadline);
    }
  } catch (const Error& error) {
    if (error.blame() != Blame::Timeout) throw;
    log::warn("not all ranks make a timeline, so this one's clock is not compared: " +
              error.text());
    place.clock.error = 1'000'000'000;
    if (place.job.empty()) return nullptr;
  }
  trace::timeline::join(participant.timeline, place);
  if (!compared) return nullptr;
  try {
    const InstrumentedRank here{participant.rank, participant.ranks, trace::timeline::own_file()};
    return record(here, place.job, store, std::move(*compared), std::move(kept), deadline);
  } catch (const Error& error) {
    if (error.blame() != Blame::Timeout) throw;
    log::warn("the timeline of this rank may stay on its machine: " + error.text());
    return nullptr;
  }
}

// How ranks find out that they do not make the same timeline. The first of them says in the store
// what it makes, and all others compare that with what they make: of two ranks that differ, at
// least one notices and tells the ranks that wait for the verdict.
class Agreement {
 public:
  Agreement(const InstrumentedRank& participant, transport::Bootstrap& store, Deadline deadline)
      : participant_(participant), store_(store), deadline_(deadline) {}

  // Called by a rank that makes a timeline.
  void make() {
    store_.add(kMakers, 1);
    const auto [rank, file] = first();
    const std::string mine = makes(participant_.rank, participant_.timeline);
    if (file.empty()) refuse(mine + ", and rank " + std::to_string(rank) + " makes none");
    if (std::filesystem::path(file).lexically_normal() !=
        std::filesystem::path(participant_.timeline).lexically_normal())
      refuse(makes(rank, file) + ", and " + mine);
    if (store_.add(kAgree, 1) == participant_.ranks) store_.set(kVerdict, {});
    const std::string verdict = text(kVerdict);
    if (verdict.empty()) return;
    let_others_read();
    throw Error(Blame::Caller, verdict);
  }

  // Called by a rank that makes none.
  void make_none() {
    const auto [rank, file] = first();
    if (file.empty()) return;
    refuse(makes(rank, file) + ", and rank " + std::to_string(participant_.rank) + " makes none");
  }

 private:
  static constexpr const char* kMakers = "weft/timeline/makers";  // how many ranks make a timeline
  // The first rank, and its file; no file if it makes none.
  static constexpr const char* kFirst = "weft/timeline/first";
  // How many ranks make the first rank's timeline.
  static constexpr const char* kAgree = "weft/timeline/agree";
  static constexpr const char* kVerdict =
      "weft/timeline/verdict";  // "" once all ranks do, or the reason against it
  static constexpr const char* kTold =
      "weft/timeline/told";  // how many ranks with a timeline know the reason

  static std::string told(long count) { return kTold + std::string("/") + std::to_string(count); }

  static std::string makes(int rank, const std::string& file) {
    return "rank " + std::to_string(rank) + " makes a timeline in '" + file + "'";
  }

  std::string text(const std::string& key) { return group::to_text(store_.get(key, deadline_)); }

  std::pair<int, std::string> first() {
    const std::string own = std::to_string(participant_.rank) + " " + participant_.timeline;
    const std::string who =
        group::to_text(transport::set_once(store_, kFirst, group::to_bytes(own)));
    const auto space = who.find(' ');
    if (space == std::string::npos)
      throw Error(Blame::PeerLost, "the timeline's file in the job's store is not valid");
    return {std::atoi(who.c_str()), who.substr(space + 1)};
  }

  [[noreturn]] void refuse(const std::string& what) {
    const std::string why =
        what + "; set WEFT_TIMELINE, or the option timeline, to the same file on all ranks";
    store_.set(kVerdict, group::to_bytes(why));
    let_others_read();
    throw Error(Blame::Caller, why);
  }

  // Waits until the others have read the verdict: the store may end with this process, or have
  // ended with another that knows it.
  void let_others_read() {
    try {
      if (!participant_.timeline.empty()) store_.set(told(store_.add(kTold, 1)), {});
      store_.get(told(store_.add(kMakers, 0)),
                 Deadline::sooner(deadline_, Deadline::in(kUntilRead)));
    } catch (const Error& error) {
      log::debug("not all ranks have read that their timelines differ: " + error.text());
    }
  }

  const InstrumentedRank& participant_;
  transport::Bootstrap& store_;
  const Deadline deadline_;
};

// A failing store does not stop a job without a timeline: the job's first ranks may have ended,
// and the store with them.
void make_no_timeline(const InstrumentedRank& participant, transport::Bootstrap& store,
                      Deadline deadline) {
  try {
    agree_on_file(participant, store, Deadline::sooner(deadline, Deadline::in(kWaitForOthers)));
  } catch (const Error& error) {
    if (error.blame() == Blame::Caller) throw;
    log::debug("cannot tell whether other ranks make a timeline: " + error.text());
  }
}

}  // namespace

std::string timeline_file(const std::string& option) {
  const std::string& file = option.empty() ? config().timeline_file : option;
  if (!file.empty()) trace::timeline::require(file);
  return file;
}

void agree_on_file(const InstrumentedRank& participant, transport::Bootstrap& store,
                   Deadline deadline) {
  if (participant.ranks < 2) return;  // one rank, or ranks that join and leave
  Agreement agreement(participant, store, deadline);
  participant.timeline.empty() ? agreement.make_none() : agreement.make();
}

std::shared_ptr<const void> start(const InstrumentedRank& participant,
                                  const std::shared_ptr<transport::Bootstrap>& store,
                                  std::vector<std::shared_ptr<const void>> kept,
                                  Deadline deadline) {
  const Config& wanted = config();
  crash::prepare_thread();
  // weft-run, which sets this variable as torchrun does, forwards SIGUSR1. Without it, SIGUSR1
  // belongs to the program unless dumps are wanted.
  const bool is_launched = std::getenv("TORCHELASTIC_RUN_ID") != nullptr;
  if (!wanted.dump_folder.empty()) {
    trace::dump_to(wanted.dump_folder);
  } else if (is_launched) {
    trace::dump_on_signal();
  }
  if (!wanted.status_file.empty()) {
    trace::publish_progress(wanted.status_file.c_str());
    trace::publish_host_time();
  }
  if (!wanted.metrics_address.empty()) serve_metrics(wanted.metrics_address, participant.rank);
  if (participant.timeline.empty()) {
    make_no_timeline(participant, *store, deadline);
    return nullptr;
  }
  return join_timeline(participant, store, std::move(kept), deadline);
}

}  // namespace weft::instruments

namespace weft {

void begin_step(int rank) noexcept { trace::step(rank); }

}  // namespace weft
