// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <utility>

#include <weft/base/make_error.h>
#include <weft/engine/membership/frame.h>

namespace weft::group {

namespace {

constexpr std::size_t kMostReason = 1024;  // characters of a reason that are shown

constexpr std::uint32_t kMagic = 0x354d5457;  // "WTM5"

struct Head {
  std::uint32_t magic;
  std::uint8_t type;
  std::uint8_t zero[3];
  std::int32_t rank;
  std::uint32_t group_bytes;
  std::uint32_t text_bytes;
  std::uint32_t sequence;
  std::uint64_t number;
};
static_assert(sizeof(Head) == kFrameHead);

Error refuse(const char* why) {
  return {Blame::Caller, std::string("not a frame of a Weft group: ") + why};
}

}  // namespace

std::string encode(const Frame& frame) {
  Head head{};
  head.magic = kMagic;
  head.type = static_cast<std::uint8_t>(frame.type);
  head.rank = frame.rank;
  head.group_bytes = static_cast<std::uint32_t>(std::min(frame.group.size(), kMaxFrameText));
  head.text_bytes =
      static_cast<std::uint32_t>(std::min(frame.text.size(), longest_text(frame.type)));
  head.sequence = frame.sequence;
  head.number = frame.number;
  std::string bytes(sizeof head, '\0');
  std::memcpy(bytes.data(), &head, sizeof head);
  bytes.append(frame.group, 0, head.group_bytes);
  bytes.append(frame.text, 0, head.text_bytes);
  return bytes;
}

std::string printable(std::string_view text) {
  std::string result(text.substr(0, kMostSaid));
  for (char& letter : result) {
    if (static_cast<unsigned char>(letter) < 0x20 || letter == 0x7f) letter = '?';
  }
  return result;
}

std::optional<std::uint64_t> take_number(std::string_view& text) {
  std::uint64_t value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc() || end == text.data() + text.size() || *end != ' ')
    return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()) + 1);
  return value;
}

std::vector<int> completers(const Frame& frame) {
  std::vector<int> ranks = {frame.rank};
  std::string_view text = frame.text;
  while (const auto rank = take_number(text)) {
    if (*rank > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) break;
    ranks.push_back(static_cast<int>(*rank));
  }
  return ranks;
}

std::string encode(const WaitCall& call) {
  return std::to_string(call.number) + " " + call.call.substr(0, kMostSaid);
}

std::optional<WaitCall> decode_wait_call(std::string_view text) {
  const auto number = take_number(text);
  if (!number || *number == 0 || text.empty()) return std::nullopt;
  return WaitCall{*number, printable(text)};
}

std::string encode_reason(const Error& reason) {
  std::string text = std::to_string(static_cast<int>(reason.blame())) + " ";
  text += std::to_string(reason.ranks().size()) + " ";
  for (const int rank : reason.ranks()) text += std::to_string(rank) + " ";
  return text + reason.text();
}

std::optional<Error> decode_reason(std::string_view text, int size) {
  const auto blame = take_number(text);
  const auto count = blame ? take_number(text) : std::nullopt;
  if (!count || *count > static_cast<std::uint64_t>(size)) return std::nullopt;
  std::vector<int> ranks;
  for (std::uint64_t i = 0; i < *count; ++i) {
    const auto rank = take_number(text);
    if (!rank || *rank >= static_cast<std::uint64_t>(size)) return std::nullopt;
    ranks.push_back(static_cast<int>(*rank));
  }
  const auto known = std::min<std::uint64_t>(*blame, static_cast<std::uint64_t>(kLastBlame) + 1);
  return Error(blame_from(static_cast<int>(known)), std::string(text.substr(0, kMostReason)))
      .with_ranks(std::move(ranks));
}

void FrameReader::append(std::span<const char> bytes) {
  buffer_.erase(0, std::exchange(begin_, 0));
  buffer_.append(bytes.data(), bytes.size());
}

Result<bool> FrameReader::next(Frame& frame) {
  const std::string_view rest = std::string_view(buffer_).substr(begin_);
  if (rest.size() < sizeof(Head)) return false;
  Head head{};
  std::memcpy(&head, rest.data(), sizeof head);
  if (head.magic != kMagic) return refuse("wrong magic");
  if (head.type < static_cast<std::uint8_t>(FrameType::Hello) ||
      head.type > static_cast<std::uint8_t>(FrameType::Challenge)) {
    return refuse("unknown type");
  }
  const auto type = static_cast<FrameType>(head.type);
  if (!has_greeted_ && type != FrameType::Hello && type != FrameType::Challenge)
    return refuse("no hello came before it");
  if (head.rank < 0 || head.rank >= ranks_) return refuse("no such rank");
  if (head.group_bytes > kMaxFrameText || head.text_bytes > longest_text(type))
    return refuse("text too long");
  const std::size_t whole = sizeof head + head.group_bytes + head.text_bytes;
  if (rest.size() < whole) return false;
  frame.type = type;
  frame.rank = head.rank;
  frame.number = head.number;
  frame.sequence = head.sequence;
  frame.group = rest.substr(sizeof head, head.group_bytes);
  frame.text = rest.substr(sizeof head + head.group_bytes, head.text_bytes);
  begin_ += whole;
  if (frame.type != FrameType::Completed) return true;
  for (const int rank : completers(frame)) {
    if (rank >= ranks_) return refuse("no such rank");
  }
  return true;
}

}  // namespace weft::group
