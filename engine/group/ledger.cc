// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <string_view>

#include <weft/engine/group/ledger.h>

namespace weft::group {

namespace {

std::string collectives_text(std::uint64_t count) {
  return std::to_string(count) + (count == 1 ? " collective" : " collectives");
}

std::string never_ends(std::uint64_t collective) {
  return "; #" + std::to_string(collective) + " will never complete";
}

// Returns how many messages to that rank the text of a Leaving frame counts.
std::uint64_t messages_to(int rank, std::string_view text) {
  for (;;) {
    const auto to = take_number(text);
    const auto count = to ? take_number(text) : std::nullopt;
    if (!count) return 0;
    if (*to == static_cast<std::uint64_t>(rank)) return *count;
  }
}

}  // namespace

Ledger::Ledger(std::string group, int rank, std::vector<int> members,
               std::function<void(Frame)> send)
    : group_(std::move(group)),
      rank_(rank),
      members_(std::move(members)),
      send_(std::move(send)),
      sent_(members_.size()),
      received_(members_.size()),
      expected_(members_.size() + 1) {}

int Ledger::group_rank(int job_rank) const {
  const auto found = std::find(members_.begin(), members_.end(), job_rank);
  return found == members_.end() ? -1 : static_cast<int>(found - members_.begin());
}

void Ledger::on_joined() {
  MutexLock lock(mutex_);
  joined_ = true;
  answer_leavers();
}

std::uint64_t Ledger::begin_collective() {
  MutexLock lock(mutex_);
  const auto number = begun_ + 1;
  if (const auto error = missed(number, "; it cannot take part in #" + std::to_string(number)))
    throw Error(*error);
  begun_ = number;
  unfinished_.insert(number);
  return number;
}

std::uint64_t Ledger::collectives_begun() const {
  MutexLock lock(mutex_);
  return begun_;
}

void Ledger::complete_collective(std::uint64_t number) {
  MutexLock lock(mutex_);
  unfinished_.erase(number);
  answer_leavers();
}

void Ledger::begin_send(int to) {
  MutexLock lock(mutex_);
  if (leavers_.contains(to)) {
    throw Error(Blame::PeerLost, "rank " + std::to_string(to) + " has left group '" + group_ +
                                     "'; it receives no more")
        .with_ranks({to});
  }
  ++sent_[static_cast<std::size_t>(to)];
}

void Ledger::fail_send(int to) {
  MutexLock lock(mutex_);
  --sent_[static_cast<std::size_t>(to)];
}

void Ledger::begin_recv(int from) {
  MutexLock lock(mutex_);
  if (const auto error = never_received(from, 1)) throw *error;
  ++expected_[from < 0 ? members_.size() : static_cast<std::size_t>(from)];
}

void Ledger::complete_recv(int from, int source) {
  MutexLock lock(mutex_);
  --expected_[from < 0 ? members_.size() : static_cast<std::size_t>(from)];
  if (source >= 0) ++received_[static_cast<std::size_t>(source)];
  answer_leavers();
}

// Returns an error if a rank, or all ranks together (-1), cannot send as many messages any more as
// are expected from there, and `more` beyond that.
std::optional<Error> Ledger::never_received(int from, std::uint64_t more) const {
  const std::string text = "group '" + group_ + "' with fewer messages to rank " +
                           std::to_string(rank_) + " than it receives";
  if (from >= 0) {
    const auto leaver = leavers_.find(from);
    const auto place = static_cast<std::size_t>(from);
    if (leaver == leavers_.end() ||
        received_[place] + expected_[place] + more <= leaver->second.messages)
      return {};
    return Error(Blame::PeerLost, "rank " + std::to_string(from) + " has left " + text)
        .with_ranks({from});
  }
  if (leavers_.size() + 1 < members_.size()) return {};
  std::uint64_t coming = 0;
  for (const auto& [rank, leaver] : leavers_) {
    const auto taken =
        received_[static_cast<std::size_t>(rank)] + expected_[static_cast<std::size_t>(rank)];
    if (leaver.messages > taken) coming += leaver.messages - taken;
  }
  if (expected_.back() + more <= coming) return {};
  std::vector<int> others;
  for (const auto& [rank, leaver] : leavers_) others.push_back(rank);
  return Error(Blame::PeerLost, "all other ranks have left " + text).with_ranks(others);
}

std::uint64_t Ledger::completed_through() const {
  return unfinished_.empty() ? begun_ : *unfinished_.begin() - 1;
}

void Ledger::answer_leavers() {
  if (!joined_) return;
  for (auto& [rank, leaver] : leavers_) {
    const bool done = completed_through() >= leaver.collectives &&
                      received_[static_cast<std::size_t>(rank)] >= leaver.messages;
    if (leaver.answered || !done) continue;
    leaver.answered = true;
    Frame frame;
    frame.type = FrameType::Completed;
    frame.group = group_;
    frame.number = static_cast<std::uint64_t>(members_[static_cast<std::size_t>(rank)]);
    send_(std::move(frame));
  }
}

void Ledger::on_leaving(const Frame& frame) {
  const int rank = group_rank(frame.rank);
  if (rank < 0 || rank == rank_) return;
  const std::uint64_t messages = messages_to(rank_, frame.text);
  MutexLock lock(mutex_);
  const auto leaver =
      leavers_.emplace(rank, Leaver{frame.number, messages, false, leavers_.size()}).first;
  leaver->second.answered = false;  // if it is said again, the answer has been lost
  satisfied_.insert(rank);          // it waited for its own operations before it sent this
  answer_leavers();
  changed_.notify_all();
}

void Ledger::on_completed(int rank, int leaver) {
  if (group_rank(leaver) != rank_) return;
  on_gone(rank);
}

void Ledger::on_gone(int rank) {
  MutexLock lock(mutex_);
  satisfied_.insert(group_rank(rank));
  changed_.notify_all();
}

void Ledger::on_lost(int rank) {
  MutexLock lock(mutex_);
  lost_.insert(group_rank(rank));
}

// Returns an error, with this text at its end, if ranks have left before they took part in that
// collective. Names the first of them: others may have left because of it.
std::optional<Error> Ledger::missed(std::uint64_t last, const std::string& text) const {
  const std::pair<const int, Leaver>* first = nullptr;
  for (const auto& one : leavers_) {
    if (one.second.collectives >= last) continue;
    if (first == nullptr || one.second.place < first->second.place) first = &one;
  }
  if (first == nullptr) return std::nullopt;
  const auto& [rank, leaver] = *first;
  return Error(Blame::PeerLost, "rank " + std::to_string(rank) + " left group '" + group_ +
                                    "' after " + collectives_text(leaver.collectives) + text)
      .with_ranks({rank});
}

std::optional<Error> Ledger::left_before() const {
  MutexLock lock(mutex_);
  return missed(begun_, never_ends(begun_));
}

std::optional<Error> Ledger::left_behind() const {
  MutexLock lock(mutex_);
  if (!unfinished_.empty()) {
    const std::uint64_t last = *unfinished_.rbegin();
    if (auto error = missed(last, never_ends(last))) return error;
  }
  for (const auto& [rank, leaver] : leavers_) {
    if (expected_[static_cast<std::size_t>(rank)] == 0) continue;
    if (const auto error = never_received(rank, 0)) return error;
  }
  return expected_.back() > 0 ? never_received(-1, 0) : std::nullopt;
}

bool Ledger::has_left(int rank) const {
  MutexLock lock(mutex_);
  const int member = group_rank(rank);
  return member < 0 || leavers_.contains(member);
}

bool Ledger::member_has_left(int rank) const {
  MutexLock lock(mutex_);
  return leavers_.contains(rank);
}

std::vector<int> Ledger::leavers() const {
  MutexLock lock(mutex_);
  std::vector<int> ranks(leavers_.size());
  for (const auto& [rank, leaver] : leavers_) ranks[leaver.place] = rank;
  return ranks;
}

std::vector<int> Ledger::living() const {
  MutexLock lock(mutex_);
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
    if (!leavers_.contains(rank) && !lost_.contains(rank)) ranks.push_back(rank);
  }
  return ranks;
}

