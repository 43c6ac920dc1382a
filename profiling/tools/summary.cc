// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <tuple>

#include <nlohmann/json.hpp>

#include <weft/profiling/tools/host_threads.h>
#include <weft/profiling/tools/intervals.h>
#include <weft/profiling/tools/summary.h>
#include <weft/profiling/tools/wording.h>

namespace weft::tools {

namespace {

constexpr const char* kWait = "wait";  // the name of a stream's wait

bool is_between_ranks(const Span& span) {
  return span.kind != "served" && span.kind != "reference" && span.kind != "gradient" &&
         span.kind != "device";
}

struct Lines {
  Intervals communication;
  Intervals exposed;
  Intervals waiting;
};

using CollectiveKey = std::tuple<std::string, int, std::uint64_t>;

class Counting {
 public:
  explicit Counting(const Run& run) : run_(run) {}

  Summary count() {
    find_collectives();
    for (const auto& [rank, events] : run_.ranks) lines_[rank] = lines_of(events);
    count_steps();
    count_links();
    choose_slowest();
    find_gaps();
    return std::move(summary_);
  }

 private:
  void find_collectives() {
    for (const auto& [rank, events] : run_.ranks) {
      for (const Span& span : events.operations) {
        if (span.kind == "collective")
          collectives_[{span.group, span.generation, span.sequence}][rank] = &span;
      }
    }
    for (const auto& [key, ranks] : collectives_) {
      if (ranks.size() < 2) continue;
      ++summary_.collectives;
      const auto [first, last] =
          std::minmax_element(ranks.begin(), ranks.end(),
                              [](auto& a, auto& b) { return a.second->begin < b.second->begin; });
      ++summary_.last[last->first];
      for (const auto& [rank, span] : ranks)
        summary_.late[rank] += span->begin - first->second->begin;
    }
  }

  void choose_slowest() {
    const auto most = std::max_element(summary_.late.begin(), summary_.late.end(),
                                       [](auto& a, auto& b) { return a.second < b.second; });
    const auto longest =
        std::max_element(summary_.answers.begin(), summary_.answers.end(),
                         [](auto& a, auto& b) { return a.second.mean() < b.second.mean(); });
    if (most != summary_.late.end()) {
      summary_.slowest_rank = most->first;
    } else if (summary_.answers.size() > 1) {
      summary_.slowest_rank = longest->first;
    }
  }

  Lines lines_of(const RankRun& events) const {
    Lines lines;
    for (const Span& span : events.operations) {
      if (is_between_ranks(span)) lines.communication.emplace_back(span.begin, span.end);
      if (span.kind != "collective") continue;
      double last = span.begin;
      for (const auto& [rank, other] :
           collectives_.at({span.group, span.generation, span.sequence}))
        last = std::max(last, other->begin);
      lines.waiting.emplace_back(span.begin, std::min(last, span.end));
    }
    // Waiting does not delay a rank while another of its threads works for other ranks.
    const HostTimes host = host_times(events.ranges);
    lines.exposed = without(host.waiting, host.serving);
    for (const Span& span : events.operations) {
      if (span.kind == "device" && span.name == kWait)
        lines.exposed.emplace_back(span.begin, span.end);
    }
    lines.communication = united(std::move(lines.communication));
    lines.exposed = united(std::move(lines.exposed));
    lines.waiting = united(std::move(lines.waiting));
    return lines;
  }

  void count_steps() {
    const auto marked = std::find_if(run_.ranks.begin(), run_.ranks.end(),
                                     [](auto& one) { return !one.second.steps.empty(); });
    summary_.marked = marked != run_.ranks.end();
    const std::vector<double> marks =
        summary_.marked ? marked->second.steps : std::vector<double>{0};
    for (const auto& [rank, events] : run_.ranks) {
      std::vector<double> bounds = events.steps.empty() ? marks : events.steps;
      bounds.push_back(std::max(events.end, bounds.back()));
      const Lines& lines = lines_.at(rank);
      std::vector<Times> counted;
      for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
        const double begin = bounds[i];
        const double end = bounds[i + 1];
        Times times;
        times.total = end - begin;
        times.communication = within(lines.communication, begin, end);
        times.exposed = events.has_ranges ? within(lines.exposed, begin, end)
                                          : std::numeric_limits<double>::quiet_NaN();
        times.waiting = within(lines.waiting, begin, end);
        times.compute = times.total - times.exposed;
        counted.push_back(times);
        if (summary_.steps.size() <= i) summary_.steps.push_back({static_cast<int>(i), {}});
        summary_.steps[i].ranks[rank] = times;
      }
      summary_.ranks[rank] = mean(counted);
      for (const Times& times : counted) {
        summary_.whole[rank].total += times.total;
        summary_.whole[rank].exposed += times.exposed;
      }
    }
  }

