// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include <weft/profiling/tools/analysis.h>
#include <weft/profiling/tools/rank_evidence.h>
#include <weft/profiling/tools/stuck_messages.h>
#include <weft/profiling/tools/waits.h>
#include <weft/profiling/tools/wording.h>

namespace weft::tools {

namespace {

using What = Finding::What;
using Ranks = std::vector<int>;

// Operations that all ranks of a group call in one numbered order: its collectives, and each kind
// of meeting over the store.
struct Series {
  const char* kind = "";
  const char* name = "";  // "": every name of that kind
  // A rank that skipped one is not behind in the next.
  bool may_be_left_out = false;
  bool waits_for_all = true;  // false: it waits only for some ranks
  bool has(const Record& record) const {
    return record.kind == kind && (*name == '\0' || record.name == name);
  }
};
constexpr Series kSeries[] = {
    {"collective", ""},
    {"meeting", "monitored_barrier", /*may_be_left_out=*/true},
    {"meeting", "new_group", /*may_be_left_out=*/false, /*waits_for_all=*/false},
    {"meeting", "split"},
    {"meeting", "Mesh"}};

const Record* find(const View& view, const Series& series, std::uint64_t sequence) {
  for (const Record& record : view.records) {
    if (series.has(record) && record.sequence == sequence) return &record;
  }
  return nullptr;
}

std::uint64_t last_begun(const View& view, const Series& series) {
  std::uint64_t last = 0;
  for (const Record& record : view.records) {
    if (series.has(record)) last = std::max(last, record.sequence);
  }
  return last;
}

class Analysis {
 public:
  Analysis(const Dumps& dumps, std::chrono::nanoseconds older_than)
      : dumps_(dumps), evidence_(dumps, older_than), who_(evidence_.participants()) {}

  std::vector<Finding> run() {
    for (const Group& group : dumps_.groups) {
      find_mismatch(group);
      for (const Series& series : kSeries) find_late(group, series);
      find_stuck_messages(group, evidence_, waits_, findings_);
      find_slow(group);
    }
    find_backward();
    find_calls();
    find_cycle();
    find_first_failure();
    std::stable_sort(findings_.begin(), findings_.end(),
                     [](const Finding& a, const Finding& b) { return a.what < b.what; });
    return std::move(findings_);
  }

 private:
  void report(What what, Ranks ranks, std::string text) {
    findings_.push_back({what, std::move(ranks), std::move(text)});
  }

  static std::string what_must_agree(const Record& collective) {
    if (collective.dtype.empty()) return call_of(collective);
    if (collective.name == "all_to_all" || collective.name == "all_to_all_single")
      return "all_to_all of " +
             collective.dtype;  // the sizes may differ, and either fits the other
    // The root passes more bytes than the others, and ranks may keep parts of different sizes.
    for (const char* name : {"gather", "scatter", "reduce_scatter"}) {
      if (collective.name == name) return call_of(collective);
    }
    return call_of(collective) + ", " + std::to_string(collective.bytes) + " bytes";
  }

  // The same, equal for tensors with equally many elements.
  static std::string what_must_agree_beside_shape(Record collective) {
    std::uint64_t elements = 1;  // a product that overflows wraps
    for (const std::int64_t extent : collective.shape)
      elements *= static_cast<std::uint64_t>(extent);
    collective.shape = {static_cast<std::int64_t>(elements)};
    return what_must_agree(collective);
  }

  // Finds the first collective that the ranks call differently; later differences are consequences.
  // Collectives of other shapes with equally many elements work: reports one only if the ranks
  // differ in nothing else.
  void find_mismatch(const Group& group) {
    if (!find_mismatch(group, what_must_agree_beside_shape))
      find_mismatch(group, [](const Record& record) { return what_must_agree(record); });
  }

