// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/group/unfinished.h>

namespace weft::group {

void Unfinished::add(Issued issued) {
  if (issued.op.ended()) return;
  // Not at every call, which would scan thousands of messages each time.
  if (issued_.size() >= 2 * kept_ + 8) {
    std::erase_if(issued_, [](const Issued& one) { return one.op.ended(); });
    kept_ = issued_.size();
  }
  issued_.push_back(std::move(issued));
}

std::vector<Wait> Unfinished::waits() const {
  constexpr std::size_t kMost = 64;
  std::vector<Wait> waits;
  for (const Issued& one : issued_) {
    if (waits.size() == kMost) break;
    if (!one.op.ended() && !one.op.done().query()) waits.push_back(one.wait);
  }
  return waits;
}

std::string Unfinished::last_text(std::uint64_t begun) const {
  if (last_.name == nullptr) return "no operation: it has issued none";
  const auto ago =
      std::chrono::duration_cast<std::chrono::milliseconds>(Patience::Clock::now() - last_.since);
  const std::string when = ", " + describe_wait(ago) + " ago)";
  if (last_.collective > 0)
    return "#" + std::to_string(last_.collective) + " (" + last_.operation() + when;
  const std::string behind = begun == 0 ? "" : "after collective #" + std::to_string(begun) + ", ";
  return last_.operation() + " (" + behind + when.substr(2);
}

}  // namespace weft::group
