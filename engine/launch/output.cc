// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include <climits>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/launch/output.h>
#include <weft/engine/launch/signals.h>

namespace weft::launch {

namespace {

constexpr std::size_t kKept = 20;  // lines
// Bytes of a line that are held until it ends.
constexpr std::size_t kLongest = std::size_t{1} << 16;
// A pipe that poll() reports as writable takes so many bytes without blocking.
constexpr std::size_t kChunk = PIPE_BUF;

// "weft 12:34:56.789 W …" (base/log.h).
bool is_log(const std::string& line) {
  const std::string form = "weft 00:00:00.000 ";
  return line.size() > form.size() &&
         std::equal(form.begin(), form.end(), line.begin(), [](char wanted, char letter) {
           return wanted == '0' ? std::isdigit(static_cast<unsigned char>(letter)) != 0
                                : wanted == letter;
         });
}

// Blocks until `to` takes kChunk bytes or cannot be written. Returns false if a signal ends the job
// meanwhile and the reader has stopped: all calls together then wait for 1 s.
bool wait_for_room(int to) {
  using std::chrono::milliseconds;
  constexpr milliseconds kLook(100);
  static milliseconds left_after_signal(1000);
  for (;;) {
    const bool ends = received_signal != 0;
    const milliseconds wait = ends ? std::min(kLook, left_after_signal) : kLook;
    pollfd place{to, POLLOUT, 0};
    const int count = ::poll(&place, 1, static_cast<int>(wait.count()));
    if (count > 0 || (count < 0 && errno != EINTR)) return true;
    if (!ends || count < 0) continue;
    left_after_signal -= wait;
    if (left_after_signal <= milliseconds(0)) return false;
  }
}

// Returns errno of the write that failed, or 0. Drops the text if wait_for_room() returns false.
// The descriptor may be non-blocking because another process that shares it, such as a shell or a
// build agent, has made it so.
int write_text(int to, std::string_view text) {
  while (!text.empty() && wait_for_room(to)) {
    const auto count = ::write(to, text.data(), std::min(text.size(), kChunk));
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count <= 0) return errno;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
  return 0;
}

}  // namespace

void say(const std::string& text) { write_text(STDERR_FILENO, "weft-run: " + text + "\n"); }

Output::Output(int rank, Descriptor from, int to, bool prefix, Log log)
    : rank_(rank), from_(std::move(from)), to_(to), prefix_(prefix), log_(std::move(log)) {
  if (log_.path.empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(log_.path).parent_path(), ignored);
  kept_ = Descriptor(::open(log_.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!kept_)
    throw system_error(Blame::Caller, "--log-dir: " + log_.path + " cannot be written", errno);
}

const char* Output::where() const { return to_ == STDERR_FILENO ? "stderr" : "stdout"; }

bool Output::forward() {
  char buffer[16384];
  const auto count = ::read(from_.get(), buffer, sizeof buffer);
  if (count < 0 && errno == EINTR) return true;
  if (count <= 0) {
    if (!partial_.empty() || is_inside_) end_line("\n");
    from_ = {};
    kept_ = {};
    return false;
  }
  const std::string_view bytes(buffer, static_cast<std::size_t>(count));
  keep(bytes);
  if (!prefix_) write_all(bytes);
  take(bytes);
  return true;
}

void Output::take(std::string_view bytes) {
  while (!bytes.empty()) {
    if (std::exchange(was_return_, false) && bytes.front() == '\n') {
      bytes.remove_prefix(1);
      continue;
    }
    const std::size_t end = bytes.find_first_of("\r\n");
    partial_ += bytes.substr(0, end);
    if (end == std::string_view::npos) break;
    was_return_ = bytes[end] == '\r';
    // A carriage return at the start of a progress bar ends no line.
    if (!was_return_ || !partial_.empty() || is_inside_) end_line("\n");
    bytes.remove_prefix(end + 1);
  }
  if (partial_.size() > kLongest) end_line("");
}

// Writes the line so far. If `ending` is "", the line continues.
void Output::end_line(const char* ending) {
  // libtorch's stack frames would push the error's text out of the last lines.
  if (to_ == STDERR_FILENO && !partial_.starts_with("frame #")) {
    last_.push_back(partial_ + "\n");
    if (last_.size() > kKept) last_.pop_front();
  }
  if (prefix_)
    write_all((is_inside_ ? "" : "[rank " + std::to_string(rank_) + "] ") + partial_ + ending);
  is_inside_ = *ending == '\0';
  partial_.clear();
}

void Output::keep(std::string_view bytes) {
  while (kept_ && !bytes.empty()) {
    const auto count = ::write(kept_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      say("cannot write to " + log_.path + ": " + std::strerror(errno) +
          "; the rest of the output is missing there");
      kept_ = {};
      return;
    }
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
}

void Output::write_all(std::string_view text) {
  if (log_.is_instead) return;
  const int number = write_text(to_, text);
  if (failure_ == 0) failure_ = number;
}

bool Output::tells_of_a_lost_rank() const {
  bool in_log = false;
  for (const std::string& line : last_) {
    // A log message may have several lines.
    in_log = is_log(line) || (in_log && line.starts_with(' '));
    if (in_log) continue;
    if (line.find("[PeerLost at ") != std::string::npos ||
        line.find("[Cancelled at ") != std::string::npos)
      return true;
  }
  return false;
}

}  // namespace weft::launch