  // Leaves out the first step, which warms up, and the last, which reaches to the end of the
  // program.
  static Times mean(const std::vector<Times>& steps) {
    const std::size_t trimmed = steps.size() > 2 ? 1 : 0;
    Times sum;
    const std::size_t end = steps.size() - trimmed;
    const double count = static_cast<double>(end - trimmed);
    for (std::size_t i = trimmed; i < end; ++i) {
      sum.total += steps[i].total / count;
      sum.compute += steps[i].compute / count;
      sum.communication += steps[i].communication / count;
      sum.exposed += steps[i].exposed / count;
      sum.waiting += steps[i].waiting / count;
    }
    return sum;
  }

  void count_links() {
    count_messages();
    count_calls();
    for (const auto& [ends, link] : links_) summary_.links.push_back(link);
    std::sort(summary_.links.begin(), summary_.links.end(), [](const Link& a, const Link& b) {
      if (a.has_speed() != b.has_speed()) return a.has_speed();
      return a.gigabytes_per_second() < b.gigabytes_per_second();
    });
  }

  Link& link_of(int from, int to) {
    Link& link = links_[{from, to}];
    link.from = from;
    link.to = to;
    return link;
  }

  void count_messages() {
    using MessageKey = std::tuple<std::string, int, int, int, int,
                                  std::uint64_t>;  // group, generation, from, to, tag, number
    std::map<MessageKey, std::pair<int, const Span*>> sends;
    for (const auto& [rank, events] : run_.ranks) {
      for (const Span& span : events.operations) {
        if (span.kind == "send")
          sends[{span.group, span.generation, span.rank, span.peer, span.tag, span.sequence}] = {
              rank, &span};
      }
    }
    for (const auto& [rank, events] : run_.ranks) {
      for (const Span& span : events.operations) {
        if (span.kind != "receive" || span.state != "done") continue;
        const auto sent = sends.find(
            {span.group, span.generation, span.peer, span.rank, span.tag, span.sequence});
        if (sent == sends.end()) continue;
        Link& link = link_of(sent->second.first, rank);
        ++link.messages;
        link.bytes += span.bytes;
        link.microseconds +=
            std::max(0.0, span.end - std::max(span.begin, sent->second.second->begin));
      }
    }
  }

  // Returns the newest of the calls with one number that had begun when `came` began, as far as the
  // clocks can tell, or null: each agent of a process numbers its calls anew.
  const Span* call_of(const Span& came, int rank,
                      const std::vector<std::pair<int, const Span*>>& calls) const {
    const double error =
        run_.ranks.at(calls.front().first).clock_error + run_.ranks.at(rank).clock_error;
    const auto later = std::find_if(calls.begin(), calls.end(), [&](const auto& one) {
      return one.second->begin > came.begin && one.second->begin - came.begin > error;
    });
    if (later != calls.begin()) return (later - 1)->second;
    return error > 0 ? calls.front().second : nullptr;
  }

  void count_calls() {
    // Calls by from, to and number, in the order in which they began.
    std::map<std::tuple<int, int, std::uint64_t>, std::vector<std::pair<int, const Span*>>> calls;
    for (const auto& [rank, events] : run_.ranks) {
      for (const Span& span : events.operations) {
        if (span.kind == "call" && span.state == "done" && span.peer != span.rank &&
            !is_control(span.name))
          calls[{span.rank, span.peer, span.sequence}].emplace_back(rank, &span);
      }
    }
    for (const auto& [rank, events] : run_.ranks) {
      for (const Span& span : events.operations) {
        if (span.kind != "served" || span.state != "done") continue;
        const auto called = calls.find({span.peer, span.rank, span.sequence});
        if (called == calls.end()) continue;
        const Span* const found = call_of(span, rank, called->second);
        if (found == nullptr) continue;
        const Span& call = *found;
        Link& link = link_of(called->second.front().first, rank);
        ++link.calls;
        link.bytes += call.bytes;
        link.microseconds += std::max(0.0, (call.end - call.begin) - (span.end - span.begin));
        Answers& answers = summary_.answers[rank];
        ++answers.calls;
        answers.microseconds += call.end - call.begin;
      }
    }
  }

  void find_gaps() {
    constexpr std::size_t kShown = 5;
    for (const auto& [rank, lines] : lines_) {
      for (std::size_t i = 1; i < lines.communication.size(); ++i) {
        summary_.gaps.push_back(
            {rank, lines.communication[i - 1].second, lines.communication[i].first});
      }
    }
    std::sort(summary_.gaps.begin(), summary_.gaps.end(),
              [](const Gap& a, const Gap& b) { return a.end - a.begin > b.end - b.begin; });
    if (summary_.gaps.size() > kShown) summary_.gaps.resize(kShown);
  }

