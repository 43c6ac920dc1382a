// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>

#include <weft/base/error.h>
#include <weft/profiling/tools/html_report.h>
#include <weft/profiling/tools/html_report_data.h>
#include <weft/profiling/tools/page_assets.h>

namespace weft::tools {

namespace {

constexpr std::size_t kMostSpans = 150'000;  // about 8 MB of the page

std::string escaped(const std::string& text) {
  std::string result;
  for (const char letter : text) {
    switch (letter) {
      case '&': result += "&amp;"; break;
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '"': result += "&quot;"; break;
      default: result += letter;
    }
  }
  return result;
}

std::string number(double value, int digits = 2) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// Formats microseconds; "–" if the time was not recorded.
std::string milliseconds(double time, int digits) {
  return std::isnan(time) ? "–" : number(time / 1e3, digits) + " ms";
}

std::string counted(std::size_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string table(const Summary& summary) {
  std::string text = "<div class=\"wide\"><table><tr><th>rank</th><th>" +
                     std::string(summary.marked ? "mean step" : "run") +
                     "</th><th>compute</th><th>communication</th><th>exposed</th><th>share</"
                     "th><th>waiting</th><th>last to begin</th></tr>\n";
  for (const auto& [rank, times] : summary.ranks) {
    text += "<tr><th scope=\"row\">" + std::to_string(rank) + "</th>";
    for (const double time : {times.total, times.compute, times.communication, times.exposed})
      text += "<td>" + milliseconds(time, 3) + "</td>";
    const double share = times.total > 0 ? 100 * times.exposed / times.total : 0;
    text += "<td>" + (std::isnan(share) ? "–" : number(share, 1) + " %") + "</td><td>" +
            number(times.waiting / 1e3, 3) + " ms</td><td>" +
            std::to_string(summary.last.contains(rank) ? summary.last.at(rank) : 0) + " of " +
            std::to_string(summary.collectives) + "</td></tr>\n";
  }
  return text + "</table></div>\n";
}

double end_of(const Run& run) {
  double end = 0;
  for (const auto& [rank, events] : run.ranks) end = std::max(end, events.end);
  return end;
}

std::string legend_entry(const std::string& color, const std::string& text) {
  return "<li><i style=\"background:var(--" + color + ")\"></i>" + text + "</li>";
}

std::string lanes_legend(const PageData& data) {
  static const std::map<std::string, const char*> texts{
      {"backward", "backward pass"},
      {"call", "call, at the caller"},
      {"collective", "collective"},
      {"device", "GPU: kernels and copies of Weft"},
      {"failed", "failed or unfinished"},
      {"gradient", "gradient between workers"},
      {"meeting", "meeting over the store"},
      {"range", "thread: other ranges"},
      {"receive", "receive"},
      {"reference", "reference (RRef)"},
      {"send", "send"},
      {"served", "call, at the callee"},
      {"wait", "thread or stream: waiting"},
      {"working", "thread: working for others"}};
  std::string text = "<ul class=\"legend\">";
  for (const std::string& kind : data.kinds) text += legend_entry(kind, texts.at(kind));
  return text + legend_entry("mark", "a step begins") + "</ul>\n";
}

std::string canvas(const std::string& id, const std::string& what) {
  return "<canvas id=\"" + id + "\" tabindex=\"0\" role=\"img\" aria-label=\"" + escaped(what) +
         "\" aria-describedby=\"picked\"></canvas>\n";
}

std::string steps_section(const Summary& summary, const PageData& data) {
  if (!summary.marked || summary.steps.empty()) return "";
  std::set<int> ranks;
  bool is_recorded = true;
  for (const Step& step : summary.steps) {
    for (const auto& [rank, times] : step.ranks) {
      ranks.insert(rank);
      is_recorded = is_recorded && !std::isnan(times.exposed);
    }
  }
  std::string text =
      "<h2>Steps</h2>\n<p>All " + counted(summary.steps.size(), "step") +
      ", in their order, for each rank. The height of a bar is the time of its step in ms";
  if (data.steps_per_bar > 1)
    text += "; each bar is the mean of " + std::to_string(data.steps_per_bar) + " steps";
  text += ". Where there are more bars than pixels, a pixel shows their mean.";
  if (data.clipped_bars > 0) {
    text += " The axis covers most steps: " + counted(data.clipped_bars, "step") +
            " of the ranks together reach" + (data.clipped_bars == 1 ? "es" : "") +
            " beyond it, which a mark on top shows.";
  }
  text += "</p>\n<ul class=\"legend\">" + legend_entry("compute", "compute") +
          legend_entry("exposed", "exposed: waiting for other ranks") +
          (is_recorded ? "" : legend_entry("unsplit", "not recorded: compute or exposed")) +
          "</ul>\n<p class=\"muted\">Click a bar to see its step below. Ctrl and wheel zoom, a "
          "drag moves, shift and drag "
          "choose a part. Keys: <kbd>←</kbd> <kbd>→</kbd> a bar, <kbd>Enter</kbd> its step below, "
          "<kbd>+</kbd> "
          "<kbd>-</kbd> zoom, <kbd>Home</kbd> all.</p>\n";
  for (const int rank : ranks)
    text += canvas("steps" + std::to_string(rank),
                   "time of each step of rank " + std::to_string(rank) + ", in ms");
  return text;
}

std::string lanes_section(const Run& run, const PageData& data, const Window& window) {
  std::string text = "<h2>Lanes</h2>\n<p id=\"shown\"></p>\n";
  if (window.begin > 0 || window.end < whole(run).end) {
    text += "<p>The page has the spans from " + milliseconds(window.begin, 3) + " to " +
            milliseconds(window.end, 3) + " of the run's " + milliseconds(whole(run).end, 3) +
            ", as chosen by --from and --to.</p>\n";
  }
  if (data.joined_below > 0) {
    text += "<p>There are too many spans to draw each: spans shorter than " +
            milliseconds(data.joined_below, 3) +
            " with shorter gaps between them are drawn as one, with their number. --from and --to "
            "of weft-timeline choose a shorter time, in which each is drawn.</p>\n";
  }
  text += R"(<div class="bar">
<button id="closer" aria-label="zoom in">+</button>)"
          R"(<button id="wider" aria-label="zoom out">−</button>
<button id="earlier" aria-label="earlier">◀</button><button id="later" aria-label="later">▶</button>
<button id="before">previous step</button><button id="after">next step</button>)"
          R"(<button id="whole">all of it</button></div>
<p class="muted">Ctrl and wheel zoom, a drag moves, shift and drag choose a part, )"
          R"(a click chooses a span. Keys, in a lane:
<kbd>←</kbd> <kbd>→</kbd> move, <kbd>+</kbd> <kbd>-</kbd> zoom, <kbd>Home</kbd> all, <kbd>[</kbd> <kbd>]</kbd> step,
<kbd>,</kbd> <kbd>.</kbd> span, <kbd>&lt;</kbd> <kbd>&gt;</kbd> row.</p>
)";
  text += lanes_legend(data) + canvas("axis", "time in ms");
  for (const auto& [rank, events] : run.ranks) {
    const std::string title = events.name.empty() ? "rank " + std::to_string(rank) : events.name;
    text += "<details open><summary><h3>" + escaped(title) + "</h3></summary>\n" +
            (data.ranks.contains(rank) ? canvas("rank" + std::to_string(rank), "lanes of " + title)
                                       : "<p>This rank has recorded nothing in this time.</p>\n") +
            "</details>\n";
  }
  return text +
         "<div id=\"picked\" role=\"status\" aria-live=\"polite\">Nothing is chosen.</div>\n";
}

