#include <algorithm>
#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include <weft/base/error.h>
#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

namespace {

using Json = nlohmann::json;

constexpr std::uintmax_t kMostBytes = 256u << 20;

Json read_file(const std::string& path) {
  std::error_code failure;
  const auto bytes = std::filesystem::file_size(path, failure);
  if (failure) throw Error(Blame::Caller, "'" + path + "' cannot be read: " + failure.message());
  if (bytes > kMostBytes)
    throw Error(Blame::Caller, "'" + path + "' has " + std::to_string(bytes) + " bytes; no dump is that large");
  std::ifstream file(path);
  Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object() || json.value("weft", "") != "flight recorder 1") {
    throw Error(Blame::Caller,
                "'" + path + "' is no dump of a flight recorder; they are made in WEFT_DUMP_DIR, and by dump()");
  }
  return json;
}

Record record_of(const Json& json, std::int64_t to_calendar) {
  Record record;
  record.kind = json.at("kind");
  record.state = json.at("state");
  record.name = json.at("name");
  record.sequence = json.at("sequence");
  record.peer = json.at("peer");
  record.tag = json.at("tag");
  record.bytes = json.at("bytes");
  record.dtype = json.at("dtype");
  record.shape = json.at("shape").get<std::vector<std::int64_t>>();
  record.begun = json.at("begun").get<std::int64_t>() + to_calendar;
  const std::int64_t ended = json.at("ended");
  record.ended = ended == 0 ? 0 : ended + to_calendar;
  record.blame = json.value("blame", "");
  record.error = json.value("error", "");
  return record;
}

struct Loaded {
  Dump dump;
  Json json;
};

void take(const Loaded& loaded, std::size_t number, Dumps& into) {
  const Json& json = loaded.json;
  const std::int64_t to_calendar = loaded.dump.time - json.at("time").get<std::int64_t>();
  std::map<int, View*> views;
  for (const Json& party : json.at("parties")) {
    View* view = nullptr;
    const int rank = party.at("rank");
    if (party.at("kind") == "agent") {
      view = &into.agents[rank];
      view->job_rank = rank;
    } else {
      const std::string name = party.at("name");
      const std::uint32_t generation = party.at("generation");
      auto found = std::find_if(into.groups.begin(), into.groups.end(),
                                [&](const Group& group) { return group.name == name && group.generation == generation; });
      if (found == into.groups.end()) {
        into.groups.push_back({name, generation, party.at("ranks"), {}});
        found = std::prev(into.groups.end());
      }
      view = &found->views[rank];
      const bool is_member = rank >= 0 && static_cast<std::size_t>(rank) < found->ranks.size();
      view->job_rank = is_member ? found->ranks[static_cast<std::size_t>(rank)] : rank;
    }
    view->dump = number;
    view->rank = rank;
    views[party.at("party")] = view;
  }
  for (const Json& record : json.at("records")) {
    const auto found = views.find(record.at("party"));
    if (found != views.end()) found->second->records.push_back(record_of(record, to_calendar));
  }
}

}  // namespace

Dumps read_dumps(const std::vector<std::string>& files) {
  std::map<std::pair<std::string, std::int64_t>, Loaded> newest;
  for (const std::string& path : files) {
    Loaded loaded{{}, read_file(path)};
    try {
      loaded.dump = {path, loaded.json.at("host"), loaded.json.at("pid"), loaded.json.at("wall_clock"),
                     loaded.json.at("reason")};
    } catch (const Json::exception& error) {
      throw Error(Blame::Caller, "'" + path + "': " + error.what());
    }
    auto& place = newest[{loaded.dump.host, loaded.dump.pid}];
    if (place.json.is_null() || place.dump.time < loaded.dump.time) place = std::move(loaded);
  }
  Dumps dumps;
  std::vector<const Loaded*> in_order;
  for (const auto& [process, loaded] : newest) in_order.push_back(&loaded);
  for (const Loaded* loaded : in_order) {
    try {
      take(*loaded, dumps.dumps.size(), dumps);
    } catch (const Json::exception& error) {
      throw Error(Blame::Caller, "'" + loaded->dump.file + "': " + error.what());
    }
    dumps.dumps.push_back(loaded->dump);
  }
  return dumps;
}

std::string tensor_of(const Record& record) {
  if (record.dtype.empty()) return "";
  std::string text = record.dtype + " [";
  for (std::size_t i = 0; i < record.shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(record.shape[i]);
  return text + "]";
}

}  // namespace weft::tools
