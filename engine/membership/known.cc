// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/membership/known.h>

namespace weft::group {

namespace {

// A rank that has lost its parent has a new one long before this.
constexpr auto kKeep = std::chrono::minutes(2);
constexpr std::size_t kMostKept = std::size_t{32} << 20;  // bytes

bool has_sequence(FrameType type) { return type == FrameType::Abort || type == FrameType::Leaving; }

}  // namespace

bool Known::take(const Frame& frame) {
  switch (frame.type) {
    case FrameType::Here: {
      const auto address = decode_published(frame.text);
      return address && addresses_.emplace(frame.rank, *address).second;
    }
    case FrameType::Lost:
      if (left_.contains(frame.rank) || !lost_.emplace(frame.rank, frame.text).second) return false;
      if (frame.number == kCut) cut_.insert(frame.rank);
      return true;
    case FrameType::Goodbye: return !lost_.contains(frame.rank) && left_.insert(frame.rank).second;
    default: return !has_sequence(frame.type) || keep(frame);
  }
}

bool Known::keep(const Frame& frame) {
  std::uint32_t& latest = latest_[frame.rank];
  if (frame.sequence <= latest) return false;
  latest = frame.sequence;
  const auto now = std::chrono::steady_clock::now();
  kept_.push_back({frame, kFrameHead + frame.group.size() + frame.text.size(), now});
  kept_bytes_ += kept_.back().bytes;
  while (kept_bytes_ > kMostKept || kept_.front().since + kKeep < now) {
    kept_bytes_ -= kept_.front().bytes;
    kept_.pop_front();
  }
  return true;
}

void Known::number(Frame& frame) {
  if (has_sequence(frame.type)) frame.sequence = latest_[frame.rank] + 1;
}

std::vector<Frame> Known::all() const {
  std::vector<Frame> frames;
  for (const auto& [rank, address] : addresses_)
    frames.push_back({FrameType::Here, rank, 0, "", encode(address)});
  for (const auto& [rank, how] : lost_)
    frames.push_back({FrameType::Lost, rank, cut_.contains(rank) ? kCut : 0, "", how});
  for (const auto& one : kept_) frames.push_back(one.frame);
  for (const int rank : left_) frames.push_back({FrameType::Goodbye, rank, 0, "", ""});
  return frames;
}

std::vector<Frame> Known::aborts(const std::string& group) const {
  std::vector<Frame> frames;
  for (const auto& one : kept_) {
    if (one.frame.type == FrameType::Abort && one.frame.group == group) frames.push_back(one.frame);
  }
  return frames;
}

std::optional<Published> Known::address_of(int rank) const {
  const auto found = addresses_.find(rank);
  return found == addresses_.end() ? std::nullopt : std::optional(found->second);
}

bool Known::is_present(int rank) const {
  return addresses_.contains(rank) && !lost_.contains(rank) && !left_.contains(rank);
}

}  // namespace weft::group