std::string heading(const Run& run, const Summary& summary) {
  return "<p>" + counted(run.ranks.size(), "rank") + ", " +
         (summary.marked ? counted(summary.steps.size(), "step") : std::string("no marked steps")) +
         ", " + counted(summary.collectives, "collective") + ", " +
         milliseconds(whole(run).end, 3) + ".</p>\n";
}

}  // namespace

Window whole(const Run& run) { return {0, end_of(run)}; }

Window middle_steps(const Run& run) {
  constexpr std::size_t kShown = 5;
  Window window{0, end_of(run)};
  for (const auto& [rank, events] : run.ranks) {
    if (events.steps.size() < 2) continue;
    const std::size_t first = events.steps.size() > kShown ? (events.steps.size() - kShown) / 2 : 0;
    window.begin = events.steps[first];
    if (first + kShown < events.steps.size()) window.end = events.steps[first + kShown];
    break;
  }
  return window;
}

Window window_of(const Run& run, std::optional<double> from_ms, std::optional<double> to_ms) {
  const double end_ms = end_of(run) / 1e3;
  if (end_ms <= 0)
    throw Error(Blame::Caller, "the run is empty: no rank has recorded anything that takes time");
  Window window = middle_steps(run);
  if (from_ms && !to_ms) window.end = end_of(run);
  if (to_ms && !from_ms) window.begin = 0;
  const auto choose = [&](const char* option, std::optional<double> given, double& place) {
    if (!given) return;
    if (!std::isfinite(*given) || *given < 0) {
      throw Error(Blame::Caller, std::string(option) + " is " + number(*given) +
                                     "; it takes a millisecond of the run, 0 to " + number(end_ms));
    }
    place = *given * 1e3;
  };
  choose("--from", from_ms, window.begin);
  choose("--to", to_ms, window.end);
  if (window.begin >= end_of(run) && from_ms)
    throw Error(Blame::Caller, "--from is " + number(*from_ms) + ", and the run ended after " +
                                   number(end_ms) + " ms");
  if (window.end <= window.begin)
    throw Error(Blame::Caller, "--from and --to leave no time between them (the run has " +
                                   number(end_ms) + " ms)");
  return window;
}

std::string to_html(const Run& run, const Summary& summary, const Window& data, const Window& view,
                    const std::string& title) {
  const PageData drawn = page_data(run, summary, data, view, kMostSpans);
  // The content security policy ensures that no name in the timeline can make the page fetch
  // anything.
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
         "content=\"width=device-width, initial-scale=1\"><meta "
         "http-equiv=\"Content-Security-Policy\" "
         "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src "
         "'unsafe-inline'\"><title>" +
         escaped(title) + "</title><style>\n" + kPageStyle + "</style></head><body>\n<h1>" +
         escaped(title) + "</h1>\n" + heading(run, summary) +
         "<noscript><p>The drawings need scripts; the tables do not.</p></noscript>\n" +
         table(summary) + steps_section(summary, drawn) + lanes_section(run, drawn, data) +
         "<h2>Summary</h2>\n<pre>" + escaped(to_text(run, summary)) +
         "</pre>\n<div id=\"tip\"></div>\n<script type=\"application/json\" id=\"data\">" +
         drawn.json + "</script>\n<script>\n" + kPageScript + "</script>\n</body></html>\n";
}

}  // namespace weft::tools
