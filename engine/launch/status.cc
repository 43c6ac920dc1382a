#include <cerrno>
#include <cstdio>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/engine/launch/status.h>
#include <weft/profiling/trace/progress.h>

namespace weft::launch {

namespace {

double seconds(Deadline::Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

StatusLine::StatusLine(std::chrono::milliseconds interval)
    : interval_(interval), start_(Deadline::Clock::now()), last_(start_) {}

StatusLine::~StatusLine() {
  for (const Page& page : pages_) {
    ::munmap(page.progress, sizeof(trace::Progress));
    ::close(page.descriptor);
  }
}

// Memory without a file: nothing is left behind, whatever ends the job.
std::string StatusLine::add(int rank) {
  Page page;
  page.rank = rank;
  page.descriptor = ::memfd_create("weft status", MFD_CLOEXEC);
  if (page.descriptor < 0 || ::ftruncate(page.descriptor, sizeof(trace::Progress)) != 0) {
    throw system_error(Blame::Busy, "--status: a page for rank " + std::to_string(rank), errno);
  }
  void* const memory = ::mmap(nullptr, sizeof(trace::Progress), PROT_READ | PROT_WRITE, MAP_SHARED, page.descriptor, 0);
  if (memory == MAP_FAILED) throw system_error(Blame::Busy, "--status: a page for rank " + std::to_string(rank), errno);
  page.progress = static_cast<trace::Progress*>(memory);
  pages_.push_back(page);
  return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(page.descriptor);
}

std::string StatusLine::due() { return Deadline::Clock::now() - last_ < interval_ ? "" : line(); }

std::string StatusLine::line() { return describe(std::exchange(last_, Deadline::Clock::now())); }

std::string StatusLine::summary() {
  for (Page& page : pages_) page.steps = page.bytes = page.operations = 0;
  return "in all " + describe(start_);
}

std::string StatusLine::describe(Deadline::Clock::time_point since) {
  const auto time = Deadline::Clock::now();
  const double passed = seconds(time - since);
  char text[192];
  std::snprintf(text, sizeof text, "%.0f s", seconds(time - start_));
  std::string shown = text;
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
    std::snprintf(text, sizeof text, " | rank %d: step %llu, %.1f steps/s, %.1f operations/s, %.2f MB/s", page.rank,
                  static_cast<unsigned long long>(steps), static_cast<double>(steps - page.steps) / passed,
                  static_cast<double>(operations - page.operations) / passed,
                  static_cast<double>(bytes - page.bytes) / passed / 1e6);
    shown += text;
    if (failures > 0) shown += ", " + std::to_string(failures) + " failed";
    page.steps = steps;
    page.bytes = bytes;
    page.operations = operations;
  }
  return shown;
}

}  // namespace weft::launch
