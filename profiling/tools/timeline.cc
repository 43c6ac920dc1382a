// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include <weft/base/error.h>
#include <weft/profiling/tools/json_file.h>
#include <weft/profiling/tools/timeline.h>

namespace weft::tools {

namespace {

constexpr int kLeastInt = std::numeric_limits<int>::min();

const FileKind& timeline_file() {
  static const FileKind kind{"timeline of Weft", "WEFT_TIMELINE=run.json makes one",
                             "\"traceEvents\"", std::uintmax_t{4} << 30};
  return kind;
}

int int_or(const Json& object, const char* name, int otherwise) {
  return object.is_object() && object.contains(name) ? int_of(object, name, kLeastInt) : otherwise;
}

std::uint64_t word_or_none(const Json& object, const char* name) {
  return object.is_object() && object.contains(name) ? word_of(object, name) : 0;
}

void take_span(const Json& event, RankRun& rank) {
  const Json& args = field(event, "args");
  Span span;
  span.begin = number_of(event, "ts");
  span.end = span.begin + number_of(event, "dur");
  span.name = text_of(event, "name");
  span.kind = text_of(event, "cat");
  span.group = text_or_none(args, args.contains("group") ? "group" : "agent");
  span.generation = int_or(args, "generation", 0);
  span.sequence = word_or_none(args, "sequence");
  span.rank = int_or(args, "rank", -1);
  span.peer = int_or(args, "peer", -1);
  span.tag = int_or(args, "tag", 0);
  span.bytes = word_or_none(args, "bytes");
  span.state = text_or_none(args, "state");
  span.called_by = text_or_none(args, "called_by");
  span.row = int_of(event, "tid", kLeastInt);
  rank.end = std::max(rank.end, span.end);
  rank.operations.push_back(std::move(span));
}

class Reader {
 public:
  void take(const Json& event) {
    const std::string phase = text_of(event, "ph");
    if (phase == "s" || phase == "f") return;
    const int pid = int_of(event, "pid", kLeastInt);
    RankRun& rank = run_.ranks[pid];
    const int row = int_of(event, "tid", kLeastInt);
    if (phase == "M") {
      const std::string what = text_of(event, "name");
      if (what == "process_name") rank.name = text_of(field(event, "args"), "name");
      if (what == "thread_name") rank.rows[row] = text_of(field(event, "args"), "name");
      return;
    }
    if (phase == "X") return take_span(event, rank);
    const double time = number_of(event, "ts");
    rank.end = std::max(rank.end, time);
    auto& open = open_[{pid, row}];
    if (phase == "i" && text_of(event, "name") == "step") rank.steps.push_back(time);
    if (phase == "B") {
      Span span;
      span.begin = time;
      span.name = text_of(event, "name");
      span.kind = text_of(event, "cat");
      span.row = row;
      open.push_back(std::move(span));
    } else if (phase == "E" && !open.empty()) {
      open.back().end = time;
      rank.ranges.push_back(std::move(open.back()));
      open.pop_back();
    }
  }

  Run finish(const Json& about) {
    for (const Json& rank : list_of(about, "ranks")) {
      const int number = int_of(rank, "rank", kLeastInt);
      run_.lost += word_of(rank, "events_lost");
      if (!flag_of(rank, "ended_in_order")) run_.cut.push_back(number);
      run_.ranks[number].clock_error = number_of(rank, "clock_error_ns") / 1000;
      run_.ranks[number].clock_again =
          rank.contains("clock_measured_again") && flag_of(rank, "clock_measured_again");
      run_.ranks[number].has_ranges = !rank.contains("ranges") || flag_of(rank, "ranges");
    }
    for (auto& [number, rank] : run_.ranks) {
      const auto earlier = [](const Span& a, const Span& b) { return a.begin < b.begin; };
      std::sort(rank.operations.begin(), rank.operations.end(), earlier);
      std::sort(rank.ranges.begin(), rank.ranges.end(), earlier);
      std::sort(rank.steps.begin(), rank.steps.end());
    }
    return std::move(run_);
  }

 private:
  Run run_;
  std::map<std::pair<int, int>, std::vector<Span>> open_;
};

}  // namespace

Run read_run(const std::string& file) {
  const Json json = read_json(file, timeline_file());
  const auto about = json.find("otherData");
  const bool has_form = about != json.end() && about->is_object();
  require_form(file, timeline_file(), has_form ? about->value("weft", Json()) : Json(),
               "timeline 1");
  try {
    Reader reader;
    for (const Json& event : list_of(json, "traceEvents")) reader.take(event);
    return reader.finish(*about);
  } catch (const Error& error) {
    throw error.within("'" + file + "' is damaged");
  }
}

}  // namespace weft::tools
