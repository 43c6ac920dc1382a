#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include <weft/base/error.h>
#include <weft/profiling/tools/page.h>

namespace weft::tools {

namespace {

constexpr double kWidth = 1100;
constexpr double kLeft = 150;  // of it, for the rows' names
constexpr double kRow = 16;
constexpr std::size_t kMostSpans = 20'000;

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

// Of microseconds; "–" for what was not recorded.
std::string milliseconds(double time, int digits) { return std::isnan(time) ? "–" : number(time / 1e3, digits) + " ms"; }

const char* color_of(const std::string& kind) {
  static const std::map<std::string, const char*> colors{
      {"collective", "#3b76c4"}, {"send", "#d97706"},      {"receive", "#b45309"},
      {"call", "#0f766e"},       {"served", "#15803d"},    {"backward", "#7c3aed"},
      {"gradient", "#a21caf"},   {"reference", "#6b7280"}, {"meeting", "#1d4ed8"}};
  const auto found = colors.find(kind);
  return found == colors.end() ? "#9ca3af" : found->second;
}

std::string rectangle(double x, double y, double width, double height, const char* color, const std::string& shown) {
  return "<rect x=\"" + number(x) + "\" y=\"" + number(y) + "\" width=\"" + number(std::max(width, 0.4)) + "\" height=\"" +
         number(height) + "\" fill=\"" + color + "\"><title>" + escaped(shown) + "</title></rect>\n";
}

std::string text_at(double x, double y, const std::string& text, const char* anchor = "start") {
  return "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" text-anchor=\"" + anchor + "\">" + escaped(text) +
         "</text>\n";
}

// A bar for each step and rank: compute, then what was exposed.
std::string step_bars(const Summary& summary) {
  constexpr std::size_t kShown = 60;
  double longest = 0;
  const std::size_t first = summary.steps.size() > kShown ? summary.steps.size() - kShown : 0;
  for (std::size_t i = first; i < summary.steps.size(); ++i) {
    for (const auto& [rank, times] : summary.steps[i].ranks) {
      if (i > 0 || summary.steps.size() == 1) longest = std::max(longest, times.total);
    }
  }
  if (longest <= 0) return "";
  constexpr double kBar = 7;
  std::string body;
  double y = 4;
  for (std::size_t i = first; i < summary.steps.size(); ++i) {
    body += text_at(kLeft - 6, y + kBar, "step " + std::to_string(summary.steps[i].number), "end");
    for (const auto& [rank, times] : summary.steps[i].ranks) {
      const double scale = (kWidth - kLeft) / longest;
      const double whole = std::min(times.total, longest) * scale;  // the first step may be far longer
      const bool is_split = times.total > 0 && !std::isnan(times.compute);
      const double compute = is_split ? whole * times.compute / times.total : 0;
      const std::string shown = "step " + std::to_string(summary.steps[i].number) + ", rank " + std::to_string(rank) +
                                ": " + milliseconds(times.total, 2) + ", compute " + milliseconds(times.compute, 2) +
                                ", exposed " + milliseconds(times.exposed, 2) + ", waiting " +
                                milliseconds(times.waiting, 2);
      body += rectangle(kLeft, y, compute, kBar, "#64748b", shown) +
              rectangle(kLeft + compute, y, whole - compute, kBar, is_split ? "#dc2626" : "#9ca3af", shown);
      y += kBar + 1;
    }
    y += 3;
  }
  return "<svg class=\"steps\" viewBox=\"0 0 " + number(kWidth) + " " + number(y + 4) + "\">\n" + body + "</svg>\n";
}

class Lanes {
 public:
  Lanes(const Run& run, const Window& window)
      : run_(run), window_(window), scale_((kWidth - kLeft) / std::max(1e-9, window.end - window.begin)) {}

