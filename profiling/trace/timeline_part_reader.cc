// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <fstream>
#include <optional>
#include <set>
#include <tuple>

#include <nlohmann/json.hpp>

#include <weft/base/error.h>
#include <weft/profiling/trace/timeline_data.h>
#include <weft/profiling/trace/timeline_part_reader.h>

namespace weft::trace::timeline::parts {

namespace {

using Json = nlohmann::json;

// A part may come from another machine, so its contents are not trusted. Times within kFarthest of
// zero (in ns: 73 years) can be added and subtracted without overflow.
constexpr std::int64_t kFarthest = std::int64_t{1} << 61;

std::int64_t bounded(std::int64_t time) { return std::clamp(time, -kFarthest, kFarthest); }
std::int64_t nanoseconds(const Json& json) { return bounded(json.get<std::int64_t>()); }

bool has_fraction(const Json& json) {
  return json.is_number_float() ||
         (json.is_structured() && std::any_of(json.begin(), json.end(), has_fraction));
}

// Parses a line of a part. Discarded if it is not JSON or has a number that is not an integer: no
// Part writes one, and it may exceed every integer type.
Json parsed(const std::string& line) {
  Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  return !json.is_discarded() && has_fraction(json) ? Json(Json::value_t::discarded) : json;
}

// Converts the times of a part's process to job time. All values that it is given lie within
// kFarthest.
class JobTime {
 public:
  void start(const Clock& clock) { first_ = clock; }
  // Adds a second point, which gives the drift in between.
  void correct(const Clock& clock) {
    drift_ = static_cast<double>(clock.offset) - static_cast<double>(first_.offset);
    if (clock.at <= first_.at || std::abs(drift_) > kMostDrift) return;
    last_ = clock;
  }
  std::int64_t of(std::int64_t time) const {
    const std::int64_t begun = bounded(time + first_.offset);
    if (!last_) return begun;
    const double passed = (static_cast<double>(time) - static_cast<double>(first_.at)) /
                          (static_cast<double>(last_->at) - static_cast<double>(first_.at));
    return bounded(begun + std::llround(drift_ * std::clamp(passed, 0.0, 1.0)));
  }
  bool is_corrected() const { return last_.has_value(); }
  std::int64_t error() const { return last_ ? std::max(first_.error, last_->error) : first_.error; }

 private:
  // Nanoseconds: a difference of more than an hour is not drift.
  static constexpr double kMostDrift = 3.6e12;
  Clock first_;
  std::optional<Clock> last_;
  double drift_ = 0;  // between first_ and last_
};

class PartReader {
 public:
  explicit PartReader(Timeline& into) : into_(into), part_(static_cast<int>(into.arrows.size())) {
    into_.arrows.emplace_back();
  }

  // False for a file that is not a part.
  bool read(const std::string& path) {
    look_for_clock(path);
    std::ifstream file(path);
    std::string line;
    while (std::getline(file, line)) {
      const Json json = parsed(line);
      if (json.is_discarded()) break;  // the writer was killed while writing it
      try {
        if (json.is_object()) {
          take_object(json);
        } else {
          take_event(json);
        }
      } catch (const std::exception&) {
        break;  // no Part writes such a line
      }
      if (!rank_) return false;
    }
    if (!rank_) return false;
    finish();
    return true;
  }