  template <class Key>
  bool find_mismatch(const Group& group, const Key& key) {
    std::map<std::uint64_t, std::set<std::string>> keys;          // by number
    std::map<std::uint64_t, std::map<std::string, Ranks>> calls;  // number, call, ranks
    for (const auto& [rank, view] : group.views) {
      for (const Record& record : view.records) {
        if (record.kind != "collective") continue;
        keys[record.sequence].insert(key(record));
        calls[record.sequence][what_must_agree(record)].push_back(rank);
      }
    }
    for (const auto& [sequence, whats] : calls) {
      if (keys[sequence].size() < 2) continue;
      const auto most = std::max_element(whats.begin(), whats.end(), [](auto& a, auto& b) {
        return a.second.size() < b.second.size();
      });
      Ranks others;
      std::string text = "in collective #" + std::to_string(sequence) + " of " + title(group) +
                         " " + list_ranks(most->second) + " call" +
                         (most->second.size() == 1 ? "s " : " ") + most->first;
      for (const auto& [what, ranks] : whats) {
        if (what == most->first) continue;
        text += ", and " + list_ranks(ranks) + (ranks.size() == 1 ? " calls " : " call ") + what;
        for (const int rank : ranks) others.push_back(job_rank(group, rank));
      }
      // If two calls have equally many ranks, reports the ranks of both.
      if (whats.size() == 2 && most->second.size() == others.size()) {
        for (const int rank : most->second) others.push_back(job_rank(group, rank));
      }
      std::sort(others.begin(), others.end());
      report(What::Mismatch, others, text + "; WEFT_DEBUG=detail throws where that happens");
      return true;
    }
    return false;
  }

  // Which ranks wait in a collective or meeting, and which have not joined it.
  struct Meeting {
    Ranks waiting;
    Ranks late;
    Ranks missing;
    // A rank had not joined when its dump was made, but that was early.
    bool may_come = false;
    const Record* shown = nullptr;
    bool gave_up = false;
    // When the first of the waiting ranks joined.
    std::int64_t first = std::numeric_limits<std::int64_t>::max();
    // When the last of all ranks that joined did so.
    std::int64_t last = std::numeric_limits<std::int64_t>::min();
    std::int64_t longest = 0;
  };

  // The number of the first operation in which a rank waited long or in vain; of the last one if
  // ranks may skip some.
  std::optional<std::uint64_t> first_stuck(const Group& group, const Series& series) const {
    std::optional<std::uint64_t> stuck;
    for (const auto& [rank, view] : group.views) {
      for (const Record& record : view.records) {
        if (!series.has(record) || !evidence_.waits_long_or_in_vain(record, view)) continue;
        const std::uint64_t other = stuck.value_or(record.sequence);
        stuck = series.may_be_left_out ? std::max(other, record.sequence)
                                       : std::min(other, record.sequence);
      }
    }
    return stuck;
  }

  Meeting meeting(const Group& group, const Series& series, std::uint64_t sequence) const {
    Meeting met;
    for (const auto& [rank, view] : group.views) {
      const Record* record = find(view, series, sequence);
      if (record == nullptr) continue;
      met.last = std::max(met.last, record->begun);
      if (!waits(*record)) continue;
      met.waiting.push_back(rank);
      met.shown = record;
      met.gave_up |= gave_up(*record);
      met.first = std::min(met.first, record->begun);
      met.longest =
          std::max(met.longest,
                   (record->ended == 0 ? evidence_.now_of(view) : record->ended) - record->begun);
    }
    for (int rank = 0; rank < static_cast<int>(group.ranks.size()); ++rank) {
      const auto view = group.views.find(rank);
      if (view == group.views.end()) {
        met.missing.push_back(rank);
      } else if (find(view->second, series, sequence) != nullptr) {
        continue;
      } else if (const auto last = last_begun(view->second, series);
                 last > sequence) {  // its record was overwritten, or it skipped this one
        met.may_come |= series.may_be_left_out;
      } else if (may_have_gone_on(view->second, find(view->second, series, last), met.first)) {
        met.may_come = true;
      } else {
        const bool is_late =
            met.gave_up ||
            (met.shown != nullptr && evidence_.is_old(evidence_.now_of(view->second) - met.first));
        if (is_late) met.late.push_back(rank);
        met.may_come |= !is_late;
      }
    }
    return met;
  }

  // Whether the rank may have joined an operation in which others wait since `then`, after the last
  // one that its recorder shows, and overwritten the record.
  bool may_have_gone_on(const View& view, const Record* last, std::int64_t then) const {
    return evidence_.has_forgotten(view, then) &&
           (last == nullptr || evidence_.has_forgotten(view, last->begun));
  }

  // Whether all ranks have joined and still wait: a waiting rank's dump was made long after the
  // last rank joined.
  bool is_stuck(const Group& group, const Meeting& met) const {
    if (!met.late.empty() || !met.missing.empty() || met.may_come) return false;
    return met.gave_up || std::any_of(met.waiting.begin(), met.waiting.end(), [&](int rank) {
             return evidence_.is_old(evidence_.now_of(group.views.at(rank)) - met.last);
           });
  }

