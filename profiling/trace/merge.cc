// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/profiling/trace/merge.h>
#include <weft/profiling/trace/timeline_data.h>
#include <weft/profiling/trace/timeline_part_reader.h>

namespace weft::trace::timeline {

namespace {

using Json = nlohmann::json;
using parts::Owner;
using parts::PartArrows;
using parts::Point;
using parts::RankInfo;
using parts::Span;
using parts::Spot;
using parts::ThreadRow;
using parts::Timeline;

// --- drawing

constexpr int kRowsOfKind = 1'000'000;  // more than the spans that can be open at one time

int kind_order(const std::string& kind) {
  constexpr std::array kOrder{"gradient", "collective", "meeting",  "send",      "receive",
                              "call",     "served",     "backward", "reference", "device"};
  for (std::size_t i = 0; i < kOrder.size(); ++i) {
    if (kind == kOrder[i]) return static_cast<int>(i) + 1;
  }
  return static_cast<int>(kOrder.size()) + 1;
}

// Numbers groups that share a name but have different members, in the order in which they began.
// Processes that call init_process_group again with other ranks all number their new group as the
// first of that name. A name with one set of members keeps its generations.
void number_groups(Timeline& timeline) {
  using Ranks = std::pair<std::vector<int>, int>;              // the members and the generation
  std::map<std::string, std::map<Ranks, std::int64_t>> begun;  // by name
  for (const Span& span : timeline.spans) {
    if (span.owner->kind != "group") continue;
    auto& first = begun[span.owner->name]
                      .try_emplace({span.owner->ranks, span.owner->generation}, span.begin)
                      .first->second;
    first = std::min(first, span.begin);
  }
  std::map<std::string, std::map<Ranks, int>> numbers;
  for (const auto& [name, groups] : begun) {
    const auto is_first = [&](const auto& group) {
      return group.first.first == groups.begin()->first.first;
    };
    // All are generations of one group.
    if (std::all_of(groups.begin(), groups.end(), is_first)) continue;
    std::vector<std::pair<std::int64_t, Ranks>> order;
    for (const auto& [ranks, time] : groups) order.emplace_back(time, ranks);
    std::sort(order.begin(), order.end());
    for (const auto& [time, ranks] : order) {
      const int number = static_cast<int>(numbers[name].size());
      numbers[name][ranks] = number;
    }
  }
  for (const auto& owner : timeline.owners) {
    const auto named = numbers.find(owner->name);
    if (owner->kind != "group" || named == numbers.end()) continue;
    const auto found = named->second.find({owner->ranks, owner->generation});
    if (found != named->second.end()) owner->generation = found->second;
  }
}

// Gives each span a row of its kind in which it overlaps no other: slices of one row must nest.
void choose_rows(std::vector<Span>& spans) {
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  struct Row {
    std::string lane;
    std::int64_t taken_until = 0;
  };
  std::map<std::tuple<int, std::string>, std::vector<Row>> rows_of_kinds;
  for (Span& span : spans) {
    auto& rows = rows_of_kinds[{span.owner->job_rank, span.kind}];
    const auto free = std::find_if(rows.begin(), rows.end(), [&](const Row& row) {
      return row.lane == span.lane && row.taken_until <= span.begin;
    });
    const auto index = static_cast<std::size_t>(free - rows.begin());
    if (free == rows.end()) rows.push_back({span.lane, 0});
    rows[index].taken_until = std::max(span.end, span.begin + 1);
    span.row = kind_order(span.kind) * kRowsOfKind + static_cast<int>(index);
  }
}

class Drawing {
 public:
  Drawing(std::FILE* file, std::int64_t origin) : file_(file), origin_(origin) {
    std::fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", file_);
  }

  void event(Json json) {
    const std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (!is_first_) std::fputs(",\n", file_);
    is_first_ = false;
    std::fwrite(text.data(), 1, text.size(), file_);
  }

