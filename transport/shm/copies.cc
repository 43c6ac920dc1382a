// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/config.h>
#include <weft/base/descriptor.h>
#include <weft/base/log.h>
#include <weft/transport/shm/address.h>
#include <weft/transport/shm/copies.h>

namespace weft::transport::shm {

namespace {

constexpr const char* kFormat = "weft-copies-1";
constexpr std::size_t kMostText = 512;

// The file of this user's; invalid if it cannot be used.
Descriptor open_own(const std::string& path, int flags) noexcept {
  Descriptor file(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
  struct stat about {};
  const bool is_own = file && ::fstat(file.get(), &about) == 0 && S_ISREG(about.st_mode) &&
                      about.st_uid == ::geteuid() && (about.st_mode & (S_IWGRP | S_IWOTH)) == 0;
  return is_own ? std::move(file) : Descriptor();
}

std::string text_of(const CopyTimes& times, const std::string& machine) {
  std::string text = kFormat + (" " + machine);
  for (const auto time :
       {times.one_both_ways, times.two_both_ways, times.one_one_way, times.two_one_way}) {
    text += " " + std::to_string(time.count());
  }
  return text + " end\n";
}

std::optional<CopyTimes> parse(const std::string& text, const std::string& machine) {
  std::array<char, kMostText + 1> format{}, about{};
  std::array<long long, 4> times{};
  int end = 0;
  // Each %s is shorter than the text.
  if (std::sscanf(text.c_str(), "%s %s %lld %lld %lld %lld end%n", format.data(), about.data(),
                  &times[0], &times[1], &times[2], &times[3], &end) != 6 ||
      end == 0 || std::string(format.data()) != kFormat || std::string(about.data()) != machine) {
    return std::nullopt;
  }
  for (const long long time : times) {
    if (time <= 0) return std::nullopt;
  }
  using Time = CopyTimes::Time;
  return CopyTimes{Time(times[0]), Time(times[1]), Time(times[2]), Time(times[3])};
}

std::optional<CopyTimes> read_from(const Descriptor& file, const std::string& machine) {
  std::array<char, kMostText> text{};
  const auto count = ::pread(file.get(), text.data(), text.size(), 0);
  if (count <= 0) return std::nullopt;
  return parse(std::string(text.data(), static_cast<std::size_t>(count)), machine);
}

std::string describe(const CopyTimes& times) {
  const auto pair = [](CopyTimes::Time one, CopyTimes::Time two) {
    return std::to_string(one.count() / 1000) + " µs copied once, " +
           std::to_string(two.count() / 1000) + " µs copied twice";
  };
  return "1 MiB takes " + pair(times.one_both_ways, times.two_both_ways) +
         " if both processes send, " + pair(times.one_one_way, times.two_one_way) + " if one does";
}

// As measured, or nothing while another process measures.
std::optional<OneCopy> find() {
  const std::string path = file_of_copy_times();
  bool has_failed = false;
  const auto times = find_copy_times(path, Address::here().host, [&] {
    auto found = measure_copies();
    has_failed = !found;
    return found;
  });
  if (has_failed) {
    log::info(
        "shm: one copy of a payload could not be compared with two, because this process may use "
        "one processor only or the machine is busy; one is used, which takes less of its time");
    return OneCopy{true, true};
  }
  if (!times) return std::nullopt;
  log::info("shm: " + describe(*times) + " (kept in " + path + ")");
  return choose(*times);
}

}  // namespace

OneCopy choose(const CopyTimes& times) noexcept {
  // At about equal times one copy is better: it takes less processor time in all, and does not need
  // two processors at the same moment.
  const auto wins = [](CopyTimes::Time one, CopyTimes::Time two) { return one < two + two / 20; };
  return {wins(times.one_both_ways, times.two_both_ways),
          wins(times.one_one_way, times.two_one_way)};
}

std::string file_of_copy_times() {
  for (const char* const variable : {"XDG_RUNTIME_DIR", "TMPDIR"}) {
    const char* const folder = std::getenv(variable);
    if (folder != nullptr && *folder == '/')
      return std::string(folder) + "/weft-" + std::to_string(::geteuid()) + "-copies";
  }
  return "/tmp/weft-" + std::to_string(::geteuid()) + "-copies";
}

std::optional<CopyTimes> read_copy_times(const std::string& path,
                                         const std::string& machine) noexcept {
  try {
    const Descriptor file = open_own(path, O_RDONLY);
    return file ? read_from(file, machine) : std::nullopt;
  } catch (const std::exception&) {  // out of memory
    return std::nullopt;
  }
}

std::optional<CopyTimes> find_copy_times(const std::string& path, const std::string& machine,
                                         const Measure& measure) {
  if (const auto known = read_copy_times(path, machine)) return known;
  const Descriptor file = open_own(path, O_RDWR | O_CREAT);
  if (!file) return measure();
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) return std::nullopt;
  if (const auto known = read_from(file, machine)) return known;
  const auto times = measure();
  if (!times) return times;
  const std::string text = text_of(*times, machine);
  // A reader in between sees a text without an end.
  if (::ftruncate(file.get(), 0) != 0 ||
      ::pwrite(file.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    log::debug("shm: cannot write " + path);
  }
  return times;
}

bool may_copy_once() { return config().shm_copies != ShmCopies::Two; }

OneCopy one_copy() noexcept {
  const ShmCopies forced = config().shm_copies;
  if (forced != ShmCopies::Auto) return {forced == ShmCopies::One, forced == ShmCopies::One};
  constexpr int kBothWays = 1, kOneWay = 2, kUnknown = -1, kMeasuring = -2;
  static constinit std::atomic<int> known{kUnknown};
  int state = known.load(std::memory_order_relaxed);
  if (state == kUnknown && known.compare_exchange_strong(state, kMeasuring)) {
    std::optional<OneCopy> found;
    try {
      found = find();
    } catch (const std::exception& error) {
      log::debug(std::string("shm: cannot measure copies: ") + error.what());
      found = OneCopy();
    }
    state = !found ? kUnknown : (found->both_ways ? kBothWays : 0) | (found->one_way ? kOneWay : 0);
    known.store(state);
  }
  if (state < 0) return {};
  return {(state & kBothWays) != 0, (state & kOneWay) != 0};
}

}  // namespace weft::transport::shm