  // Reports the ranks that have not joined the first operation in which others wait.
  void find_late(const Group& group, const Series& series) {
    const auto stuck = first_stuck(group, series);
    if (!stuck) return;
    const Meeting met = meeting(group, series, *stuck);
    if (met.shown == nullptr) return;  // the dump has two records with one number
    const std::string where = describe(*met.shown) + " in " + title(group);
    const std::string who_waits = list_ranks(met.waiting) +
                                  (met.waiting.size() == 1 ? " waits for " : " wait for ") +
                                  duration_text(met.longest);
    for (const int rank : met.late) {
      const View& view = group.views.at(rank);
      std::string text = "rank " + std::to_string(rank) + " is late: it has not come to " + where +
                         ", where " + who_waits + "; ";
      const std::uint64_t last = last_begun(view, series);
      const Record* before = last == 0 ? nullptr : find(view, series, last);
      const bool has_begun_none = before == nullptr && !evidence_.has_forgotten(view, 0);
      if (before == nullptr)
        text += has_begun_none ? "it has begun none at all"
                               : "its recorder shows none, as far back as it goes";
      if (before != nullptr) text += "its last was " + describe(*before);
      if (before != nullptr && before->ended != 0)
        text += ", which ended " + duration_text(evidence_.now_of(view) - before->ended) +
                " before its dump";
      for (const std::string& doing : evidence_.doings(who_.of(view)))
        text += "; it is in " + doing;
      text += "; " + evidence_.program_of(group, view);
      report(What::LateRank, {job_rank(group, rank)}, text);
      for (const int one : met.waiting) {
        if (series.waits_for_all) waits_.add(who_.of(group.views.at(one)), who_.of(view), where);
      }
    }
    for (const int rank : met.missing) {
      report(What::MissingRank, {job_rank(group, rank)},
             "rank " + std::to_string(rank) +
                 " is missing: " + evidence_.without_view(group, rank) + ", and " + who_waits +
                 " in " + where + (met.late.empty() ? "" : " (for others as well)"));
    }
    if (!is_stuck(group, met)) return;
    Ranks all;
    std::string text = "all ranks have come to " + where + ", and " + list_ranks(met.waiting) +
                       " did not get through it";
    for (const int rank : met.waiting) {
      all.push_back(job_rank(group, rank));
      if (const std::string& transports = group.views.at(rank).transports; !transports.empty())
        text += "; rank " + std::to_string(rank) + " uses " + transports;
    }
    report(What::StuckCollective, all, text);
  }

  // Reports a rank that joins nearly every collective last, although nothing is stuck.
  void find_slow(const Group& group) {
    constexpr std::size_t kLeast = 5;
    constexpr std::int64_t kLeastDelay = 1'000'000;
    if (group.views.size() < 2) return;
    std::map<std::uint64_t, std::map<int, std::int64_t>> begun;
    for (const auto& [rank, view] : group.views) {
      for (const Record& record : view.records) {
        if (record.kind == "collective" && record.state == "done")
          begun[record.sequence][rank] = record.begun;
      }
    }
    // By rank: how far it was behind the rank before it, in the collectives that it joined last.
    std::map<int, std::vector<std::int64_t>> behind;
    std::size_t counted = 0;
    for (const auto& [sequence, ranks] : begun) {
      if (ranks.size() != group.views.size()) continue;
      ++counted;
      std::vector<std::pair<std::int64_t, int>> order;
      for (const auto& [rank, time] : ranks) order.emplace_back(time, rank);
      std::sort(order.begin(), order.end());
      behind[order.back().second].push_back(order.back().first - order[order.size() - 2].first);
    }
    for (auto& [rank, delays] : behind) {
      if (counted < kLeast || delays.size() * 5 < counted * 4) continue;
      std::nth_element(delays.begin(),
                       delays.begin() + static_cast<std::ptrdiff_t>(delays.size() / 2),
                       delays.end());
      const std::int64_t median = delays[delays.size() / 2];
      if (median < kLeastDelay) continue;
      std::string text = "rank " + std::to_string(rank) + " came last to " +
                         std::to_string(delays.size()) + " of the last " + std::to_string(counted) +
                         " collectives of " + title(group) + ", " + duration_text(median) +
                         " behind the one before it (median)";
      if (evidence_.on_several_hosts(group))
        text += "; the machines' clocks were compared by the calendar only";
      report(What::SlowRank, {job_rank(group, rank)}, text);
    }
  }

