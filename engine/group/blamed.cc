// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string_view>

#include <weft/engine/group/blamed.h>
#include <weft/engine/membership/frame.h>

namespace weft::group {

namespace {

// True if a rank has begun another operation than the wait's under the same number. Backends that
// compare calls fail both.
bool is_another(const Wait& wait, const Progress& progress) {
  const std::string number = "#" + std::to_string(wait.collective);
  if (progress.collectives != wait.collective || !progress.last.starts_with(number + " ("))
    return false;
  const std::string name = wait.operation();
  return !progress.last.starts_with(number + " (" + name + ", ");
}

// Says how a rank keeps a message waiting. If its last operation may be the other side, the bytes
// may be on their way.
const char* how_it_keeps(const Wait& message, int self, const Progress& progress) {
  const std::string here = "rank " + std::to_string(self) + " (";
  const auto is_in = [&](const std::string& call) { return progress.last.starts_with(call); };
  if (message.name == std::string_view("recv from")) {
    if (is_in("send to " + here)) return " has not sent all bytes, or sends with another tag";
  } else if (is_in("recv from " + here) || is_in("recv from any rank (")) {
    return " has not received all bytes, or receives with another tag";
  }
  return " has not taken part";
}

}  // namespace

std::vector<Blamed> blame(const Wait& wait, int self, int size, const WaitAnswers& answers) {
  const auto is_in = [](const std::vector<int>& ranks, int rank) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  };
  std::vector<Blamed> blamed;
  for (int rank = 0; rank < size; ++rank) {
    const bool takes_part = wait.collective > 0 || wait.peer < 0 || wait.peer == rank;
    if (rank == self || !takes_part) continue;
    const std::string who = "rank " + std::to_string(rank);
    const auto found = answers.progress.find(rank);
    if (is_in(answers.silent, rank)) {
      blamed.push_back(
          {rank,
           who + " does not answer; its process may be stopped, or the network between them cut"});
    } else if (found == answers.progress.end()) {
      if (is_in(answers.unasked, rank))
        blamed.push_back({rank, who + " cannot be asked whether it has come"});
    } else if (wait.collective == 0) {
      blamed.push_back({rank, who + how_it_keeps(wait, self, found->second) + "; last seen in " +
                                  printable(found->second.last)});
    } else if (found->second.collectives < wait.collective) {
      blamed.push_back(
          {rank, who + " has not come; last seen in " + printable(found->second.last)});
    } else if (is_another(wait, found->second)) {
      blamed.push_back({rank, who + " has called another operation in its place, " +
                                  printable(found->second.last)});
    }
  }
  return blamed;
}

std::string joined(const std::vector<Blamed>& blamed) {
  std::string text;
  for (std::size_t i = 0; i < std::min(blamed.size(), kMostBlamed); ++i)
    text += (i > 0 ? "; " : "") + blamed[i].text;
  if (blamed.size() > kMostBlamed)
    text += "; and " + std::to_string(blamed.size() - kMostBlamed) + " more ranks";
  return text;
}

}  // namespace weft::group
