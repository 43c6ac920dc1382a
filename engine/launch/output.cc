// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

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

// "weft 12:34:56.789 W …" (base/log.h).
bool is_log(const std::string& line) {
  const std::string form = "weft 00:00:00.000 ";
  return line.size() > form.size() &&
         std::equal(form.begin(), form.end(), line.begin(), [](char wanted, char letter) {
           return wanted == '0' ? std::isdigit(static_cast<unsigned char>(letter)) != 0
                                : wanted == letter;
         });
}

}  // namespace

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
      std::fprintf(stderr,
                   "weft-run: cannot write to %s: %s; the rest of the output is missing there\n",
                   log_.path.c_str(), std::strerror(errno));
      kept_ = {};
      return;
    }
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
}

void Output::write_all(std::string_view text) {
  if (log_.is_instead) return;
  while (!text.empty()) {
    auto count = ::write(to_, text.data(), text.size());
    // The descriptor may be non-blocking because another process that shares it, such as a shell or
    // a build agent, has made it so.
    if (count < 0 && errno == EAGAIN) {
      pollfd place{to_, POLLOUT, 0};
      count = ::poll(&place, 1, -1);
      if (count > 0) continue;
    }
    if (count < 0 && errno == EINTR) {
      if (received_signal != 0) return;  // the job is ending, and the reader may have stopped
      continue;
    }
    if (count < 0 && failure_ == 0) failure_ = errno;
    if (count <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
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
