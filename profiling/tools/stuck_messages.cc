// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <set>
#include <tuple>

#include <weft/profiling/tools/messages.h>
#include <weft/profiling/tools/stuck_messages.h>
#include <weft/profiling/tools/wording.h>

namespace weft::tools {

namespace {

using What = Finding::What;
using Ranks = std::vector<int>;

class Messages {
 public:
  Messages(const Group& group, const Evidence& evidence, Waits& waits,
           std::vector<Finding>& findings)
      : group_(group), evidence_(evidence), waits_(waits), findings_(findings) {}

  // Reports only the first message of each sender, receiver and tag: later ones wait for it.
  void find() {
    std::set<std::tuple<int, int, int>> told;
    std::size_t found = 0;
    for (const Message& message : messages_of(group_)) {
      const std::tuple lane(message.from, message.to, message.tag);
      if (told.contains(lane)) continue;
      auto finding = mismatch(message);
      if (!finding) finding = stuck(message);
      if (!finding) continue;
      told.insert(lane);
      if (++found <= kMostOfAKind) findings_.push_back(std::move(*finding));
    }
    if (found > kMostOfAKind)
      findings_.push_back(
          {What::StuckMessage,
           {},
           "and " + std::to_string(found - kMostOfAKind) + " more messages in " + title(group_)});
  }

 private:
  std::optional<Finding> mismatch(const Message& message) const {
    const Record* send = message.send;
    const Record* receive = message.receive;
    if (send == nullptr || receive == nullptr || message.is_guessed) return {};
    if (send->dtype == receive->dtype && send->bytes == receive->bytes) return {};
    const auto tensor = [](const Record& one) {
      return tensor_of(one) + ", " + std::to_string(one.bytes) + " bytes";
    };
    const std::string from = std::to_string(message.from);
    const std::string to = std::to_string(message.to);
    return Finding{What::Mismatch,
                   {job_rank(group_, message.from), job_rank(group_, message.to)},
                   "in message #" + std::to_string(message.number) + " from rank " + from +
                       " to rank " + to +
                       (message.tag == 0 ? "" : " with tag " + std::to_string(message.tag)) +
                       " in " + title(group_) + " rank " + from + " sends " + tensor(*send) +
                       ", and rank " + to + " receives " + tensor(*receive)};
  }

  // If both ends wait, reports the receiver.
  std::optional<Finding> stuck(const Message& message) {
    auto finding =
        stuck(message.to, message.from, message.receive, message.send, message.is_passed);
    return finding
               ? finding
               : stuck(message.from, message.to, message.send, message.receive, message.is_passed);
  }

  // `own` is the record in which `rank` waits, `theirs` that of the message's other end.
  // `is_passed`: see Message.
  std::optional<Finding> stuck(int rank, int peer, const Record* own, const Record* theirs,
                               bool is_passed) {
    const auto found = group_.views.find(rank);
    if (own == nullptr || found == group_.views.end()) return {};
    const View& view = found->second;
    if (!evidence_.waits_long_or_in_vain(*own, view)) return {};
    const std::int64_t waited =
        (own->ended == 0 ? evidence_.now_of(view) : own->ended) - own->begun;
    const std::string who =
        "rank " + std::to_string(rank) + (own->ended == 0 ? " waits" : " waited") + " for " +
        duration_text(waited) + " in " + describe(*own) + " in " + title(group_);
    // A timeout adds nothing to the time waited.
    const std::string why =
        gave_up(*own) && own->blame != "Timeout" ? " (" + own->blame + ": " + own->error + ")" : "";
    if (peer < 0) return unsent(*own, view, who, why);
    const int job = job_rank(group_, peer);
    const auto other = group_.views.find(peer);
    if (other == group_.views.end()) {
      const std::string text = "rank " + std::to_string(peer) +
                               " is missing: " + evidence_.without_view(group_, peer) + ", and " +
                               who + why;
      return is_missing_already(job) ? std::nullopt
                                     : std::optional(Finding{What::MissingRank, {job}, text});
    }
    const View& there = other->second;
    std::string fate;
    if (theirs != nullptr || is_passed) {
      if (own->state == "open" && !is_long_at_both(*own, view, theirs, there)) return {};
      fate = other_end(*own, theirs, peer, there);
    } else {
      if (own->state == "open" && !evidence_.is_old_to_both(*own, view, there)) return {};
      fate = evidence_.has_forgotten(there, own->begun) ? not_known(*own, peer)
                                                        : not_come(*own, view, peer, there);
    }
    return Finding{What::StuckMessage, {view.job_rank, job}, who + fate + why};
  }