  std::string draw() {
    choose_most();
    for (const auto& [rank, events] : run_.ranks) {
      body_ += "<text class=\"rank\" x=\"0\" y=\"" + number(y_ + 12) + "\">" + escaped(events.name) + "</text>\n";
      y_ += kRow + 2;
      draw_marks(events);
      std::map<int, std::vector<const Span*>> rows;
      for (const Span& span : events.ranges) rows[span.row].push_back(&span);
      for (const Span& span : events.operations) rows[span.row].push_back(&span);
      for (const auto& [row, spans] : rows)
        draw_row(events.rows.contains(row) ? events.rows.at(row) : std::to_string(row), spans);
      y_ += 8;
    }
    draw_scale();
    std::string left_out = cut_ ? "<p>Only the first " + std::to_string(most_) +
                                      " spans of a row are drawn; --from and --to choose a shorter time.</p>\n"
                                : "";
    return left_out + "<svg class=\"lanes\" viewBox=\"0 0 " + number(kWidth) + " " + number(y_ + 20) + "\">\n" + body_ +
           "</svg>\n";
  }

 private:
  double x(double time) const { return kLeft + (std::clamp(time, window_.begin, window_.end) - window_.begin) * scale_; }

  bool is_shown(const Span& span) const { return span.end >= window_.begin && span.begin <= window_.end; }

  // Of each row so many that all rows have no more than kMostSpans: ranks and kinds that have few keep theirs.
  void choose_most() {
    std::map<std::pair<int, int>, std::size_t> spans_of;  // by rank and row
    for (const auto& [rank, events] : run_.ranks) {
      for (const Span& span : events.ranges) spans_of[{rank, span.row}] += is_shown(span) ? 1 : 0;
      for (const Span& span : events.operations) spans_of[{rank, span.row}] += is_shown(span) ? 1 : 0;
    }
    std::vector<std::size_t> counts;
    for (const auto& [row, count] : spans_of) counts.push_back(count);
    std::sort(counts.begin(), counts.end());
    std::size_t left = kMostSpans;
    most_ = kMostSpans;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      most_ = std::max<std::size_t>(1, left / (counts.size() - i));
      if (counts[i] > most_) return;
      left -= counts[i];
      most_ = kMostSpans;
    }
  }

  void draw_marks(const RankRun& events) {
    for (const double step : events.steps) {
      if (step >= window_.begin && step <= window_.end) body_ += rectangle(x(step), y_ - kRow, 1, kRow, "#111827", "step");
    }
  }

  void draw_row(const std::string& name, const std::vector<const Span*>& spans) {
    std::size_t drawn = 0;
    std::string body;
    for (const Span* span : spans) {
      if (!is_shown(*span)) continue;
      if (drawn >= most_) {
        cut_ = true;
        break;
      }
      ++drawn;
      std::string shown = span->name + (span->sequence > 0 ? " #" + std::to_string(span->sequence) : "") + ": " +
                          number((span->end - span->begin) / 1e3, 3) + " ms from " + number(span->begin / 1e3, 3) + " ms";
      if (span->bytes > 0) shown += ", " + std::to_string(span->bytes) + " bytes";
      if (span->peer >= 0) shown += ", rank " + std::to_string(span->peer);
      const bool is_bad = span->state == "failed" || span->state == "unfinished";
      body += rectangle(x(span->begin), y_ + 2, x(span->end) - x(span->begin), kRow - 4,
                        is_bad                 ? "#dc2626"
                        : span->name == "wait" ? "#fca5a5"
                                               : color_of(span->kind),
                        shown);
    }
    if (drawn == 0) return;
    body_ += text_at(kLeft - 6, y_ + 12, name, "end") + body;
    y_ += kRow;
  }

  void draw_scale() {
    for (int i = 0; i <= 10; ++i) {
      const double time = window_.begin + (window_.end - window_.begin) * i / 10;
      body_ += text_at(std::min(x(time), kWidth - 4), y_ + 14, number(time / 1e3, 1) + " ms", i == 10 ? "end" : "middle");
    }
  }

