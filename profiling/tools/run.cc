#include <algorithm>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include <weft/base/error.h>
#include <weft/profiling/tools/run.h>

namespace weft::tools {

namespace {

using Json = nlohmann::json;

constexpr std::uintmax_t kMostBytes = std::uintmax_t{4} << 30;

void take_span(const Json& event, RankRun& rank) {
  const Json& args = event.at("args");
  Span span;
  span.begin = event.at("ts");
  span.end = span.begin + event.at("dur").get<double>();
  span.name = event.at("name");
  span.kind = event.at("cat");
  span.group = args.value("group", args.value("agent", ""));
  span.generation = args.value("generation", 0);
  span.sequence = args.value("sequence", std::uint64_t{0});
  span.rank = args.value("rank", -1);
  span.peer = args.value("peer", -1);
  span.tag = args.value("tag", 0);
  span.bytes = args.value("bytes", std::uint64_t{0});
  span.state = args.value("state", "");
  span.row = event.at("tid");
  rank.end = std::max(rank.end, span.end);
  rank.operations.push_back(std::move(span));
}

class Reader {
 public:
  void take(const Json& event) {
    const std::string& phase = event.at("ph").get_ref<const std::string&>();
    if (phase == "s" || phase == "f") return;
    const int pid = event.at("pid");
    RankRun& rank = run_.ranks[pid];
    const int row = event.at("tid");
    if (phase == "M") {
      const std::string& what = event.at("name").get_ref<const std::string&>();
      if (what == "process_name") rank.name = event.at("args").at("name");
      if (what == "thread_name") rank.rows[row] = event.at("args").at("name");
      return;
    }
    if (phase == "X") return take_span(event, rank);
    const double time = event.at("ts");
    rank.end = std::max(rank.end, time);
    auto& open = open_[{pid, row}];
    if (phase == "i" && event.at("name") == "step") rank.steps.push_back(time);
    if (phase == "B") {
      Span span;
      span.begin = time;
      span.name = event.at("name");
      span.kind = event.at("cat");
      span.row = row;
      open.push_back(std::move(span));
    } else if (phase == "E" && !open.empty()) {
      open.back().end = time;
      rank.ranges.push_back(std::move(open.back()));
      open.pop_back();
    }
  }

  Run finish(const Json& about) {
    for (const Json& rank : about.at("ranks")) {
      run_.lost += rank.at("events_lost").get<std::uint64_t>();
      if (!rank.at("ended_in_order").get<bool>()) run_.cut.push_back(rank.at("rank"));
      run_.ranks[rank.at("rank")].clock_error = rank.at("clock_error_ns").get<double>() / 1000;
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
  const auto refuse = [&](const std::string& why) { return Error(Blame::Caller, "'" + file + "' " + why); };
  std::error_code failure;
  const auto bytes = std::filesystem::file_size(file, failure);
  if (failure) throw refuse("cannot be read: " + failure.message());
  if (bytes > kMostBytes) throw refuse("has " + std::to_string(bytes) + " bytes, which is more than this program takes");
  std::ifstream stream(file);
  const Json json = Json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object() || !json.contains("otherData") ||
      json["otherData"].value("weft", "") != "timeline 1") {
    throw refuse("is no timeline of Weft; WEFT_TIMELINE=run.json makes one");
  }
  try {
    Reader reader;
    for (const Json& event : json.at("traceEvents")) reader.take(event);
    return reader.finish(json.at("otherData"));
  } catch (const Json::exception& error) {
    throw refuse(std::string("is damaged: ") + error.what());
  }
}

}  // namespace weft::tools
