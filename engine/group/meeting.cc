// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/group/blamed.h>
#include <weft/engine/group/meeting.h>
#include <weft/engine/group/waits.h>
#include <weft/engine/membership/frame.h>

namespace weft::group {

LocalWait::LocalWait(std::shared_ptr<Waits> waits, std::string group, std::string what, int rank,
                     std::string hint)
    : waits_(std::move(waits)),
      group_(std::move(group)),
      what_(std::move(what)),
      hint_(std::move(hint)),
      rank_(rank),
      place_(std::make_shared<const Meetings::Place>(Meetings::Place{
          .name = "the wait for " + what_ + " on group '" + group_ + "'",
          .group = group_,
          .is_meeting = false,
          .lines = [line = what_ + ": " + hint_] { return std::vector<std::string>{line}; }})),
      patience_(waits_->reports(), since_ + waits_->turn()) {
  waits_->meetings().begin(place_);
}

LocalWait::~LocalWait() { waits_->meetings().end(place_); }

void LocalWait::look() {
  if (!patience_.is_over()) return;
  const auto source = waits_->sources().of(group_);
  if (source && !source->pending().empty()) return;
  waits_->report_unless_said(
      since_, Patience::reports_passed(waits_->reports(), patience_.waited()),
      "rank " + std::to_string(rank_) + " has waited " + describe_wait(patience_.waited()) +
          " for " + what_ + " on group '" + group_ + "': " + hint_);
}

Meeting::Meeting(std::shared_ptr<Waits> waits, std::string group, std::string what, int rank,
                 std::string hint, Missing missing)
    : waits_(std::move(waits)),
      group_(std::move(group)),
      what_(std::move(what)),
      hint_(std::move(hint)),
      rank_(rank),
      missing_(std::move(missing)),
      place_(std::make_shared<const Meetings::Place>(Meetings::Place{
          .name = what_ + " of group '" + group_ + "'",
          .group = group_,
          .is_meeting = true,
          .lines =
              [what = what_, missing = missing_] {
                std::vector<std::string> lines;
                try {
                  for (const int one : missing())
                    lines.push_back(what + ": rank " + std::to_string(one) + " has not come");
                } catch (const Error& error) {
                  lines.push_back(what + ": " + error.text());
                }
                return lines;
              }})),
      patience_(waits_->reports()) {
  waits_->meetings().begin(place_);
}

Meeting::~Meeting() { waits_->meetings().end(place_); }

void Meeting::look() {
  if (!patience_.is_over()) return;
  const auto begin = [this] {
    return "rank " + std::to_string(rank_) + " has waited " + describe_wait(patience_.waited()) +
           " in " + what_ + " of group '" + group_ + "': ";
  };
  std::vector<int> missing;
  try {
    missing = missing_();
  } catch (const Error& error) {
    if (error.blame() != Blame::Timeout) throw;
    // No rank knows which of them is the lowest here.
    const auto waited = patience_.waited();
    return waits_->report_unless_said(Patience::Clock::now() - waited,
                                      Patience::reports_passed(waits_->reports(), waited),
                                      begin() + error.text() + "; " + hint_);
  }
  int lowest_here = 0;
  while (std::find(missing.begin(), missing.end(), lowest_here) != missing.end()) ++lowest_here;
  if (missing.empty() || lowest_here < rank_) return;
  const WaitAnswers answers = waits_->rounds().ask(group_);
  std::vector<Blamed> seen;
  std::vector<int> unseen;  // ranks that have not answered
  for (const int rank : missing) {
    const auto found = answers.progress.find(rank);
    if (found == answers.progress.end()) {
      unseen.push_back(rank);
    } else {
      seen.push_back({rank, "rank " + std::to_string(rank) + " has not come; last seen in " +
                                printable(found->second.last)});
    }
  }
  if (!unseen.empty()) {
    const std::size_t more = unseen.size() - std::min(unseen.size(), kMostBlamed);
    const bool is_one = unseen.size() == 1;
    unseen.resize(unseen.size() - more);
    const std::string rest = more > 0 ? " and " + std::to_string(more) + " more" : "";
    seen.push_back(
        {unseen.front(), ranks_text(unseen) + rest + (is_one ? " has" : " have") + " not come"});
  }
  log::warn(begin() + joined(seen) + "; " + hint_);
}

}  // namespace weft::group