void Ledger::throw_if_left_without(const std::function<bool(int rank)>& came) const {
  for (const int rank : leavers()) {
    if (came(rank)) continue;
    throw Error(Blame::PeerLost,
                "rank " + std::to_string(rank) + " has left group '" + group_ +
                    "' and will not come; make a group of the other ranks with new_group")
        .with_ranks({rank});
  }
}

std::string Ledger::who_left() const {
  MutexLock lock(mutex_);
  std::string ranks;
  for (const auto& [rank, leaver] : leavers_)
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  if (leavers_.empty()) return "";
  return (leavers_.size() == 1 ? "rank " + ranks + " has" : "ranks " + ranks + " have") +
         " left group '" + group_ + "'";
}

void Ledger::say_leaving() {
  Frame frame;
  frame.type = FrameType::Leaving;
  frame.group = group_;
  MutexLock lock(mutex_);
  frame.number = begun_;
  for (std::size_t to = 0; to < sent_.size(); ++to) {
    if (sent_[to] > 0) frame.text += std::to_string(to) + " " + std::to_string(sent_[to]) + " ";
  }
  send_(std::move(frame));
}

std::vector<int> Ledger::await_others(const std::function<bool(int)>& known, Deadline deadline) {
  UniqueLock lock(mutex_);
  std::vector<int> waiting;
  const auto done = [&]() WEFT_REQUIRES(mutex_) {
    waiting.clear();
    for (std::size_t i = 0; i < members_.size(); ++i) {
      const int rank = static_cast<int>(i);
      if (rank != rank_ && known(members_[i]) && !satisfied_.contains(rank))
        waiting.push_back(rank);
    }
    return waiting.empty();
  };
  if (deadline.is_never()) {
    changed_.wait(lock, done);
  } else {
    changed_.wait_until(lock, deadline.point(), done);
  }
  return waiting;
}

}  // namespace weft::group
