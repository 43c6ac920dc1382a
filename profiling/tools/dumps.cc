// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <tuple>
#include <type_traits>

#include <weft/base/error.h>
#include <weft/profiling/tools/dumps.h>
#include <weft/profiling/tools/generations.h>
#include <weft/profiling/tools/job_check.h>
#include <weft/profiling/tools/json_file.h>
#include <weft/profiling/trace/flight_recorder.h>

namespace weft::tools {

namespace {

// Nanoseconds, until 2096: differences of such times do not overflow.
constexpr std::int64_t kMostTime = 4'000'000'000'000'000'000;

const FileKind& dump_file() {
  static const FileKind kind{"dump of a flight recorder",
                             "dumps are written to WEFT_DUMP_DIR, and made by dump()",
                             "flight recorder 1", std::uintmax_t{256} << 20};
  return kind;
}

Json read_file(const std::string& path) {
  Json json = read_json(path, dump_file());
  require_form(path, dump_file(), json.value("weft", Json()), dump_file().mark);
  return json;
}

std::vector<std::int64_t> shape_of(const Json& json) {
  std::vector<std::int64_t> shape;
  for (const Json& extent : list_of(json, "shape")) {
    if (!extent.is_number_integer())
      throw Error(Blame::Caller, "the shape of a tensor is " + json["shape"].dump());
    shape.push_back(extent.get<std::int64_t>());
  }
  return shape;
}

// `now` is when the dump was made, by the clock of the record; `to_calendar` converts to calendar
// time.
Record record_of(const Json& json, std::int64_t now, std::int64_t to_calendar) {
  Record record;
  record.kind = text_of(json, "kind");
  record.state = text_of(json, "state");
  record.runs = !json.contains("runs") || json.at("runs") == 1;
  record.name = text_of(json, "name");
  record.sequence = word_of(json, "sequence");
  record.peer = int_of(json, "peer", std::numeric_limits<int>::min());
  record.tag = int_of(json, "tag", std::numeric_limits<int>::min());
  record.bytes = word_of(json, "bytes");
  record.dtype = text_of(json, "dtype");
  record.shape = shape_of(json);
  record.reduction = text_or_none(json, "reduction");
  record.called_by = text_or_none(json, "called_by");
  const std::int64_t begun = integer_of(json, "begun", 0, now);
  const std::int64_t ended = integer_of(json, "ended", 0, now);
  if (ended != 0 && ended < begun)
    throw Error(Blame::Caller, "an operation in it ended before it began");
  record.begun = begun + to_calendar;
  record.ended = ended == 0 ? 0 : ended + to_calendar;
  record.blame = text_or_none(json, "blame");
  record.error = text_or_none(json, "error");
  return record;
}

std::uint64_t ticket_of(const Json& record) {
  return record.is_object() && record.contains("ticket") ? word_of(record, "ticket") : 0;
}

// Of the last operations that fit into the ring, none has been overwritten: returns the oldest of
// them, or null if there were no more operations than that. (Older records in the ring are of
// operations that are or were until lately open: the ring skipped them.)
const Json* oldest_of_the_last(const Json& records) {
  std::uint64_t last = 0;
  for (const Json& record : records) last = std::max(last, ticket_of(record));
  if (last <= trace::kRecords) return nullptr;
  const auto oldest = std::find_if(records.begin(), records.end(), [&](const Json& record) {
    return ticket_of(record) > last - trace::kRecords;
  });
  return &*oldest;
}

// Returns the members of a group as ranks of the job; `rank` must be one of them.
std::vector<int> members_of(const Json& party, int rank) {
  std::vector<int> ranks;
  std::set<int> seen;
  for (const Json& member : list_of(party, "ranks")) {
    const bool is_rank =
        member.is_number_unsigned() && member.get<std::uint64_t>() <= std::uint64_t{kMostInt};
    const int one = is_rank ? member.get<int>() : -1;
    if (!is_rank || !seen.insert(one).second)
      throw Error(Blame::Caller, "the ranks of a group are " + party["ranks"].dump());
    ranks.push_back(one);
  }
  if (static_cast<std::size_t>(rank) >= ranks.size())
    throw Error(Blame::Caller, "a group of " + std::to_string(ranks.size()) + " has a rank " +
                                   std::to_string(rank));
  return ranks;
}

struct Loaded {
  Dump dump;
  Json json;
};

struct GroupParty {
  std::string name;
  int rank;
  std::vector<int> ranks;
  std::uint32_t generation;  // as its own process counts
};

GroupParty group_party_of(const Json& party) {
  const int rank = int_of(party, "rank", 0);
  const std::int64_t generation =
      integer_of(party, "generation", 0, std::int64_t{std::numeric_limits<std::uint32_t>::max()});
  return {text_of(party, "name"), rank, members_of(party, rank),
          static_cast<std::uint32_t>(generation)};
}

void add_generations(const Loaded& loaded, std::size_t number, Generations& generations) {
  generations.add_process(number, loaded.dump.jobs);
  for (const Json& party : list_of(loaded.json, "parties")) {
    if (text_of(party, "kind") != "group") continue;
    const GroupParty one = group_party_of(party);
    generations.add(number, one.name, one.ranks, one.generation);
  }
}

// Pointers to views must stay valid while groups are added.
static_assert(std::is_nothrow_move_constructible_v<Group>);

// Adds one dump to the others.
class Taking {
 public:
  Taking(const Loaded& loaded, const Generations& generations, Dumps& into)
      : loaded_(loaded), generations_(generations), into_(into), number_(into.dumps.size()) {
    into_.dumps.push_back(loaded.dump);
  }