  const Run& run_;
  Summary summary_;
  std::map<int, Lines> lines_;
  std::map<std::pair<int, int>, Link> links_;
  std::map<CollectiveKey, std::map<int, const Span*>> collectives_;
};

double percent(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

constexpr const char* kNotRecorded = "not recorded";

template <class... A>
std::string formatted(const char* format, A... values) {
  char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

template <class... A>
std::string line(const char* format, A... values) {
  return formatted(format, values...) + "\n";
}

std::string milliseconds(double microseconds) {
  return std::isnan(microseconds) ? "-" : formatted("%.3f", microseconds / 1e3);
}

// "0.100 (10.0%)"
std::string share(const Times& times) {
  if (std::isnan(times.exposed)) return kNotRecorded;
  return formatted("%10.3f (%4.1f%%)", times.exposed / 1e3, percent(times.exposed, times.total));
}

std::string counted(std::size_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

// Chooses the unit: with small messages a link may move only kilobytes a second.
std::string speed(double gigabytes_per_second) {
  constexpr const char* kUnits[] = {"GB/s", "MB/s", "kB/s", "B/s"};
  double value = gigabytes_per_second;
  std::size_t unit = 0;
  for (; value < 0.1 && unit < 3; ++unit) value *= 1000;
  char text[64];
  std::snprintf(text, sizeof text, "%.3g %s", value, kUnits[unit]);
  return text;
}

std::string heading(const Run& run, const Summary& summary) {
  const std::string ranks = counted(run.ranks.size(), "rank");
  const std::string collectives = counted(summary.collectives, "collective") + "\n";
  if (!summary.marked)
    return ranks + ", " + collectives +
           "no steps are marked: the figures below are of the whole run\n";
  const std::size_t steps = summary.steps.size();
  return ranks + ", " + counted(steps, "step") + ", " + collectives +
         (steps > 2 ? "times are means of all steps except the first, which warms up, and the "
                      "last, which reaches to the end\n"
                    : "times are means of the steps\n");
}

std::string table_head(const char* step, const char* time) {
  return line("%-8s%-6s %12s %12s %16s %18s %12s", step, "rank", time, "compute ms",
              "communication ms", "exposed ms (share)", "waiting ms");
}

std::string table_row(const std::string& step, int rank, const Times& times) {
  return line("%-8s%-6d %12.3f %12s %16.3f %18s %12.3f", step.c_str(), rank, times.total / 1e3,
              milliseconds(times.compute).c_str(), times.communication / 1e3, share(times).c_str(),
              times.waiting / 1e3);
}

// The steps are in the order of the run.
std::string steps_table(const Summary& summary, std::size_t shown) {
  const auto longest = [](const Step* step) {
    double most = 0;
    for (const auto& [rank, times] : step->ranks) most = std::max(most, times.total);
    return most;
  };
  std::vector<const Step*> steps;
  for (const Step& step : summary.steps) steps.push_back(&step);
  std::string text = "\n";
  if (shown < steps.size()) {
    std::stable_sort(steps.begin(), steps.end(),
                     [&](auto* a, auto* b) { return longest(a) > longest(b); });
    steps.resize(shown);
    std::sort(steps.begin(), steps.end(), [](auto* a, auto* b) { return a->number < b->number; });
    text += line("the %zu longest of %zu steps (--steps %zu shows all):", shown,
                 summary.steps.size(), summary.steps.size());
  }
  text += table_head("step", "step ms");
  for (const Step* step : steps) {
    for (const auto& [rank, times] : step->ranks)
      text += table_row(std::to_string(step->number), rank, times);
  }
  return text;
}

// The slowest rank and link, and the longest times without operations.
std::string slowest(const Summary& summary) {
  std::string text = "slowest rank: ";
  if (!summary.slowest_rank) {
    text += "none: no collectives of several ranks, and no calls to several\n";
  } else if (const int rank = *summary.slowest_rank; summary.collectives > 0) {
    const auto last = summary.last.find(rank);
    text += line("%d came last to %zu of %zu collectives, in all %.3f ms later than the first",
                 rank, last != summary.last.end() ? last->second : 0, summary.collectives,
                 summary.late.at(rank) / 1e3);
  } else {
    const Answers& answers = summary.answers.at(rank);
    text += line("%d took %.3f ms to answer a call, the mean of %zu", rank, answers.mean() / 1e3,
                 answers.calls);
  }
  text += "slowest link: ";
  if (summary.links.empty() || !summary.links.front().has_speed()) {
    text += "none: no messages or calls carried bytes (collectives belong to no link)\n";
  } else {
    const Link& link = summary.links.front();
    std::string count =
        link.messages > 0 || link.calls == 0 ? counted(link.messages, "message") : "";
    if (link.calls > 0) count += (count.empty() ? "" : " and ") + counted(link.calls, "call");
    text += "rank " + std::to_string(link.from) + " to rank " + std::to_string(link.to) + ", " +
            speed(link.gigabytes_per_second()) + " in " + count + " of " +
            counted(link.bytes, "byte") + " together\n";
  }
  for (const Gap& gap : summary.gaps) {
    text += line("no communication: rank %d for %.3f ms from %.3f ms", gap.rank,
                 (gap.end - gap.begin) / 1e3, gap.begin / 1e3);
  }
  return text;
}

nlohmann::ordered_json json_of(const Times& times) {
  return {{"total_us", times.total},
          {"compute_us", times.compute},
          {"communication_us", times.communication},
          {"exposed_us", times.exposed},
          {"waiting_us", times.waiting}};
}

}  // namespace

Summary summarize(const Run& run) { return Counting(run).count(); }

std::string to_text(const Run& run, const Summary& summary, std::size_t steps) {
  std::string text = heading(run, summary);
  for (const auto& [rank, events] : run.ranks) {
    if (events.clock_error > 0)
      text += line(events.clock_again
                       ? "the clock of rank %d was known to %.1f us at the start and at the end"
                       : "the clock of rank %d was known to %.1f us at the start, and may drift",
                   rank, events.clock_error);
  }
  if (run.lost > 0)
    text += line("%llu events are missing: there was no room for them",
                 static_cast<unsigned long long>(run.lost));
  for (const int rank : run.cut)
    text += line("rank %d did not end in good order; its last moments are missing", rank);
  for (const auto& [rank, events] : run.ranks) {
    if (!events.has_ranges)
      text += line("rank %d: compute and exposed are %s (built with WEFT_TRACE=OFF)", rank,
                   kNotRecorded);
  }
  text += "\n" + table_head("", summary.marked ? "mean step ms" : "run ms");
  for (const auto& [rank, times] : summary.ranks) text += table_row("", rank, times);
  for (const auto& [rank, times] : summary.whole) {
    if (!summary.marked) break;
    const double exposed = percent(times.exposed, times.total);
    text += line("all steps of rank %d: %.3f ms, exposed %s", rank, times.total / 1e3,
                 std::isnan(exposed) ? kNotRecorded : formatted("%.1f%%", exposed).c_str());
  }
  if (summary.marked && steps > 0) text += steps_table(summary, steps);
  return text + "\n" + slowest(summary);
}

std::string to_json(const Summary& summary) {
  nlohmann::ordered_json json{{"steps_are_marked", summary.marked},
                              {"steps", nlohmann::ordered_json::array()},
                              {"ranks", nlohmann::ordered_json::object()},
                              {"collectives", summary.collectives}};
  for (const Step& step : summary.steps) {
    nlohmann::ordered_json row{{"step", step.number}, {"ranks", nlohmann::ordered_json::object()}};
    for (const auto& [rank, times] : step.ranks)
      row["ranks"][std::to_string(rank)] = json_of(times);
    json["steps"].push_back(std::move(row));
  }
  for (const auto& [rank, times] : summary.ranks) {
    auto row = json_of(times);
    row["exposed_share"] = times.total > 0 ? times.exposed / times.total : 0;
    const Times& whole = summary.whole.at(rank);
    row["exposed_share_of_all_steps"] = whole.total > 0 ? whole.exposed / whole.total : 0;
    row["last_to_begin"] = summary.last.contains(rank) ? summary.last.at(rank) : 0;
    json["ranks"][std::to_string(rank)] = std::move(row);
  }
  if (summary.slowest_rank) json["slowest_rank"] = *summary.slowest_rank;
  json["answers"] = nlohmann::ordered_json::object();
  for (const auto& [rank, answers] : summary.answers) {
    json["answers"][std::to_string(rank)] = {{"calls", answers.calls}, {"mean_us", answers.mean()}};
  }
  json["links"] = nlohmann::ordered_json::array();
  for (const Link& link : summary.links) {
    json["links"].push_back({{"from", link.from},
                             {"to", link.to},
                             {"messages", link.messages},
                             {"calls", link.calls},
                             {"bytes", link.bytes},
                             {"gigabytes_per_second", link.gigabytes_per_second()}});
  }
  json["gaps"] = nlohmann::ordered_json::array();
  for (const Gap& gap : summary.gaps)
    json["gaps"].push_back({{"rank", gap.rank}, {"begin_us", gap.begin}, {"end_us", gap.end}});
  return json.dump(2);
}

}  // namespace weft::tools
