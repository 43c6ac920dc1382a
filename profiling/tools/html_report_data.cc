// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <vector>

#include <nlohmann/json.hpp>

#include <weft/profiling/tools/host_threads.h>
#include <weft/profiling/tools/html_report_data.h>

namespace weft::tools {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMostBars = 50'000;  // of all ranks together

// The kinds of drawn spans: page.css has a colour for each.
constexpr std::array kKinds{"collective", "send",     "receive",   "call",    "served",
                            "backward",   "gradient", "reference", "meeting", "device",
                            "wait",       "working",  "range"};

std::size_t kind_of(const Span& span, bool is_range) {
  std::string kind = span.kind;
  if (is_range) {
    const auto what = doing(span);
    kind = !what ? "range" : *what == Doing::Waiting ? "wait" : "working";
  } else if (kind == "device" && span.name == "wait") {
    kind = "wait";
  }
  const auto found = std::find(kKinds.begin(), kKinds.end(), kind);
  return found == kKinds.end() ? kKinds.size() - 1
                               : static_cast<std::size_t>(found - kKinds.begin());
}

// Rounds microseconds to one decimal, because three more digits of noise for each of many thousands
// would make the page larger.
double rounded(double time) { return std::round(time * 10) / 10; }

Json rounded_or_null(double time) { return std::isnan(time) ? Json() : Json(rounded(time)); }

// Spans of one lane that are drawn as one block.
struct Block {
  const Span* longest = nullptr;
  double begin = 0;
  double end = 0;
  std::size_t depth = 0;  // ranges nest
  std::size_t count = 1;
  bool is_bad = false;
  double length() const { return longest->end - longest->begin; }
};

bool is_bad(const Span& span) { return span.state == "failed" || span.state == "unfinished"; }

// Joins a lane's spans, given in the order in which they begin, into blocks. Spans shorter than
// `joined_below`, with a shorter gap before the next, become one block, which is at most
// kMostJoined times as long; a failed span stays alone.
constexpr double kMostJoined = 4;
std::vector<Block> blocks_of(const std::vector<const Span*>& spans, double joined_below) {
  std::vector<double> open;       // ends of the spans that contain the present one
  std::vector<std::size_t> last;  // the newest block by depth
  std::vector<Block> blocks;
  constexpr auto kNone = static_cast<std::size_t>(-1);
  for (const Span* span : spans) {
    while (!open.empty() && open.back() <= span->begin) open.pop_back();
    const std::size_t depth = open.size();
    open.push_back(span->end);
    if (last.size() <= depth) last.resize(depth + 1, kNone);
    const bool is_short = span->end - span->begin < joined_below && !is_bad(*span);
    Block* const before = last[depth] == kNone ? nullptr : &blocks[last[depth]];
    if (is_short && before != nullptr && !before->is_bad && before->length() < joined_below &&
        span->begin - before->end < joined_below &&
        span->end - before->begin < kMostJoined * joined_below) {
      if (span->end - span->begin > before->length()) before->longest = span;
      before->end = std::max(before->end, span->end);
      ++before->count;
      continue;
    }
    last[depth] = blocks.size();
    blocks.push_back({span, span->begin, span->end, depth, 1, is_bad(*span)});
  }
  return blocks;
}

// A row of a rank. Threads come before other rows, and the main thread comes first.
struct Lane {
  std::string name;
  bool is_thread = false;
  std::vector<const Span*> spans;
};

std::vector<Lane> lanes_of(const RankRun& events, const Window& window) {
  std::map<int, Lane> rows;
  const auto add = [&](const Span& span, bool is_thread) {
    if (span.end < window.begin || span.begin > window.end) return;
    Lane& lane = rows[span.row];
    lane.is_thread = is_thread;
    lane.spans.push_back(&span);
  };
  for (const Span& span : events.ranges) add(span, true);
  for (const Span& span : events.operations) add(span, false);
  std::vector<Lane> lanes;
  for (auto& [row, lane] : rows) {
    lane.name = events.rows.contains(row) ? events.rows.at(row) : std::to_string(row);
    std::stable_sort(lane.spans.begin(), lane.spans.end(), [](const Span* a, const Span* b) {
      return a->begin != b->begin ? a->begin < b->begin : a->end > b->end;
    });
    lanes.push_back(std::move(lane));
  }
  const auto place = [](const Lane& lane) {
    return lane.name == "thread main" ? 0 : lane.is_thread ? 1 : 2;
  };
  std::stable_sort(lanes.begin(), lanes.end(),
                   [&](const Lane& a, const Lane& b) { return place(a) < place(b); });
  return lanes;
}

class Spans {
 public:
  Spans(const Run& run, const Window& window, std::size_t most) : window_(window) {
    for (const auto& [rank, events] : run.ranks) lanes_[rank] = lanes_of(events, window);
    // Ends for every run, because a lane has at most two blocks in each `joined_below_` of time.
    while (count() > most)
      joined_below_ = joined_below_ > 0 ? 2 * joined_below_ : (window.end - window.begin) / 1e6;
  }

  double joined_below() const { return joined_below_; }
  const std::set<std::string>& kinds() const { return kinds_; }
  Json names() const { return names_; }

  Json of(int rank) {
    Json lanes = Json::array();
    for (const Lane& lane : lanes_.at(rank)) lanes.push_back(drawn(lane));
    return lanes;
  }

 private:
  std::size_t count() const {
    std::size_t sum = 0;
    for (const auto& [rank, lanes] : lanes_) {
      for (const Lane& lane : lanes) sum += blocks_of(lane.spans, joined_below_).size();
    }
    return sum;
  }