  // Returns the conflict with the other dumps, if there is one.
  std::optional<Error> take() {
    const std::int64_t now = integer_of(loaded_.json, "time", 0, kMostTime);
    for (const Json& party : list_of(loaded_.json, "parties")) take_party(party);
    const Json& records = list_of(loaded_.json, "records");
    if (const Json* oldest = oldest_of_the_last(records))
      into_.dumps[number_].knows_since = record_of(*oldest, now, loaded_.dump.time - now).begun;
    for (const Json& record : records) {
      const int party = int_of(record, "party");
      const auto found = views_.find(party);
      if (found == views_.end()) continue;
      found->second->records.push_back(record_of(record, now, loaded_.dump.time - now));
      if (const auto broken = broken_.find(party); broken != broken_.end())
        end_open(found->second->records.back(), broken->second);
    }
    return conflict_;
  }

 private:
  void take_party(const Json& party) {
    const int number = int_of(party, "party", 0);
    const int rank = int_of(party, "rank", 0);
    const std::string kind = text_of(party, "kind");
    View* view = nullptr;
    if (kind == "agent") view = agent(rank, text_of(party, "name"));
    if (kind == "group") view = member(group_party_of(party));
    if (view != nullptr) {
      views_[number] = view;
      view->transports = text_or_none(party, "transports");
    }
    if (const auto broken = party.find("broken"); broken != party.end())
      broken_[number] = {text_of(*broken, "blame"), text_of(*broken, "error")};
  }

  // The error of a group that had broken when the dump was made.
  struct Broken {
    std::string blame;
    std::string error;
  };

  // A group that breaks writes its dump first, and then ends its operations with its error.
  void end_open(Record& record, const Broken& why) const {
    if (record.state != "open") return;
    record.state = "failed";
    record.ended = loaded_.dump.time;
    record.blame = why.blame;
    record.error = why.error;
  }

  // A process may have been the same agent several times, one after another.
  View* agent(int rank, const std::string& name) {
    const auto [found, is_new] =
        into_.agents.try_emplace(rank, View{number_, rank, rank, {}, name});
    if (is_new || found->second.dump == number_) return &found->second;
    return claimed(found->second, "the agent of rank " + std::to_string(rank));
  }