  static std::string not_known(const Record& own, int peer) {
    return ", and it is not known whether rank " + std::to_string(peer) +
           (own.kind == "receive" ? " has sent" : " has received") +
           " it: its recorder has forgotten that time";
  }

  std::string not_come(const Record& own, const View& view, int peer, const View& there) {
    if (own.state == "open")
      waits_.add(evidence_.participants().of(view), evidence_.participants().of(there),
                 describe(own) + " in " + title(group_) + " for " +
                     duration_text(evidence_.now_of(view) - own.begun));
    const std::string has_not =
        own.kind == "receive" ? " has not sent" : " has not begun to receive";
    return ", which rank " + std::to_string(peer) + has_not + "; " +
           (evidence_.now_of(there) < own.begun
                ? "its dump is older than that"
                : evidence_.whereabouts(evidence_.participants().of(there)));
  }

  // Reports a receive from any rank, if every possible sender's dump was made some time after it
  // had begun.
  std::optional<Finding> unsent(const Record& own, const View& view, const std::string& who,
                                const std::string& why) const {
    Ranks without;
    Ranks forgetful;
    for (int rank = 0; rank < static_cast<int>(group_.ranks.size()); ++rank) {
      const auto other = group_.views.find(rank);
      if (other == group_.views.end()) {
        without.push_back(rank);
      } else if (own.state == "open" && !evidence_.is_old_to_both(own, view, other->second)) {
        return {};
      } else if (evidence_.has_forgotten(other->second, own.begun)) {
        forgetful.push_back(rank);
      }
    }
    return Finding{
        What::StuckMessage,
        {view.job_rank},
        who +
            (forgetful.empty() ? ", which no rank has sent"
                               : ", which no rank is known to have sent") +
            (without.empty() ? ""
                             : " of those that left a dump (" + list_ranks(without) + " did not)") +
            (forgetful.empty()
                 ? ""
                 : "; the recorder of " + list_ranks(forgetful) + " has forgotten that time") +
            why};
  }

  bool is_missing_already(int job) const {
    return std::any_of(findings_.begin(), findings_.end(), [&](const Finding& one) {
      return one.what == What::MissingRank && one.ranks == Ranks{job};
    });
  }

  // Whether the waiting end's dump was made long after the other end had ended; or, if both are
  // open, whether both dumps were made long after the later end began.
  bool is_long_at_both(const Record& own, const View& view, const Record* theirs,
                       const View& there) const {
    if (theirs == nullptr) return true;  // it ended, and its record was overwritten
    if (theirs->ended != 0)
      return evidence_.is_old(evidence_.now_of(view) - std::max(own.begun, theirs->ended));
    return evidence_.is_old(std::min(evidence_.now_of(view), evidence_.now_of(there)) -
                            std::max(own.begun, theirs->begun));
  }

  std::string other_end(const Record& own, const Record* theirs, int peer,
                        const View& there) const {
    const std::string who = ", which rank " + std::to_string(peer);
    const std::string has = who + (own.kind == "receive" ? " has sent" : " has received");
    if (theirs == nullptr) return has + ", and later ones as well";
    if (own.ended != 0 && theirs->begun >= own.ended)
      return who + " came to only " + duration_text(theirs->begun - own.ended) + " after that";
    if (theirs->state == "failed")
      return who + " has come to as well: it failed there: " + theirs->blame + ": " + theirs->error;
    if (theirs->ended != 0)
      return has + ", " + duration_text(evidence_.now_of(there) - theirs->ended) +
             " before its dump";
    return who + " has come to as well: it is in " + describe(*theirs) + " for " +
           duration_text(evidence_.now_of(there) - theirs->begun);
  }

  const Group& group_;
  const Evidence& evidence_;
  Waits& waits_;
  std::vector<Finding>& findings_;
};

}  // namespace

void find_stuck_messages(const Group& group, const Evidence& evidence, Waits& waits,
                         std::vector<Finding>& findings) {
  Messages(group, evidence, waits, findings).find();
}

}  // namespace weft::tools