  std::size_t name(const std::string& text) {
    const auto [found, is_new] = places_.emplace(text, names_.size());
    if (is_new) names_.push_back(text);
    return found->second;
  }

  // Writes one list for each field, which is shorter than an object for each span.
  Json drawn(const Lane& lane) {
    Json json{{"name", lane.name}, {"rows", 1}};
    for (const char* list : {"begin", "length", "depth", "kind", "label", "count", "bad"})
      json[list] = Json::array();
    if (!lane.is_thread)
      for (const char* list : {"sequence", "bytes", "peer", "group", "state", "called_by"})
        json[list] = Json::array();
    std::size_t rows = 1;
    for (const Block& block : blocks_of(lane.spans, joined_below_)) {
      const Span& span = *block.longest;
      const std::size_t kind = kind_of(span, lane.is_thread);
      kinds_.insert(block.is_bad ? "failed" : kKinds[kind]);
      rows = std::max(rows, block.depth + 1);
      json["begin"].push_back(rounded(block.begin));
      json["length"].push_back(rounded(block.end - block.begin));
      json["depth"].push_back(block.depth);
      json["kind"].push_back(kind);
      json["label"].push_back(name(span.name));
      json["count"].push_back(block.count);
      json["bad"].push_back(block.is_bad ? 1 : 0);
      if (lane.is_thread) continue;
      json["sequence"].push_back(span.sequence);
      json["bytes"].push_back(span.bytes);
      json["peer"].push_back(span.peer);
      json["group"].push_back(name(span.group));
      json["state"].push_back(name(span.state == "done" ? "" : span.state));
      json["called_by"].push_back(name(span.called_by));
    }
    json["rows"] = rows;
    return json;
  }

  const Window window_;
  std::map<int, std::vector<Lane>> lanes_;
  double joined_below_ = 0;
  std::set<std::string> kinds_;
  std::map<std::string, std::size_t> places_;
  Json names_ = Json::array();
};

// Draws a bar for each step, or for several consecutive steps, with their means.
Json steps_of(const Summary& summary, PageData& page) {
  std::set<int> ranks;
  std::vector<double> totals;
  for (const Step& step : summary.steps) {
    for (const auto& [rank, times] : step.ranks) {
      ranks.insert(rank);
      totals.push_back(times.total);
    }
  }
  if (!summary.marked || totals.empty()) return {};
  const std::size_t bars = std::max<std::size_t>(1, kMostBars / ranks.size());
  const std::size_t per_bar = (summary.steps.size() + bars - 1) / bars;
  page.steps_per_bar = static_cast<int>(per_bar);
  // The first step, and a few more, may be far longer than the others: the axis ends above 99 of
  // 100 steps.
  std::sort(totals.begin(), totals.end());
  double most = totals[(totals.size() - 1) * 99 / 100] * 1.15;
  if (totals.back() <= 2 * most) most = totals.back();
  if (most <= 0) return {};
  page.clipped_bars =
      static_cast<std::size_t>(totals.end() - std::upper_bound(totals.begin(), totals.end(), most));
  Json json{{"count", summary.steps.size()},
            {"per_bar", per_bar},
            {"most", most},
            {"ranks", Json::array()}};
  for (const int rank : ranks) {
    Json total = Json::array(), exposed = Json::array(), waiting = Json::array();
    for (std::size_t first = 0; first < summary.steps.size(); first += per_bar) {
      Times sum;
      std::size_t count = 0;
      for (std::size_t i = first; i < std::min(first + per_bar, summary.steps.size()); ++i) {
        const auto found = summary.steps[i].ranks.find(rank);
        // The rank ended earlier than the others.
        if (found == summary.steps[i].ranks.end()) continue;
        ++count;
        sum.total += found->second.total;
        sum.exposed += found->second.exposed;
        sum.waiting += found->second.waiting;
      }
      const double by = static_cast<double>(std::max<std::size_t>(1, count));
      total.push_back(rounded(sum.total / by));
      exposed.push_back(rounded_or_null(sum.exposed / by));
      waiting.push_back(rounded(sum.waiting / by));
    }
    json["ranks"].push_back(
        {{"rank", rank}, {"total", total}, {"exposed", exposed}, {"waiting", waiting}});
  }
  return json;
}

// Escapes the data, so that no name in a timeline can end the <script> element that contains it.
std::string in_a_script(std::string json) {
  for (std::size_t at = 0; (at = json.find('<', at)) != std::string::npos;)
    json.replace(at, 1, "\\u003c");
  return json;
}

}  // namespace

PageData page_data(const Run& run, const Summary& summary, const Window& data, const Window& view,
                   std::size_t most_spans) {
  PageData page;
  Spans spans(run, data, most_spans);
  double end = 0;
  for (const auto& [rank, events] : run.ranks) end = std::max(end, events.end);
  Json json{{"begin", data.begin},
            {"end", data.end},
            {"view", {view.begin, view.end}},
            {"run_end", end},
            {"kinds", kKinds},
            {"ranks", Json::array()},
            {"steps", steps_of(summary, page)}};
  for (const auto& [rank, events] : run.ranks) {
    Json steps = Json::array();
    for (const double step : events.steps) steps.push_back(rounded(step));
    Json lanes = spans.of(rank);
    if (!lanes.empty()) page.ranks.insert(rank);
    json["ranks"].push_back(
        {{"rank", rank}, {"name", events.name}, {"steps", steps}, {"lanes", lanes}});
  }
  json["names"] = spans.names();
  page.kinds = spans.kinds();
  page.joined_below = spans.joined_below();
  page.json = in_a_script(json.dump(-1, ' ', false, Json::error_handler_t::replace));
  return page;
}

}  // namespace weft::tools
