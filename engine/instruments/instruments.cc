#include <array>
#include <random>

#include <weft/base/config.h>
#include <weft/base/error.h>
#include <weft/base/instruments.h>
#include <weft/base/log.h>
#include <weft/engine/group/store.h>
#include <weft/engine/instruments/instruments.h>
#include <weft/engine/instruments/job_clock.h>
#include <weft/engine/instruments/metrics.h>
#include <weft/profiling/trace/dump.h>
#include <weft/profiling/trace/progress.h>
#include <weft/profiling/trace/timeline.h>

namespace weft::instruments {

namespace {

constexpr auto kPatience = std::chrono::seconds(30);  // for ranks that do not make a timeline
const std::string kJob = "weft/timeline/job";

// What the first to come chooses.
std::string job_name(transport::Bootstrap& store, Deadline deadline) {
  if (store.add("weft/timeline/came", 1) == 1) {
    std::array<char, 17> name{};
    std::random_device random;
    std::snprintf(name.data(), name.size(), "%08x%08x", random(), random());
    store.set(kJob, group::to_bytes(name.data()));
  }
  std::string name = group::to_text(store.get(kJob, deadline));
  if (name.size() != 16 || name.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw Error(Blame::PeerLost, "the name of the timeline in the job's store is none");
  }
  return name;
}

// Where clocks cannot be compared: by the calendar, which machines set by NTP.
trace::timeline::Clock by_calendar(const LocalClock& clock, transport::Bootstrap& store, Deadline deadline) {
  const std::string mine = clock.host + " " + std::to_string(clock.calendar() - clock.now());
  if (store.add("weft/timeline/dated", 1) == 1) store.set("weft/timeline/date", group::to_bytes(mine));
  const std::string theirs = group::to_text(store.get("weft/timeline/date", deadline));
  const auto space = theirs.rfind(' ');
  if (theirs.substr(0, space) == clock.host) return {};
  const std::int64_t epoch = std::strtoll(theirs.c_str() + space + 1, nullptr, 10);
  return {clock.calendar() - clock.now() - epoch, 1'000'000'000};
}

void join_timeline(const Participant& participant, transport::Bootstrap& store, Deadline deadline) {
  deadline = Deadline::sooner(deadline, Deadline::in(kPatience));
  trace::timeline::Place place;
  place.rank = participant.rank;
  place.ranks = participant.ranks;
  try {
    place.job = job_name(store, deadline);
    const LocalClock clock = local_clock();
    place.clock =
        participant.ranks > 0 ? measure(participant, store, clock, deadline) : by_calendar(clock, store, deadline);
  } catch (const Error& error) {
    if (error.blame() != Blame::Timeout) throw;
    log::warn("WEFT_TIMELINE: not all ranks make a timeline, so this one's clock is not compared: " + error.text());
    place.clock.error = 1'000'000'000;
    if (place.job.empty()) return;
  }
  trace::timeline::join(config().timeline_file, place);
}

}  // namespace

void start(const Participant& participant, transport::Bootstrap& store, Deadline deadline) {
  const Instruments& wanted = Instruments::wanted();
  if (!wanted.dump_folder.empty()) trace::dump_to(wanted.dump_folder);
  if (!wanted.status_file.empty()) trace::publish_progress(wanted.status_file.c_str());
  if (!wanted.metrics_address.empty()) serve_metrics(wanted.metrics_address, participant.rank);
  if (!config().timeline_file.empty()) join_timeline(participant, store, deadline);
}

}  // namespace weft::instruments
