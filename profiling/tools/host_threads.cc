// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include <weft/profiling/tools/host_threads.h>

namespace weft::tools {

std::optional<Doing> doing(const Span& range) {
  constexpr std::array<std::string_view, 5> kServing{
      "run", "continuations", "backward of a gradient", "backward of the roots", "optimizer step"};
  if (range.kind != "engine") return std::nullopt;
  if (range.name == "wait") return Doing::Waiting;
  if (std::find(kServing.begin(), kServing.end(), range.name) != kServing.end())
    return Doing::Serving;
  return std::nullopt;
}

namespace {

// Adds the times of one thread, whose ranges nest.
class Thread {
 public:
  explicit Thread(HostTimes& times) : times_(times) {}

  // Takes ranges in the order in which they begin; of ranges that begin together, the longest
  // first.
  void take(const Span& range, Doing what) {
    leave_until(range.begin);
    open_.push_back({range.end, what});
  }
  void finish() {
    for (; !open_.empty(); open_.pop_back()) pass_until(open_.back().end);
  }

 private:
  struct Open {
    double end = 0;
    Doing what = Doing::Waiting;
  };

  void leave_until(double time) {
    while (!open_.empty() && open_.back().end <= time) {
      pass_until(open_.back().end);
      open_.pop_back();
    }
    pass_until(time);
  }
  void pass_until(double time) {
    if (!open_.empty() && time > now_) {
      (open_.back().what == Doing::Waiting ? times_.waiting : times_.serving)
          .emplace_back(now_, time);
    }
    now_ = std::max(now_, time);
  }

  HostTimes& times_;
  std::vector<Open> open_;
  double now_ = 0;
};

}  // namespace

HostTimes host_times(const std::vector<Span>& ranges) {
  std::map<int, std::vector<std::pair<const Span*, Doing>>> threads;  // by row
  for (const Span& range : ranges) {
    if (const auto what = doing(range)) threads[range.row].emplace_back(&range, *what);
  }
  HostTimes times;
  for (auto& [row, own] : threads) {
    std::stable_sort(own.begin(), own.end(), [](const auto& a, const auto& b) {
      return a.first->begin != b.first->begin ? a.first->begin < b.first->begin
                                              : a.first->end > b.first->end;
    });
    Thread thread(times);
    for (const auto& [range, what] : own) thread.take(*range, what);
    thread.finish();
  }
  times.waiting = united(std::move(times.waiting));
  times.serving = united(std::move(times.serving));
  return times;
}

}  // namespace weft::tools