  // Reports passes of distributed autograd that have been open for long or timed out, and on which
  // workers their nodes still run.
  void find_backward() {
    struct Standing {
      Ranks in;
      std::int64_t longest = 0;
    };
    std::map<std::uint64_t, Standing> passes;
    for (const auto& [rank, agent] : dumps_.agents) {
      for (const Record& record : agent.records) {
        if (record.kind != "backward") continue;
        const bool is_late = record.state == "failed" && record.blame == "Timeout";
        if (!is_late && (record.state != "open" || !evidence_.is_old(evidence_.age(record, agent))))
          continue;
        Standing& standing = passes[record.sequence];
        standing.in.push_back(rank);
        const std::int64_t end = record.ended == 0 ? evidence_.now_of(agent) : record.ended;
        standing.longest = std::max(standing.longest, end - record.begun);
      }
    }
    for (const auto& [pass, standing] : passes) {
      Ranks running;
      std::string where;
      for (const auto& [rank, agent] : dumps_.agents) {
        for (const Record& record : agent.records) {
          if (record.kind != "gradient" || record.name != "gradient" || record.state != "open" ||
              record.tag != static_cast<int>(pass & 0x7fffffff))
            continue;
          if (running.empty() || running.back() != rank) running.push_back(rank);
          where += (where.empty() ? "" : "; ") + who_.agent(rank) +
                   " runs nodes that a gradient of " + who_.agent(record.peer) + " started, for " +
                   duration_text(evidence_.now_of(agent) - record.begun);
        }
      }
      report(What::StuckBackward, running.empty() ? standing.in : running,
             list_ranks(standing.in, who_.agents()) + (standing.in.size() == 1 ? " is" : " are") +
                 " in a backward pass, for " + duration_text(standing.longest) + ": " +
                 (where.empty() ? "no dump shows a gradient that has arrived and whose nodes run"
                                : where));
    }
  }

  void find_calls() {
    std::size_t found = 0;
    for (const auto& [rank, agent] : dumps_.agents) {
      for (const Record& call : agent.records) {
        const bool no_reply =
            (call.state == "open" && evidence_.is_old(evidence_.age(call, agent))) ||
            (call.state == "failed" && call.blame == "Timeout");
        if (call.kind != "call" || !no_reply || is_of_shutdown(call)) continue;
        const std::int64_t waited =
            (call.ended == 0 ? evidence_.now_of(agent) : call.ended) - call.begun;
        std::string text = who_.agent(rank) + (call.ended == 0 ? " waits" : " waited") + " for " +
                           duration_text(waited) + " for a reply to " +
                           describe(call, who_.agents()) + ": " + fate(call, agent);
        if (++found <= kMostOfAKind) report(What::NoReply, {rank, call.peer}, text);
      }
    }
    if (found > kMostOfAKind)
      report(What::NoReply, {},
             "and " + std::to_string(found - kMostOfAKind) + " more calls without a reply");
  }

  std::string fate(const Record& call, const View& from) {
    const int caller = from.rank;
    // A worker records its calls to itself as calls only, so it is not known whether they have
    // begun.
    if (call.peer == caller) return "the worker calls itself: the function runs or waits here";
    const auto callee = dumps_.agents.find(call.peer);
    if (callee == dumps_.agents.end()) return "there is no dump of " + who_.agent(call.peer);
    if (call.state == "open" && evidence_.is_old_to_both(call, from, callee->second))
      waits_.add(who_.of(from), who_.of(callee->second), describe(call, who_.agents()));
    for (const Record& served : callee->second.records) {
      if (served.kind != "served" || served.peer != caller ||
          !is_of(served, call, from, callee->second))
        continue;
      if (served.state == "open" && !served.runs) {
        return "it has not begun there: it waits for the value of an RRef, or for a thread "
               "(rpc::Options::worker_threads of that worker)" +
               occupants(callee->second);
      }
      if (served.state == "open")
        return "it has run there for " +
               duration_text(evidence_.now_of(callee->second) - served.begun);
      return "it was answered there after " + duration_text(served.ended - served.begun) +
             "; the reply did not arrive, or arrived too late";
    }
    if (evidence_.now_of(callee->second) < call.begun)
      return "the dump of " + who_.agent(call.peer) + " is older than it";
    if (evidence_.has_forgotten(callee->second, call.begun - difference(from, callee->second)))
      return "it is not known whether it has arrived there: the recorder of " +
             who_.agent(call.peer) + " has forgotten that time";
    return "it has never arrived there";
  }

