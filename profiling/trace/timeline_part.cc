// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cerrno>
#include <cinttypes>
#include <filesystem>
#include <fstream>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/profiling/trace/progress.h>
#include <weft/profiling/trace/timeline_part.h>
#include <weft/profiling/trace/transports.h>

namespace weft::trace::timeline {

namespace {

constexpr std::uint64_t kEnd = 256;        // bytes reserved for the clock and add_end()
constexpr std::size_t kBlock = 64 * 1024;  // bytes of one write

#if WEFT_TRACE_ENABLED
constexpr const char* kRanges = "true";
#else
constexpr const char* kRanges = "false";
#endif

// The length in bytes of the UTF-8 sequence that begins at `at`; 0 if none does.
std::size_t sequence_at(std::string_view text, std::size_t at) {
  const auto byte = static_cast<unsigned char>(text[at]);
  const std::size_t bytes = byte < 0x80                   ? 1
                            : byte >= 0xc2 && byte < 0xe0 ? 2
                            : byte >= 0xe0 && byte < 0xf0 ? 3
                            : byte >= 0xf0 && byte < 0xf5 ? 4
                                                          : 0;
  if (bytes == 0 || at + bytes > text.size()) return 0;
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((static_cast<unsigned char>(text[at + i]) & 0xc0) != 0x80) return 0;
  }
  return bytes;
}

}  // namespace

template <class String>
void append_quoted(String& to, std::string_view text) {
  to += '"';
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t bytes = sequence_at(text, at);
    const char letter = text[at];
    if (bytes == 0) {
      to += '?';
    } else if (letter == '"' || letter == '\\') {
      to += '\\';
      to += letter;
    } else if (static_cast<unsigned char>(letter) < 0x20 || letter == 0x7f) {
      std::array<char, 8> escaped{};
      std::snprintf(escaped.data(), escaped.size(), "\\u%04x", static_cast<unsigned>(letter));
      to += escaped.data();
    } else {
      to += text.substr(at, bytes);
    }
    at += std::max<std::size_t>(bytes, 1);
  }
  to += '"';
}
template void append_quoted(std::string& to, std::string_view text);
template void append_quoted(std::pmr::string& to, std::string_view text);

std::string host_identity() {
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::string identity;
  std::getline(boot, identity);
  // A process in another time namespace has another CLOCK_MONOTONIC.
  std::array<char, 64> clock{};
  if (::readlink("/proc/self/ns/time", clock.data(), clock.size() - 1) > 0)
    identity += std::string("/") + clock.data();
  return identity;
}

Part::Part(const std::string& folder, const ProcessInJob& place, std::uint64_t most_bytes)
    : most_bytes_(most_bytes) {
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  path_ = folder + "/" + place.job + "." + std::to_string(place.rank) + "." +
          std::to_string(::getpid());
  descriptor_ = ::open(path_.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0)
    throw system_error(Blame::Caller, "the timeline's part '" + path_ + "' cannot be written",
                       errno);
  ::flock(descriptor_, LOCK_EX | LOCK_NB);  // released when the process ends
  line_ = R"({"weft":"timeline part 1","job":)";
  append_quoted(line_, place.job);
  line_ += ",\"rank\":" + std::to_string(place.rank) + ",\"ranks\":" + std::to_string(place.ranks) +
           ",\"host\":";
  append_quoted(line_, host_identity());
  line_ += ",\"machine\":";
  append_quoted(line_, host_name());
  line_ += ",\"pid\":" + std::to_string(::getpid()) + ",\"ranges\":" + kRanges +
           ",\"offset\":" + std::to_string(place.clock.offset) +
           ",\"error\":" + std::to_string(place.clock.error) +
           ",\"measured\":" + std::to_string(place.clock.at) + "}";
  write_line();
  flush();
}

Part::~Part() {
  flush();
  ::flock(descriptor_, LOCK_UN);  // also for processes that have inherited the descriptor
  ::close(descriptor_);
}

void Part::forget_in_child() noexcept { ::close(descriptor_); }

void Part::text(const char* text) {
  line_ += ',';
  append_quoted(line_, text);
}

void Part::number(std::int64_t value) {
  line_ += ',';
  line_ += std::to_string(value);
}

void Part::write_line() {
  if (lost_ == 0 && bytes_ + line_.size() + kEnd < most_bytes_) return put_line();
  line_.clear();
  if (++lost_ > 1) return;
  log::warn("this rank's part of the timeline has reached " + std::to_string(most_bytes_ >> 20) +
            " MiB; it lacks all later events");
}

void Part::put_line() {
  line_ += '\n';
  bytes_ += line_.size();
  if (!failed_) waiting_ += line_;
  line_.clear();
  if (waiting_.size() >= kBlock) flush();
}

