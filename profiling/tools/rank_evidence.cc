// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include <weft/profiling/tools/rank_evidence.h>
#include <weft/profiling/tools/wording.h>

namespace weft::tools {

bool gave_up(const Record& record) {
  return record.state == "failed" && (record.blame == "Timeout" || record.blame == "PeerLost" ||
                                      record.blame == "Protocol" || record.blame == "Cancelled");
}

bool waits(const Record& record) { return record.state == "open" || gave_up(record); }

int job_rank(const Group& group, int rank) {
  const bool is_member = rank >= 0 && static_cast<std::size_t>(rank) < group.ranks.size();
  return is_member ? group.ranks[static_cast<std::size_t>(rank)] : rank;
}

bool Evidence::waits_long_or_in_vain(const Record& record, const View& view) const {
  return gave_up(record) || (record.state == "open" && is_old(age(record, view)));
}

bool Evidence::is_old_to_both(const Record& record, const View& view, const View& other) const {
  return is_old(std::min(now_of(view), now_of(other)) - record.begun);
}

std::vector<std::string> Evidence::doings(int who) const {
  std::vector<std::string> texts;
  const auto look = [&](const View& view, const std::string& where) {
    if (participants_.of(view) != who) return;
    for (const Record& record : view.records) {
      if (record.state == "open" && !is_of_shutdown(record) && texts.size() < 4)
        texts.push_back(describe(record, participants_.agents()) + where + " for " +
                        duration_text(now_of(view) - record.begun));
    }
  };
  for (const Group& group : dumps_.groups) {
    for (const auto& [rank, view] : group.views) look(view, " in " + title(group));
  }
  for (const auto& [rank, view] : dumps_.agents) look(view, "");
  return texts;
}

std::string Evidence::whereabouts(int who) const {
  std::string text;
  for (const std::string& doing : doings(who))
    text += (text.empty() ? "it is in " : "; it is in ") + doing;
  if (!text.empty()) return text;
  const Record* last = nullptr;
  const View* where = nullptr;
  const auto look = [&](const View& view) {
    if (participants_.of(view) != who) return;
    for (const Record& record : view.records) {
      if (record.ended == 0 || (last != nullptr && last->ended >= record.ended)) continue;
      last = &record;
      where = &view;
    }
  };
  for (const Group& group : dumps_.groups) {
    for (const auto& [rank, view] : group.views) look(view);
  }
  for (const auto& [rank, view] : dumps_.agents) look(view);
  if (last == nullptr) return "it has done nothing at all";
  return "it is in no operation: its last, " + describe(*last, participants_.agents()) +
         ", ended " + duration_text(now_of(*where) - last->ended) + " before its dump";
}

std::string Evidence::program_of(const Group& group, const View& view) const {
  constexpr std::size_t kMostShown = 4;
  const Dump& dump = dumps_.dumps[view.dump];
  std::string text = "it is process " + std::to_string(dump.pid);
  if (on_several_hosts(group)) text += " on " + dump.host;
  const std::size_t first = dump.ranges.size() - std::min(dump.ranges.size(), kMostShown);
  for (std::size_t i = first; i < dump.ranges.size(); ++i) {
    text += (i == first ? ", in the range '" : ", '") + dump.ranges[i].name + "' for " +
            duration_text(dump.time - dump.ranges[i].begun);
  }
  return text;
}

std::string Evidence::without_view(const Group& group, int rank) const {
  const bool has_dump = std::ranges::any_of(dumps_.groups, [&](const Group& other) {
    return other.name == group.name && other.ranks == group.ranks && other.views.contains(rank);
  });
  return has_dump ? "its dump shows it in an older or newer group of that name only"
                  : "there is no dump of it";
}

bool Evidence::on_several_hosts(const Group& group) const {
  std::set<std::string> hosts;
  for (const auto& [rank, view] : group.views) hosts.insert(dumps_.dumps[view.dump].host);
  return hosts.size() > 1;
}

}  // namespace weft::tools
