#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

#include <unistd.h>

#include <weft/engine/launch/output.h>

namespace weft::launch {

namespace {

constexpr std::size_t kKept = 20;

// "weft 12:34:56.789 W …" (base/log.h).
bool is_log(const std::string& line) {
  const std::string form = "weft 00:00:00.000 ";
  return line.size() > form.size() && std::equal(form.begin(), form.end(), line.begin(), [](char wanted, char letter) {
           return wanted == '0' ? std::isdigit(static_cast<unsigned char>(letter)) != 0 : wanted == letter;
         });
}

}  // namespace

const char* Output::where() const { return to_ == STDERR_FILENO ? "stderr" : "stdout"; }

bool Output::forward() {
  char buffer[16384];
  const auto count = ::read(from_, buffer, sizeof buffer);
  if (count < 0 && errno == EINTR) return true;
  if (count <= 0) {
    if (!partial_.empty()) write_line(partial_ + "\n");
    partial_.clear();
    close();
    return false;
  }
  partial_.append(buffer, static_cast<std::size_t>(count));
  std::size_t begin = 0;
  for (std::size_t end = partial_.find('\n'); end != std::string::npos; end = partial_.find('\n', begin)) {
    write_line(partial_.substr(begin, end + 1 - begin));
    begin = end + 1;
  }
  partial_.erase(0, begin);
  return true;
}

void Output::write_line(const std::string& line) {
  if (to_ == STDERR_FILENO) {
    last_.push_back(line);
    if (last_.size() > kKept) last_.pop_front();
  }
  const std::string text = prefix_ ? "[rank " + std::to_string(rank_) + "] " + line : line;
  std::size_t done = 0;
  while (done < text.size()) {
    const auto count = ::write(to_, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) return;  // the job is being ended, and its reader may read no more
    if (count < 0 && failure_ == 0) failure_ = errno;
    if (count <= 0) return;
    done += static_cast<std::size_t>(count);
  }
}

bool Output::tells_of_a_lost_rank() const {
  bool in_log = false;
  for (const std::string& line : last_) {
    in_log = is_log(line) || (in_log && line.starts_with(' '));  // a message may have several lines
    if (in_log) continue;
    if (line.find("[PeerLost at ") != std::string::npos || line.find("[Cancelled at ") != std::string::npos) return true;
  }
  return false;
}

void Output::close() {
  if (from_ >= 0) ::close(from_);
  from_ = -1;
}

}  // namespace weft::launch