  View* member(const GroupParty& party) {
    const auto& [name, rank, ranks, counted] = party;
    const std::uint32_t generation = generations_.common(number_, name, ranks, counted);
    // The survivors of a group may make another of the same name.
    auto group = std::find_if(into_.groups.begin(), into_.groups.end(), [&](const Group& one) {
      return one.name == party.name && one.generation == generation && one.ranks == party.ranks;
    });
    if (group == into_.groups.end())
      group = into_.groups.insert(group, Group{name, generation, ranks, {}});
    const auto [found, is_new] = group->views.try_emplace(
        rank, View{number_, rank, ranks[static_cast<std::size_t>(rank)], {}, ""});
    if (is_new) return &found->second;
    const std::string what = "rank " + std::to_string(rank) + " of group '" + name + "'";
    if (found->second.dump == number_) throw Error(Blame::Caller, "it is " + what + " twice");
    return claimed(found->second, what);
  }

  View* claimed(const View& theirs, const std::string& what) {
    if (!conflict_) conflict_ = two_jobs(into_.dumps[theirs.dump], loaded_.dump, what);
    return nullptr;
  }

  const Loaded& loaded_;
  const Generations& generations_;
  Dumps& into_;
  const std::size_t number_;
  // By the party's number in the file. The views are values of maps, so they do not move.
  std::map<int, View*> views_;
  std::map<int, Broken> broken_;  // likewise
  std::optional<Error> conflict_;
};

// Runs `read` and adds the file's name to its errors.
template <class F>
auto reading(const std::string& path, F read) {
  try {
    return read();
  } catch (const Error& error) {
    throw error.within("'" + path + "' is damaged");
  }
}

std::vector<std::string> jobs_of(const Json& json) {
  std::vector<std::string> jobs;
  if (!json.contains("jobs")) return jobs;
  for (const Json& job : list_of(json, "jobs")) {
    if (!job.is_string()) throw Error(Blame::Caller, "its jobs are " + json["jobs"].dump());
    jobs.push_back(job.get<std::string>());
  }
  return jobs;
}

// Dumps of earlier versions have no ranges.
std::vector<Dump::Range> ranges_of(const Json& json, std::int64_t to_calendar) {
  std::vector<Dump::Range> ranges;
  if (!json.contains("ranges")) return ranges;
  for (const Json& range : list_of(json, "ranges")) {
    ranges.push_back(
        {text_of(range, "name"), integer_of(range, "begun", 0, kMostTime) + to_calendar});
  }
  return ranges;
}

Loaded load(const std::string& path) {
  Loaded loaded{{}, read_file(path)};
  const Json& json = loaded.json;
  loaded.dump = reading(path, [&] {
    const std::string host = text_of(json, "host");
    const std::int64_t time = integer_of(json, "wall_clock", 0, kMostTime);
    return Dump{path,
                host,
                integer_of(json, "pid", 0, std::numeric_limits<std::int64_t>::max()),
                time,
                text_of(json, "reason"),
                0,
                text_or_none(json, "process"),
                jobs_of(json),
                ranges_of(json, time - integer_of(json, "time", 0, kMostTime))};
  });
  return loaded;
}

}  // namespace

Dumps read_dumps(const std::vector<std::string>& files) {
  std::map<std::tuple<std::string, std::int64_t, std::string>, Loaded> newest;
  for (const std::string& path : files) {
    Loaded loaded = load(path);
    auto& place = newest[{loaded.dump.host, loaded.dump.pid, loaded.dump.process}];
    if (place.json.is_null() || place.dump.time < loaded.dump.time) place = std::move(loaded);
  }
  Generations generations;
  std::size_t number = 0;
  for (const auto& [process, loaded] : newest)
    reading(loaded.dump.file, [&] { add_generations(loaded, number++, generations); });
  Dumps dumps;
  for (const auto& [process, loaded] : newest) {
    Taking taking(loaded, generations, dumps);
    const auto conflict = reading(loaded.dump.file, [&] { return taking.take(); });
    if (conflict) throw *conflict;
  }
  require_one_job(dumps);
  return dumps;
}

std::string tensor_of(const Record& record) {
  if (record.dtype.empty()) return "";
  std::string text = record.dtype + " [";
  for (std::size_t i = 0; i < record.shape.size(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(record.shape[i]);
  return text + "]";
}

}  // namespace weft::tools