  const Run& run_;
  const Window window_;
  const double scale_;
  std::string body_;
  double y_ = 4;
  std::size_t most_ = kMostSpans;  // of a row
  bool cut_ = false;
};

std::string table(const Summary& summary) {
  std::string text = "<table><tr><th>rank</th><th>" + std::string(summary.marked ? "mean step" : "run") +
                     "</th><th>compute</th><th>communication</th><th>exposed</th><th>share</"
                     "th><th>waiting</th><th>last to begin</th></tr>\n";
  for (const auto& [rank, times] : summary.ranks) {
    text += "<tr><td>" + std::to_string(rank) + "</td>";
    for (const double time : {times.total, times.compute, times.communication, times.exposed})
      text += "<td>" + milliseconds(time, 3) + "</td>";
    const double share = times.total > 0 ? 100 * times.exposed / times.total : 0;
    text += "<td>" + (std::isnan(share) ? "–" : number(share, 1) + " %") + "</td><td>" + number(times.waiting / 1e3, 3) +
            " ms</td><td>" + std::to_string(summary.last.contains(rank) ? summary.last.at(rank) : 0) + " of " +
            std::to_string(summary.collectives) + "</td></tr>\n";
  }
  return text + "</table>\n";
}

double end_of(const Run& run) {
  double end = 0;
  for (const auto& [rank, events] : run.ranks) end = std::max(end, events.end);
  return end;
}

constexpr const char* kStyle = R"(
body { font: 14px system-ui, sans-serif; margin: 24px; color: #111827; background: #fff; max-width: 1180px }
h1 { font-size: 20px } h2 { font-size: 16px; margin-top: 28px }
table { border-collapse: collapse } th, td { padding: 4px 12px; text-align: right; border-bottom: 1px solid #e5e7eb }
svg { width: 100%; background: #f9fafb; border: 1px solid #e5e7eb } svg text { font: 9px system-ui, sans-serif; fill: #374151 }
svg text.rank { font-weight: bold; font-size: 11px } pre { background: #f9fafb; padding: 12px }
)";

}  // namespace

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
  if (end_ms <= 0) throw Error(Blame::Caller, "the run is empty: no rank has recorded anything that takes time");
  Window window = middle_steps(run);
  if (from_ms && !to_ms) window.end = end_of(run);
  if (to_ms && !from_ms) window.begin = 0;
  const auto choose = [&](const char* option, std::optional<double> given, double& place) {
    if (!given) return;
    if (!std::isfinite(*given) || *given < 0) {
      throw Error(Blame::Caller, std::string(option) + " is " + number(*given) + "; it is a millisecond of the run, 0 to " +
                                     number(end_ms));
    }
    place = *given * 1e3;
  };
  choose("--from", from_ms, window.begin);
  choose("--to", to_ms, window.end);
  if (window.begin >= end_of(run) && from_ms)
    throw Error(Blame::Caller, "--from is " + number(*from_ms) + ", and the run ended after " + number(end_ms) + " ms");
  if (window.end <= window.begin)
    throw Error(Blame::Caller, "--from and --to leave no time between them (the run has " + number(end_ms) + " ms)");
  return window;
}

std::string to_html(const Run& run, const Summary& summary, const Window& window, const std::string& title) {
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>" + escaped(title) + "</title><style>" +
         kStyle + "</style></head><body>\n<h1>" + escaped(title) + "</h1>\n" + table(summary) +
         (summary.marked ? "<h2>Steps: compute (grey) and exposed communication (red)</h2>\n" + step_bars(summary) : "") +
         "<h2>Ranks from " + number(window.begin / 1e3, 1) + " to " + number(window.end / 1e3, 1) + " ms</h2>\n" +
         Lanes(run, window).draw() + "<h2>Summary</h2>\n<pre>" + escaped(to_text(run, summary)) +
         "</pre>\n</body></html>\n";
}

}  // namespace weft::tools
