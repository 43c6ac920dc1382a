// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/launch/status.h>
#include <weft/profiling/trace/progress.h>

namespace weft::launch {

namespace {

double seconds(Deadline::Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

double share(std::uint64_t nanoseconds, double seconds) {
  return seconds > 0 ? std::min(1.0, static_cast<double>(nanoseconds) * 1e-9 / seconds) : 0;
}

std::string percent(double share) {
  return std::to_string(static_cast<int>(std::lround(100 * share))) + " %";
}

// Finds the rank that the others wait for: among the ranks that take steps, the one that waits
// least itself, if it waits far less than the next.
class Straggler {
 public:
  void take(int rank, double waited) {
    if (!least_ || waited < least_->second) {
      if (least_) second_ = std::min(second_, least_->second);
      least_ = {rank, waited};
    } else {
      second_ = std::min(second_, waited);
    }
    ++ranks_;
  }
  std::string text() const {
    constexpr double kFar = 0.1;
    if (ranks_ < 2 || second_ - least_->second < kFar) return "";
    return " | rank " + std::to_string(least_->first) + " waits least, the others wait for it";
  }

 private:
  int ranks_ = 0;
  std::optional<std::pair<int, double>> least_;
  double second_ = 1;
};

}  // namespace

StatusLine::StatusLine(std::chrono::milliseconds interval, Now now)
    : interval_(interval),
      now_(std::move(now)),
      host_(trace::host_name()),
      start_(now_()),
      last_(start_) {}

StatusLine::~StatusLine() {
  for (const Page& page : pages_) {
    ::munmap(page.progress, sizeof(trace::Progress));
    ::close(page.descriptor);
  }
}

// Uses memory without a file, so that nothing is left behind however the job ends.
std::string StatusLine::add(int rank) {
  Page page;
  page.rank = rank;
  page.descriptor = ::memfd_create("weft status", MFD_CLOEXEC);
  if (page.descriptor < 0 || ::ftruncate(page.descriptor, sizeof(trace::Progress)) != 0) {
    throw system_error(Blame::Busy, "--status: a page for rank " + std::to_string(rank), errno);
  }
  void* const memory = ::mmap(nullptr, sizeof(trace::Progress), PROT_READ | PROT_WRITE, MAP_SHARED,
                              page.descriptor, 0);
  if (memory == MAP_FAILED)
    throw system_error(Blame::Busy, "--status: a page for rank " + std::to_string(rank), errno);
  page.progress = static_cast<trace::Progress*>(memory);
  pages_.push_back(page);
  return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(page.descriptor);
}

std::string StatusLine::due() { return now_() - last_ < interval_ ? "" : line(); }

std::string StatusLine::line() { return describe(std::exchange(last_, now_())); }

std::string StatusLine::summary() {
  for (Page& page : pages_) {
    page.steps = page.bytes = page.operations = 0;
    page.waits = {};
  }
  return "in all " + describe(start_);
}

// The time that the rank has waited until `now`, including the present wait. If the rank keeps
// changing its page, reads it after some tries as it is.
StatusLine::Waits StatusLine::waits_of(const trace::Progress& page,
                                       Deadline::Clock::time_point now) {
  Waits waits{};
  std::int64_t since = page.waiting_since;
  std::uint64_t place = 0;
  for (int tries = 0; tries < 100; ++tries) {
    for (std::size_t i = 0; i < waits.size(); ++i) waits[i] = page.backends[i].waited;
    place = page.waiting_for;
    if (const std::int64_t again = page.waiting_since; std::exchange(since, again) == again) break;
  }
  const auto time =
      std::chrono::duration_cast<std::chrono::nanoseconds>(now.time_since_epoch()).count();
  if (since > 0 && time > since && place < waits.size())
    waits[place] += static_cast<std::uint64_t>(time - since);
  return waits;
}

// "42 % (gloo 40 %, rpc 2 %)"; "42 % (gloo)" if there is one backend.
std::string StatusLine::waited_by_backend(const trace::Progress& page, const Waits& since,
                                          double seconds) {
  std::vector<std::pair<std::string, double>> backends;
  double all = 0;
  for (std::size_t i = 0; i < since.size(); ++i) {
    if (since[i] == 0) continue;
    std::string name;
    for (const std::atomic<char>& letter : page.backends[i].name) {
      const char one = letter;
      if (one == 0) break;
      name += std::isprint(static_cast<unsigned char>(one)) != 0 ? one : '?';
    }
    backends.emplace_back(std::move(name), share(since[i], seconds));
    all += backends.back().second;
  }
  std::string text;
  for (const auto& [name, part] : backends) {
    text += (text.empty() ? " (" : ", ") + name + (backends.size() > 1 ? " " + percent(part) : "");
  }
  return percent(std::min(1.0, all)) + (text.empty() ? "" : text + ")");
}

std::string StatusLine::describe(Deadline::Clock::time_point since) {
  const auto time = now_();
  const double passed = seconds(time - since);
  char text[192];
  std::snprintf(text, sizeof text, "%.0f s", seconds(time - start_));
  std::string shown = text + (" on " + host_);
  Straggler straggler;
  for (Page& page : pages_) {
    trace::Progress& now = *page.progress;
    if (now.magic != trace::Progress::kMagic) {
      shown += " | rank " + std::to_string(page.rank) + ": has not joined";
      continue;
    }
    const std::uint64_t steps = now.steps;
    const std::uint64_t bytes = now.bytes;
    const std::uint64_t operations = now.operations;
    const std::uint64_t failures = now.failures;
    std::snprintf(text, sizeof text,
                  " | rank %d: step %llu, %.1f steps/s, %.1f operations/s, %.2f MB/s", page.rank,
                  static_cast<unsigned long long>(steps),
                  static_cast<double>(steps - page.steps) / passed,
                  static_cast<double>(operations - page.operations) / passed,
                  static_cast<double>(bytes - page.bytes) / passed / 1e6);
    shown += text;
    const Waits waits = waits_of(now, time);
    Waits change{};
    std::uint64_t waited = 0;
    for (std::size_t i = 0; i < waits.size(); ++i)
      waited += change[i] = waits[i] - std::min(waits[i], page.waits[i]);
    shown += ", waited " + waited_by_backend(now, change, passed);
    if (failures > 0) shown += ", " + std::to_string(failures) + " failed";
    if (steps > page.steps) straggler.take(page.rank, share(waited, passed));
    page.steps = steps;
    page.bytes = bytes;
    page.operations = operations;
    page.waits = waits;
  }
  return shown + straggler.text();
}

}  // namespace weft::launch