  void meta(const char* what, int pid, int tid, const Json& args) {
    event({{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", args}});
  }

  void span(const Span& span) {
    Json args{{"rank", span.owner->rank},
              {span.owner->kind, span.owner->name},
              {"state", span.state},
              {"sequence", span.sequence},
              {"bytes", span.bytes}};
    if (span.owner->generation > 0) args["generation"] = span.owner->generation;
    if (!span.owner->transports.empty()) args["transports"] = span.owner->transports;
    if (span.peer >= 0) args[span.kind == "collective" ? "root" : "peer"] = span.peer;
    if (span.tag != 0) args["tag"] = span.tag;
    if (!span.dtype.empty()) args["tensor"] = span.dtype + " " + Json(span.shape).dump();
    if (!span.called_by.empty()) args["called_by"] = span.called_by;
    if (!span.error.empty()) args["error"] = span.error;
    if (span.clock_error > 0) args["clock_error_ns"] = span.clock_error;
    event({{"ph", "X"},
           {"pid", span.owner->job_rank},
           {"tid", span.row},
           {"ts", microseconds(span.begin)},
           {"dur", static_cast<double>(span.end - span.begin) / 1000.0},
           {"cat", span.kind},
           {"name", span.name},
           {"args", args}});
  }

  void thread(const ThreadRow& row, int tid) {
    for (const Point& point : row.points) {
      Json json{{"ph", std::string(1, point.phase)},
                {"pid", row.rank},
                {"tid", tid},
                {"ts", microseconds(point.time)}};
      if (point.phase != 'E') {
        json["name"] = point.name;
        json["cat"] = point.layer;
        if (point.bytes > 0) json["args"] = {{"bytes", point.bytes}};
      }
      if (point.phase == 'i') json["s"] = "t";
      event(std::move(json));
    }
  }

  // Where an arrow begins or ends: a time inside a slice of a row.
  struct Tip {
    int pid = 0;
    int tid = 0;
    std::int64_t time = 0;
  };
  static Tip tip(const Span& span, std::int64_t time) {
    return {span.owner->job_rank, span.row,
            std::clamp(time, span.begin, std::max(span.begin, span.end - 1))};
  }
  // Draws an arrow with that name.
  void flow(const char* name, const Tip& from, const Tip& to) {
    const auto end = [&](const char* phase, const Tip& tip) {
      Json json{{"ph", phase},
                {"id", flows_},
                {"pid", tip.pid},
                {"tid", tip.tid},
                {"ts", microseconds(tip.time)},
                {"cat", "flow"},
                {"name", name}};
      if (*phase == 'f') json["bp"] = "e";
      event(std::move(json));
    };
    ++flows_;
    end("s", from);
    end("f", to);
  }
  void flow(const char* name, const Span& from, std::int64_t leaves, const Span& to,
            std::int64_t arrives) {
    flow(name, tip(from, leaves), tip(to, arrives));
  }

  void finish(const Json& about) {
    std::fprintf(file_, "\n],\"otherData\":%s}\n",
                 about.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
  }

 private:
  double microseconds(std::int64_t time) const {
    return static_cast<double>(time - origin_) / 1000.0;
  }
  std::FILE* file_;
  std::int64_t origin_;
  bool is_first_ = true;
  std::uint64_t flows_ = 0;
};

// The spans with one number that may be the origin, sorted by their beginning: each agent of a
// process numbers its calls and messages from the start.
using Sent = std::vector<const Span*>;

// The newest span that had begun when `came` began, as far as the clocks can tell (clocks of two
// machines drift), or null.
const Span* origin_of(const Span& came, const Sent& sent, const std::map<int, RankInfo>& ranks) {
  const auto error_of = [&](const Span& span) {
    const auto found = ranks.find(span.owner->job_rank);
    return found == ranks.end() ? 0 : found->second.clock_error;
  };
  if (sent.empty()) return nullptr;
  const std::int64_t error = error_of(*sent.front()) + error_of(came);
  const auto later = std::find_if(sent.begin(), sent.end(), [&](const Span* one) {
    return one->begin > came.begin && one->begin - came.begin > error;
  });
  if (later != sent.begin()) return *(later - 1);
  return error > 0 ? sent.front() : nullptr;
}

void draw_flows(Drawing& drawing, const Timeline& timeline) {
  const std::vector<Span>& spans = timeline.spans;
  using MessageKey = std::tuple<std::string, int, int, int, int,
                                std::uint64_t>;         // group, generation, from, to, tag, number
  using CallKey = std::tuple<int, int, std::uint64_t>;  // caller, callee, id
  std::map<MessageKey, const Span*> sends;
  std::map<CallKey, Sent> calls;
  std::map<std::tuple<std::string, int, std::uint64_t>, std::vector<const Span*>> collectives;
  // A retained graph sends the same gradient in each of its passes; the tag is the pass.
  std::map<std::tuple<int, int, std::uint64_t, int>, Sent> gradients;  // from, to, message, pass
  for (const Span& span : spans) {
    const Owner& owner = *span.owner;
    if (span.kind == "gradient" && span.name == "send gradient")
      gradients[{owner.rank, span.peer, span.sequence, span.tag}].push_back(&span);
    if (span.kind == "send")
      sends[{owner.name, owner.generation, owner.rank, span.peer, span.tag, span.sequence}] = &span;
    if (span.kind == "call") calls[{owner.rank, span.peer, span.sequence}].push_back(&span);
    if (span.kind == "collective")
      collectives[{owner.name, owner.generation, span.sequence}].push_back(&span);
  }
  for (const Span& span : spans) {
    const Owner& owner = *span.owner;
    if (span.kind == "receive") {
      const auto sent = sends.find(
          {owner.name, owner.generation, span.peer, owner.rank, span.tag, span.sequence});
      if (sent != sends.end() && span.state == "done")
        drawing.flow("message", *sent->second, sent->second->begin, span, span.end);
    } else if (span.kind == "gradient" && span.name != "send gradient") {
      const Span* sent = origin_of(
          span, gradients[{span.peer, owner.rank, span.sequence, span.tag}], timeline.ranks);
      if (sent != nullptr) drawing.flow("gradient", *sent, sent->begin, span, span.begin);
    } else if (span.kind == "served") {
      const Span* call =
          origin_of(span, calls[{span.peer, owner.rank, span.sequence}], timeline.ranks);
      if (call == nullptr) continue;
      drawing.flow("call", *call, call->begin, span, span.begin);
      if (span.state == "done" && call->state == "done")
        drawing.flow("reply", span, span.end, *call, call->end);
    }
  }
  for (const auto& [key, ranks] : collectives) {
    const Span* last = *std::max_element(ranks.begin(), ranks.end(),
                                         [](auto* a, auto* b) { return a->begin < b->begin; });
    for (const Span* one : ranks) {
      if (one != last && one->state == "done")
        drawing.flow("collective", *last, last->begin, *one, one->end);
    }
  }
}

// Draws the arrows inside one process. The row of a thread is its index, from 1.
void draw_arrows(Drawing& drawing, const Timeline& timeline) {
  std::map<std::pair<int, std::uint64_t>, const Span*> spans;
  for (const Span& span : timeline.spans) spans[{span.part, span.ticket}] = &span;
  const auto on_thread = [&](const Spot& spot) {
    return Drawing::Tip{timeline.threads[spot.thread].rank, static_cast<int>(spot.thread) + 1,
                        spot.time};
  };
  for (int part = 0; part < static_cast<int>(timeline.arrows.size()); ++part) {
    const PartArrows& arrows = timeline.arrows[static_cast<std::size_t>(part)];
    const auto span_of = [&](std::uint64_t ticket) {
      const auto found = spans.find({part, ticket});
      return found == spans.end() ? nullptr : found->second;
    };
    for (const auto& [number, spot] : arrows.arrive) {
      const auto from = arrows.leave.find(number);
      if (from != arrows.leave.end())
        drawing.flow("starts", on_thread(from->second), on_thread(spot));
    }
    for (const auto& [ticket, spot] : arrows.from_operation) {
      if (const Span* from = span_of(ticket))
        drawing.flow("runs", Drawing::tip(*from, from->begin), on_thread(spot));
    }
    for (const auto& [ticket, spot] : arrows.to_operation) {
      if (const Span* to = span_of(ticket))
        drawing.flow("issues", on_thread(spot), Drawing::tip(*to, to->begin));
    }
    for (const auto& [number, ticket] : arrows.to_device) {
      const auto from = arrows.leave.find(number);
      const Span* to = span_of(ticket);
      if (from != arrows.leave.end() && to != nullptr)
        drawing.flow("launches", on_thread(from->second), Drawing::tip(*to, to->begin));
    }
  }
}

void draw(const Timeline& timeline, std::FILE* file) {
  std::int64_t origin = std::numeric_limits<std::int64_t>::max();
  for (const Span& span : timeline.spans) origin = std::min(origin, span.begin);
  for (const ThreadRow& row : timeline.threads) origin = std::min(origin, row.points.front().time);
  Drawing drawing(file, origin);
  std::map<int, std::string> processes;
  for (const Span& span : timeline.spans) processes[span.owner->job_rank];
  for (const ThreadRow& row : timeline.threads) processes[row.rank];
  Json ranks = Json::array();
  bool is_measured_again = true;
  for (const auto& [rank, info] : timeline.ranks) {
    processes[rank] =
        " on " + info.machine +
        (info.clock_error > 0 ? ", clock ± " + std::to_string(info.clock_error / 1000) +
                                    " µs at the start" + (info.clock_again ? " and the end" : "")
                              : "");
    is_measured_again = is_measured_again && (info.clock_again || info.clock_error == 0);
    ranks.push_back({{"rank", rank},
                     {"machine", info.machine},
                     {"pid", info.pid},
                     {"clock_error_ns", info.clock_error},
                     {"clock_measured_again", info.clock_again},
                     {"events_lost", info.lost},
                     {"ranges", info.ranges},
                     {"ended_in_order", info.ended}});
  }
  for (const auto& [rank, where] : processes) {
    drawing.meta("process_name", rank, 0, {{"name", "rank " + std::to_string(rank) + where}});
    drawing.meta("process_sort_index", rank, 0, {{"sort_index", rank}});
  }
  std::set<std::pair<int, int>> named;
  for (const Span& span : timeline.spans) {
    if (named.emplace(span.owner->job_rank, span.row).second) {
      const int more = span.row % kRowsOfKind;
      const std::string name = !span.lane.empty()
                                   ? span.lane
                                   : span.kind + (more > 0 ? " " + std::to_string(more + 1) : "");
      drawing.meta("thread_name", span.owner->job_rank, span.row, {{"name", name}});
      drawing.meta("thread_sort_index", span.owner->job_rank, span.row, {{"sort_index", span.row}});
    }
    drawing.span(span);
  }
  int tid = 0;
  for (const ThreadRow& row : timeline.threads) {
    drawing.meta("thread_name", row.rank, ++tid, {{"name", "thread " + row.name}});
    drawing.meta("thread_sort_index", row.rank, tid,
                 {{"sort_index", row.name == "main" ? 0 : tid}});
    drawing.thread(row, tid);
  }
  draw_flows(drawing, timeline);
  draw_arrows(drawing, timeline);
  drawing.finish({{"weft", "timeline 1"},
                  {"job_ranks", timeline.job_ranks},
                  {"clock_error_is_of", is_measured_again ? "the job's start and end"
                                                          : "the job's start"},  // clocks drift
                  {"ranks", ranks}});
}

// --- files

constexpr const char* kLock = ".lock";  // a file beside the parts; the process that locks it merges

std::vector<std::string> parts_of(const std::string& file) {
  std::vector<std::string> parts;
  std::error_code failure;
  for (const auto& entry : std::filesystem::directory_iterator(folder_of_parts(file), failure)) {
    if (entry.is_regular_file(failure) && entry.path().filename() != kLock)
      parts.push_back(entry.path().string());
  }
  std::sort(parts.begin(), parts.end());
  return parts;
}

// Locks a file while it lives; holds no lock if the file cannot be locked. On NFS an exclusive lock
// needs a descriptor that is open for writing.
class FileLock {
 public:
  FileLock(const std::string& path, int how, int flags = O_RDONLY)
      : descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
    held_ = descriptor_ >= 0 && ::flock(descriptor_, how) == 0;
  }
  ~FileLock() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  explicit operator bool() const { return held_; }

 private:
  int descriptor_;
  bool held_ = false;
};

// The lock of the process that merges, among all machines.
FileLock lock_of(const std::string& file) {
  return {folder_of_parts(file) + "/" + kLock, LOCK_EX, O_RDWR | O_CREAT};
}

void write(const Timeline& timeline, const std::string& path) {
  std::unique_ptr<std::FILE, decltype([](std::FILE* file) { std::fclose(file); })> out(
      std::fopen(path.c_str(), "w"));
  if (!out) throw system_error(Blame::Caller, "'" + path + "' cannot be written", errno);
  draw(timeline, out.get());
  const bool is_whole = std::ferror(out.get()) == 0;
  if (std::fclose(out.release()) != 0 || !is_whole)
    throw system_error(Blame::Caller, "writing '" + path + "'", errno);
}

void put_in_place(const std::string& file, const std::string& fresh) {
  std::error_code failure;
  std::filesystem::rename(fresh, file, failure);
  if (!failure) return;
  throw Error(Blame::Caller, "the timeline cannot be put at '" + file + "': " + failure.message() +
                                 "; its parts stay in '" + folder_of_parts(file) + "'");
}

// Throws Caller for parts of several jobs, which would give a timeline of no job. They come from
// two jobs that ran at a time with one WEFT_TIMELINE, or from a job that was killed on another
// machine.
void require_one_job(const Timeline& timeline, const std::string& file) {
  if (timeline.jobs.size() <= 1) return;
  std::string jobs;
  for (const auto& [job, parts] : timeline.jobs) {
    jobs += (jobs.empty() ? "" : ", ") + std::to_string(parts) + " of '" + job + "'";
  }
  throw Error(Blame::Caller, "'" + folder_of_parts(file) + "' contains parts of several jobs, " +
                                 jobs +
                                 ", with which the names of the files there begin; remove the "
                                 "files of the other jobs, and give each job " +
                                 "a WEFT_TIMELINE of its own");
}

// Requires lock_of(file), unless it cannot be locked.
Merged merge_alone(const std::string& file) {
  Timeline timeline;
  Merged merged;
  for (const std::string& part : parts_of(file))
    merged.parts += parts::read(part, timeline) ? 1 : 0;
  if (merged.parts == 0) {
    throw Error(
        Blame::Caller,
        "'" + folder_of_parts(file) + "' contains no parts of a timeline; check that '" + file +
            "' is the file that WEFT_TIMELINE named, and that it has not been merged before");
  }
  require_one_job(timeline, file);
  number_groups(timeline);
  choose_rows(timeline.spans);
  const std::string fresh = file + ".new";
  try {
    write(timeline, fresh);
    put_in_place(file, fresh);
  } catch (const std::exception&) {
    std::error_code ignored;
    std::filesystem::remove(fresh, ignored);
    throw;
  }
  std::size_t ended = 0;
  for (const auto& [rank, info] : timeline.ranks) ended += info.ended ? 1 : 0;
  merged.complete = ended >= static_cast<std::size_t>(timeline.job_ranks);
  return merged;
}

}  // namespace

Merged merge(const std::string& file) {
  const FileLock alone = lock_of(file);
  return merge_alone(file);
}

void merge_if_last(const std::string& file) {
  const FileLock alone = lock_of(file);
  if (!alone) return;
  const auto parts = parts_of(file);
  if (parts.empty()) return;
  for (const std::string& part : parts) {
    if (!FileLock(part, LOCK_SH | LOCK_NB)) return;  // the writer of this part lives and will merge
  }
  if (!merge_alone(file).complete) return;  // a process may still write its part
  std::error_code ignored;
  for (const std::string& part : parts) std::filesystem::remove(part, ignored);
  std::filesystem::remove(folder_of_parts(file) + "/" + kLock, ignored);
  std::filesystem::remove(folder_of_parts(file), ignored);
}

void remove_leftovers(const std::string& file, const std::string& job) {
  for (const std::string& part : parts_of(file)) {
    if (std::filesystem::path(part).filename().string().starts_with(job + ".")) continue;
    std::error_code ignored;
    // The writer of a part holds an exclusive lock.
    if (FileLock(part, LOCK_SH | LOCK_NB)) std::filesystem::remove(part, ignored);
  }
}

}  // namespace weft::trace::timeline