void Part::flush() {
  for (std::size_t written = 0; written < waiting_.size() && !failed_;) {
    const ::ssize_t count =
        ::write(descriptor_, waiting_.data() + written, waiting_.size() - written);
    if (count >= 0) {
      written += static_cast<std::size_t>(count);
    } else if (errno != EINTR) {
      failed_ = true;
      log::warn(system_error(Blame::Caller,
                             "the timeline's part '" + path_ + "' is not whole: writing it", errno)
                    .text());
    }
  }
  waiting_.clear();
}

void Part::add_thread(const Lane& lane) {
  line_ = "{\"thread\":" + std::to_string(lane.number()) + ",\"name\":";
  append_quoted(line_, lane.name());
  line_ += '}';
  write_line();
}

int Part::party(const Member& member) {
  const auto [found, is_new] = parties_.try_emplace({member.party(), member.generation()},
                                                    static_cast<int>(parties_.size()));
  if (!is_new) return found->second;
  const MemberIdentity& party = *member.party();
  line_ = "{\"party\":" + std::to_string(found->second) + ",\"kind\":";
  append_quoted(line_, party.kind);
  line_ += ",\"name\":";
  append_quoted(line_, party.name);
  line_ += ",\"rank\":" + std::to_string(party.rank) + ",\"ranks\":[";
  for (std::size_t i = 0; i < party.ranks.size(); ++i)
    line_ += (i > 0 ? "," : "") + std::to_string(party.ranks[i]);
  line_ += "],\"generation\":" + std::to_string(member.generation());
  if (const auto transports = transports_of(member)) {
    line_ += ",\"transports\":";
    append_quoted(line_, transports->data());
  }
  line_ += '}';
  write_line();
  return found->second;
}

void Part::add(const Lane& lane, const Event& event) {
  // May write a line of its own first.
  const int whose = event.what == Event::What::Begin ? party(event.member) : 0;
  const auto label = [&](const char* letter) {
    line_ = letter;
    number(lane.number());
    number(event.time);
    text(event.text);
    text(name(event.layer));
    number(static_cast<std::int64_t>(event.bytes));
    number(event.rank);
  };
  const auto arrow = [&](const char* letter) {
    line_ = letter;
    number(lane.number());
    number(event.time);
    number(static_cast<std::int64_t>(event.ticket));
  };
  switch (event.what) {
    case Event::What::Push: label("[\"B\""); break;
    case Event::What::Mark: label("[\"M\""); break;
    case Event::What::Pop:
      line_ = "[\"E\"";
      number(lane.number());
      number(event.time);
      break;
    case Event::What::Begin:
      line_ = "[\"O\"";
      number(static_cast<std::int64_t>(event.ticket));
      number(lane.number());
      number(event.time);
      text(name(event.kind));
      number(whose);
      text(event.text);
      number(static_cast<std::int64_t>(event.sequence));
      number(event.peer);
      number(event.tag);
      number(static_cast<std::int64_t>(event.bytes));
      text(event.dtype);
      line_ += ",[";
      for (std::size_t i = 0; i < std::min<std::size_t>(event.dims, kMostDims); ++i) {
        if (i > 0) line_ += ',';
        line_ += std::to_string(event.shape[i]);
      }
      line_ += ']';
      if (*event.called_by != '\0') text(event.called_by);
      break;
    case Event::What::End:
      line_ = "[\"F\"";
      number(static_cast<std::int64_t>(event.ticket));
      number(lane.number());
      number(event.time);
      number(event.peer);
      number(static_cast<std::int64_t>(event.sequence));
      if (event.error) text(event.error->c_str());
      break;
    case Event::What::Leave: arrow("[\"L\""); break;
    case Event::What::Arrive: arrow("[\"A\""); break;
    case Event::What::ArriveFrom: arrow("[\"T\""); break;
    case Event::What::Lost:
      line_ = "[\"X\"";
      number(lane.number());
      number(event.time);
      break;
  }
  line_ += ']';
  write_line();
}

void Part::add(const DeviceSpan& span) {
  line_ = "[\"D\"";
  number(span.device);
  number(static_cast<std::int64_t>(span.stream));
  number(span.begin);
  number(span.end);
  text(span.label.text);
  text(name(span.label.layer));
  number(static_cast<std::int64_t>(span.label.bytes));
  number(span.label.rank);
  number(span.error);
  number(static_cast<std::int64_t>(span.arrow));
  line_ += ']';
  write_line();
}

void Part::add(const Clock& again) {
  line_ = "{\"clock\":" + std::to_string(again.at) + ",\"offset\":" + std::to_string(again.offset) +
          ",\"error\":" + std::to_string(again.error) + "}";
  put_line();
}

void Part::add_end(std::uint64_t lost) {
  if (lost += lost_; lost > 0) {
    line_ = "{\"lost\":" + std::to_string(lost) + "}";
    put_line();
  }
  line_ = "{\"end\":" + std::to_string(now()) + "}";
  put_line();
}

}  // namespace weft::trace::timeline
