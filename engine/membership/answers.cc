// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/membership/answers.h>

namespace weft::group {

namespace {

constexpr std::size_t kMostTogether = 4096;  // ranks in one frame, whose text is bounded

}  // namespace

void Answers::add(const Frame& completed) {
  auto& ranks = waiting_[{completed.group, completed.number}];
  const auto more = completers(completed);
  ranks.insert(ranks.end(), more.begin(), more.end());
}

std::string Answers::take() {
  std::string bytes;
  for (const auto& [which, ranks] : std::exchange(waiting_, {})) {
    for (std::size_t next = 0; next < ranks.size();) {
      Frame frame{FrameType::Completed, ranks[next++], which.second, which.first, ""};
      for (std::size_t count = 1; count < kMostTogether && next < ranks.size(); ++count)
        frame.text += std::to_string(ranks[next++]) + " ";
      bytes += encode(frame);
    }
  }
  return bytes;
}

}  // namespace weft::group