 private:
  // Looks ahead for the clock at the end, which follows the times that it corrects.
  void look_for_clock(const std::string& path) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with("{\"clock\"")) continue;
      const Json json = parsed(line);
      if (!json.is_object()) return;
      const auto number = [&](const char* key) {
        return json.contains(key) && json[key].is_number_integer();
      };
      if (!number("clock") || !number("offset") || !number("error")) continue;
      again_ = {nanoseconds(json["offset"]), nanoseconds(json["error"]),
                nanoseconds(json["clock"])};
    }
  }

  void take_object(const Json& json) {
    if (json.contains("weft")) {
      take_header(json);
    } else if (json.contains("thread")) {
      threads_[json.at("thread")].name = json.at("name");
    } else if (json.contains("party")) {
      const Owner owner{json.at("kind"),
                        json.at("name"),
                        json.at("rank"),
                        rank(),
                        json.at("ranks"),
                        json.at("generation"),
                        json.value("transports", "")};
      owners_[json.at("party")] = owned(owner);
    } else if (json.contains("lost")) {
      into_.ranks[rank()].lost += json.at("lost").get<std::uint64_t>();
    } else if (json.contains("end")) {
      into_.ranks[rank()].ended = true;
    }
  }

  void take_header(const Json& json) {
    if (rank_) throw Error(Blame::PeerLost, "a part of the timeline has two headers");
    const int rank = json.at("rank");
    const std::string job = json.at("job");
    RankInfo info;
    info.machine = json.at("machine");
    info.pid = json.at("pid");
    info.ranges = json.value("ranges", true);
    job_time_.start({nanoseconds(json.at("offset")), nanoseconds(json.at("error")),
                     json.contains("measured") ? nanoseconds(json.at("measured")) : 0});
    if (again_) job_time_.correct(*again_);
    info.clock_error = job_time_.error();
    info.clock_again = job_time_.is_corrected();
    const int job_ranks = json.at("ranks");
    into_.job_ranks = std::max(into_.job_ranks, job_ranks);
    into_.ranks[rank] = std::move(info);
    ++into_.jobs[job];
    rank_ = rank;
  }

  void take_event(const Json& json) {
    const std::string& letter = json.at(0).get_ref<const std::string&>();
    if (letter == "O") return begin_operation(json);
    if (letter == "F") return end_operation(json);
    if (letter == "D") return device_span(json);
    Thread& thread = threads_[json.at(1)];
    const std::int64_t time = at(json.at(2));
    if (letter == "X") {
      // Ends the open ranges here, because their own ends may be missing. (An end that follows
      // belongs to no range.)
      lost_.push_back(time);
      for (; thread.depth > 0; --thread.depth) thread.points.push_back({'E', time, "", "", 0});
      return;
    }
    if (letter == "E") {
      if (thread.depth == 0) return;  // the range began before the timeline
      --thread.depth;
      thread.points.push_back({'E', time, "", "", 0});
      return;
    }
    if (letter == "L" || letter == "A" || letter == "T") {
      if (letter == "L" && thread.depth == 0) return;  // it would leave no range
      thread.arrows.push_back({letter[0], json.at(3), time});
      return;
    }
    thread.points.push_back({letter == "B" ? 'B' : 'i', time, json.at(3), json.at(4), json.at(5)});
    if (thread.rank < 0) thread.rank = json.at(6);
    if (letter == "B") ++thread.depth;
  }

  void begin_operation(const Json& json) {
    Span span;
    span.owner = owners_.at(json.at(5));
    span.begin = at(json.at(3));
    span.kind = json.at(4);
    span.name = json.at(6);
    span.sequence = json.at(7);
    span.peer = json.at(8);
    span.tag = json.at(9);
    span.bytes = json.at(10);
    span.dtype = json.at(11);
    span.shape = json.at(12).get<std::vector<std::int64_t>>();
    if (json.size() > 13) span.called_by = json.at(13);
    span.part = part_;
    span.ticket = json.at(1);
    Thread& thread = threads_[json.at(2)];
    if (thread.depth > 0) thread.arrows.push_back({'O', span.ticket, span.begin});
    open_[span.ticket] = std::move(span);
  }

  void device_span(const Json& json) {
    Span span;
    const int device = json.at(1);
    const auto stream =
        streams_.try_emplace({device, json.at(2)}, static_cast<int>(streams_.size()) + 1)
            .first->second;
    span.lane = "cuda:" + std::to_string(device) + " stream " + std::to_string(stream);
    auto& owner = device_owners_[{span.lane, json.at(8)}];
    if (!owner)
      owner = owned({"device", span.lane, std::max(json.at(8).get<int>(), -1), rank(), {}, 0});
    span.owner = owner;
    span.kind = "device";
    span.begin = at(json.at(3));
    span.end = std::max(at(json.at(4)), span.begin);
    span.name = json.at(5);
    span.bytes = json.at(7);
    span.clock_error = nanoseconds(json.at(9));
    span.state = "done";
    span.part = part_;
    span.ticket = kFirstDevice + device_spans_++;  // a ticket that no operation has
    if (json.at(10).get<std::uint64_t>() != 0)
      arrows().to_device.emplace_back(json.at(10), span.ticket);
    into_.spans.push_back(std::move(span));
  }

  // Lines of different threads are not ordered: an operation's end may precede its beginning.
  void end_operation(const Json& json) {
    End end;
    end.time = at(json.at(3));
    end.peer = json.at(4);
    end.sequence = json.at(5);
    if (json.size() > 6) end.error = json.at(6).get<std::string>();
    ends_[json.at(1)] = std::move(end);
  }

  // Returns the ranks that are threads of this process, if it has several: ranks of one group, or
  // agents. A process that is one rank may have other rank numbers in groups of another job than
  // the timeline's.
  std::set<int> ranks_here() const {
    std::map<std::tuple<std::string, std::string, std::vector<int>>, std::set<int>> ranks_of;
    for (const auto& owner : mine_) {
      if (owner->kind == "agent") ranks_of[{owner->kind, "", {}}].insert(owner->rank);
      if (owner->kind == "group")
        ranks_of[{owner->kind, owner->name, owner->ranks}].insert(owner->rank);
    }
    std::set<int> here;
    const auto has_several = [](const auto& party) { return party.second.size() > 1; };
    if (std::none_of(ranks_of.begin(), ranks_of.end(), has_several)) return here;
    for (const auto& owner : mine_) {
      const bool is_member =
          owner->rank >= 0 && static_cast<std::size_t>(owner->rank) < owner->ranks.size();
      if (is_member) owner->job_rank = owner->ranks[static_cast<std::size_t>(owner->rank)];
      if (owner->kind == "agent" || (owner->kind == "device" && owner->rank >= 0))
        owner->job_rank = owner->rank;
      if (owner->kind != "device") here.insert(owner->job_rank);
    }
    return here;
  }

  void finish() {
    std::sort(lost_.begin(), lost_.end());
    for (auto& [ticket, span] : open_) {
      // Its end may be among the lost events.
      const auto lost = std::lower_bound(lost_.begin(), lost_.end(), span.begin);
      span.end = std::max(lost == lost_.end() ? last_ : *lost, span.begin);
      if (const auto found = ends_.find(ticket); found != ends_.end()) {
        const End& end = found->second;
        span.end = std::max(end.time, span.begin);
        span.state = end.error ? "failed" : "done";
        span.error = end.error.value_or("");
        if (end.peer >= 0) {
          span.peer = end.peer;
          span.sequence = end.sequence;
        }
      }
      into_.spans.push_back(std::move(span));
    }
    const std::set<int> here = ranks_here();
    for (const int other : here) {
      if (other < 0 || other >= into_.job_ranks) continue;
      RankInfo info = into_.ranks[rank()];
      info.lost = 0;  // counted for rank()
      into_.ranks.try_emplace(other, std::move(info));
    }
    for (auto& [number, thread] : threads_) {
      for (; thread.depth > 0; --thread.depth) thread.points.push_back({'E', last_, "", "", 0});
      const int drawn_in = !here.empty() && thread.rank >= 0 ? thread.rank : rank();
      if (thread.points.empty()) continue;
      for (const Arrow& arrow : thread.arrows) draw(arrow, {into_.threads.size(), arrow.time});
      into_.threads.push_back({drawn_in, thread.name, std::move(thread.points)});
    }
  }

  struct Arrow {
    char letter = 'L';
    std::uint64_t number = 0;
    std::int64_t time = 0;
  };
  void draw(const Arrow& arrow, const Spot& spot) {
    if (arrow.letter == 'L') arrows().leave[arrow.number] = spot;
    if (arrow.letter == 'A') arrows().arrive.emplace_back(arrow.number, spot);
    if (arrow.letter == 'T') arrows().from_operation.emplace_back(arrow.number, spot);
    if (arrow.letter == 'O') arrows().to_operation.emplace_back(arrow.number, spot);
  }
  std::shared_ptr<Owner> owned(const Owner& owner) {
    auto made = std::make_shared<Owner>(owner);
    mine_.push_back(made);
    into_.owners.push_back(made);
    return made;
  }
  PartArrows& arrows() { return into_.arrows[static_cast<std::size_t>(part_)]; }

  int rank() const { return *rank_; }
  std::int64_t at(const Json& time) {
    const std::int64_t job = job_time_.of(nanoseconds(time));
    last_ = std::max(last_, job);
    return job;
  }

  struct End {
    std::int64_t time = 0;
    int peer = -1;
    std::uint64_t sequence = 0;
    std::optional<std::string> error;
  };
  struct Thread {
    std::string name;
    int rank = -1;
    int depth = 0;
    std::vector<Point> points;
    std::vector<Arrow> arrows;
  };
  static constexpr std::uint64_t kFirstDevice = std::uint64_t{1} << 63;
  Timeline& into_;
  const int part_;
  std::uint64_t device_spans_ = 0;
  // Numbered in the order in which they appear.
  std::map<std::pair<int, std::int64_t>, int> streams_;
  std::optional<int> rank_;  // from the header, once that has been read
  JobTime job_time_;
  std::optional<Clock> again_;
  std::int64_t last_ = 0;
  std::map<int, std::shared_ptr<Owner>> owners_;  // by the part's numbers
  std::map<std::pair<std::string, int>, std::shared_ptr<Owner>> device_owners_;  // by lane and rank
  // All owners of this part.
  std::vector<std::shared_ptr<Owner>> mine_;
  std::vector<std::int64_t> lost_;  // times from which a thread's events are missing
  std::map<int, Thread> threads_;
  std::map<std::uint64_t, Span> open_;
  std::map<std::uint64_t, End> ends_;
};

}  // namespace

bool read(const std::string& path, Timeline& into) { return PartReader(into).read(path); }

}  // namespace weft::trace::timeline::parts