  // "; that worker runs hold for 4.8 s, hold for 4.7 s": the calls that it runs, or makes to
  // itself;
  // "" for none.
  std::string occupants(const View& worker) const {
    std::string calls;
    std::size_t count = 0;
    const auto add = [&](const Record& call) {
      if (++count > kMostOfAKind) return;
      calls += (calls.empty() ? "" : ", ") + call.name + " for " +
               duration_text(evidence_.now_of(worker) - call.begun);
    };
    for (const Record& one : worker.records) {
      if (one.state != "open") continue;
      if (one.kind == "served" && one.runs) add(one);
      if (one.kind == "call" && one.peer == worker.rank && !is_of_shutdown(one)) add(one);
    }
    if (count == 0) return "";
    return "; that worker runs " + calls +
           (count > kMostOfAKind ? " and " + std::to_string(count - kMostOfAKind) + " more" : "");
  }

  // By how much the calendar clocks of two views may differ.
  std::int64_t difference(const View& from, const View& to) const {
    constexpr std::int64_t kCalendars = 1'000'000'000;
    return dumps_.dumps[from.dump].host == dumps_.dumps[to.dump].host ? 0 : kCalendars;
  }

  // Whether `served` belongs to `call`. Each agent of a process numbers its calls from 1, so a
  // served call belongs to the newest call with its number that had begun by then.
  bool is_of(const Record& served, const Record& call, const View& from, const View& to) const {
    if (served.sequence != call.sequence) return false;
    const std::int64_t error = difference(from, to);
    if (served.begun < call.begun - error) return false;
    return std::none_of(from.records.begin(), from.records.end(), [&](const Record& later) {
      return later.kind == "call" && later.peer == call.peer && later.sequence == call.sequence &&
             later.begun > call.begun && later.begun <= served.begun - error;
    });
  }

  void find_cycle() {
    const std::vector<int> circle = waits_.shortest_circle();
    if (circle.empty()) return;
    Ranks ranks;
    std::string names;
    std::string text;
    for (std::size_t i = 0; i < circle.size(); ++i) {
      const int whom = circle[(i + 1) % circle.size()];
      const std::string name = who_.name(circle[i]);
      ranks.push_back(who_.rank(circle[i]));
      names += (i > 0 ? ", " : "") + name;
      text += (i > 0 ? "; " : "") + name + " for " + who_.name(whom) + " in " +
              waits_.in(circle[i], whom);
    }
    report(
        What::CycleOfWaits, ranks,
        (who_.are_numbered_alike() ? list_ranks(ranks) : names) + " wait for each other: " + text);
  }

  void find_first_failure() {
    const Record* first = nullptr;
    const View* whose = nullptr;
    const auto look = [&](const View& view) {
      for (const Record& record : view.records) {
        if (record.state != "failed" || (first != nullptr && first->ended <= record.ended))
          continue;
        first = &record;
        whose = &view;
      }
    };
    for (const Group& group : dumps_.groups) {
      for (const auto& [rank, view] : group.views) look(view);
    }
    for (const auto& [rank, view] : dumps_.agents) look(view);
    if (first == nullptr) return;
    report(What::Failure, {whose->job_rank},
           "the first failure was on " + who_.name(who_.of(*whose)) + ": " +
               describe(*first, who_.agents()) + ": " + first->blame + ": " + first->error);
  }

  const Dumps& dumps_;
  const Evidence evidence_;
  const Participants& who_;
  Waits waits_;
  std::vector<Finding> findings_;
};

}  // namespace

const char* name(Finding::What what) {
  switch (what) {
    case What::Mismatch: return "mismatch";
    case What::MissingRank: return "missing rank";
    case What::LateRank: return "late rank";
    case What::StuckCollective: return "stuck collective";
    case What::StuckMessage: return "stuck message";
    case What::StuckBackward: return "stuck backward";
    case What::NoReply: return "no reply";
    case What::CycleOfWaits: return "cycle of waits";
    case What::SlowRank: return "slow rank";
    case What::Failure: return "failure";
  }
  return "";
}

std::vector<Finding> analyze(const Dumps& dumps, std::chrono::nanoseconds older_than) {
  return Analysis(dumps, older_than).run();
}

}  // namespace weft::tools
