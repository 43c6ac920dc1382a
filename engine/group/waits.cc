// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <utility>

#include <weft/base/log.h>
#include <weft/engine/group/blamed.h>
#include <weft/engine/group/waits.h>
#include <weft/engine/membership/membership.h>

namespace weft::group {

namespace {

using std::chrono::milliseconds;

// The longest time between two looks at pending operations, and until calls are compared.
constexpr auto kLongestTick = milliseconds(1000);
constexpr auto kShortestTick = milliseconds(5);
constexpr auto kLongestTurn = milliseconds(20);  // for the next lower rank to report first
constexpr int kMostTurns = 100;
constexpr std::size_t kMostLines = 64;  // of waiting_for()
constexpr const char* kRemedy =
    "; to see what each rank did, send SIGUSR1 to all of them and run weft-debug analyze on their "
    "dumps, or run again with "
    "WEFT_DEBUG=detail, which compares all calls";

}  // namespace

std::shared_ptr<Waits> Waits::make(int rank, const std::shared_ptr<Membership>& membership,
                                   const std::shared_ptr<EventLoop>& loop, WaitReports reports) {
  const std::shared_ptr<Waits> waits(new Waits(rank, membership, loop, std::move(reports)));
  membership->listen_to_waits([weak = std::weak_ptr(waits)](const Frame& frame) {
    if (const auto alive = weak.lock()) alive->on_frame(frame);
  });
  loop->post([waits] { waits->tick_later(); });
  return waits;
}

Waits::Waits(int rank, const std::shared_ptr<Membership>& membership,
             const std::shared_ptr<EventLoop>& loop, WaitReports reports)
    : rank_(rank),
      membership_(membership),
      loop_(loop),
      reports_(std::move(reports)),
      rounds_(std::make_shared<WaitRounds>(membership, loop, sources_)) {}

// --- Answering ---

void Waits::on_frame(const Frame& frame) {
  switch (frame.type) {
    case FrameType::Asking: return on_asked(frame);
    case FrameType::Answer: return rounds_->on_answered(frame);
    case FrameType::Said:
      return said_.note(
          static_cast<std::size_t>(std::min<std::uint64_t>(frame.number, reports_.size())));
    case FrameType::Speak: return on_told_to_speak(frame);
    case FrameType::Called: return on_called(frame);
    default: return;
  }
}

void Waits::on_asked(const Frame& frame) {
  const auto membership = membership_.lock();
  if (!membership) return;
  const auto source = sources_->of(frame.group);
  WaitAnswer answer;
  answer.round = frame.number;
  answer.progress = source
                        ? source->progress()
                        : Progress{0, "no operation: it has not made this group, or has left it"};
  const std::string meeting = meetings_.newest();
  const auto wait = sources_->oldest();
  if (!meeting.empty()) {
    answer.progress.last += "; it is in " + meeting;
  } else if (const auto other = sources_->oldest(frame.group);
             other && (!source || source->pending().empty())) {
    answer.progress.last +=
        "; it waits in " + other->second.what() + " of group '" + other->first + "'";
  }
  answer.waits = wait && !reports_.empty() && is_long(wait->second);
  Frame reply;
  reply.type = FrameType::Answer;
  reply.number = static_cast<std::uint64_t>(frame.rank);
  reply.group = frame.group;
  reply.text = encode(answer);
  membership->send(std::move(reply));
}

// True if the wait is long enough to be reported soon.
bool Waits::is_long(const Wait& wait) const {
  const milliseconds enough =
      reports_.empty() ? milliseconds(WaitRounds::kLimit) : reports_.front() / 2;
  return Clock::now() - wait.since >= enough;
}

// A higher rank waits and has seen that this one does too. Meanwhile this one may have reported, or
// may wait for another operation.
void Waits::on_told_to_speak(const Frame& frame) {
  std::size_t level = 0;
  std::from_chars(frame.text.data(), frame.text.data() + frame.text.size(), level);
  level = std::clamp<std::size_t>(level, 1, std::max<std::size_t>(1, reports_.size()));
  const auto wait = sources_->oldest();
  if (!wait || is_reporting_ || said_.level_since(wait->second.since) >= level ||
      !is_long(wait->second))
    return;
  begin_report(wait->first, wait->second, level, /*is_told_to=*/true);
}

std::vector<std::string> Waits::waiting_for(const std::string& group) {
  std::vector<std::string> lines;
  const auto add = [&lines](const std::string& line) {
    if (lines.size() < kMostLines) lines.push_back(line);
  };
  for (const std::string& line : meetings_.lines(group)) add(line);
  const auto source = sources_->of(group);
  const auto pending = source ? source->pending() : std::vector<Wait>();
  if (pending.empty()) return lines;
  const WaitAnswers answers = rounds_->ask(group);
  for (const Wait& wait : pending) {
    for (const Blamed& one :
         blame(wait, source->rank, static_cast<int>(source->members.size()), answers)) {
      add(wait.what() + ": " + one.text);
    }
  }
  return lines;
}

Waits::Absent Waits::who_kept(const std::string& group, const Wait& wait) {
  const auto source = sources_->of(group);
  if (!source) return {};
  const WaitAnswers answers = rounds_->ask(group);
  const auto blamed = blame(wait, source->rank, static_cast<int>(source->members.size()), answers);
  Absent absent;
  for (const Blamed& one : blamed) absent.ranks.push_back(one.rank);
  absent.text = joined(blamed);
  return absent;
}

// --- Reporting ---

milliseconds Waits::calls_differ_after() const {
  return reports_.empty() ? kLongestTick
                          : std::clamp(reports_.front() / 10, kShortestTick, kLongestTick);
}

milliseconds Waits::turn() const {
  if (reports_.empty()) return {};
  return std::min(rank_, kMostTurns) * std::min(reports_.front() / 10, kLongestTurn);
}

void Waits::tick_later() {
  const auto loop = loop_.lock();
  if (!loop) return;
  const auto now = Clock::now();
  const auto at =
      std::clamp<Clock::time_point>(next_tick_, now + kShortestTick, now + calls_differ_after());
  ticking_ = loop->at(Deadline::at(at), [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    self->next_tick_ = Clock::time_point::max();
    self->tell_calls();
    self->tick();
    self->tick_later();
  });
}

void Waits::tick() {
  if (is_reporting_ || reports_.empty()) return;
  const auto found = sources_->oldest();
  if (!found) return;
  const auto& [group, wait] = *found;
  const auto now = Clock::now();
  const auto waited = std::chrono::duration_cast<milliseconds>(now - wait.since) - turn();
  const auto level = Patience::reports_passed(reports_, waited);
  if (level < reports_.size())
    next_tick_ =
        std::min(next_tick_, now + std::min(reports_[level] - waited, calls_differ_after()));
  if (level > said_.level_since(wait.since)) begin_report(group, wait, level, /*is_told_to=*/false);
}

// --- Comparing calls ---

void Waits::tell_calls() {
  const auto sources = sources_->all();
  const auto now = Clock::now();
  for (const auto& [group, source] : sources) {
    const auto pending = source.pending();
    const auto first = std::find_if(pending.begin(), pending.end(),
                                    [](const Wait& one) { return one.collective > 0; });
    if (first == pending.end() || first->collective <= source.told) continue;
    if (now < first->since + calls_differ_after()) {
      next_tick_ = std::min(next_tick_, first->since + calls_differ_after());
      continue;
    }
    sources_->note_told(group, first->collective);
    tell_call(group, source, first->collective);
  }
}

// The later of the two compares a rank's call with the lowest rank's: a rank that has not come has
// no call to compare, and tells the other its own once it has come and waits.
void Waits::tell_call(const std::string& group, const WaitSource& source, std::uint64_t number) {
  const auto membership = rounds_->connected_membership();
  const auto call = source.call(number);
  if (!membership || !call) return;
  std::vector<int> others;
  bool is_lowest = true;
  for (const int member : source.members) {
    if (!membership->has(member)) continue;
    if (member != rank_) others.push_back(member);
    if (member == rank_ && !others.empty()) is_lowest = false;
  }
  if (!is_lowest) others.resize(1);
  for (const int other : others) {
    Frame frame;
    frame.type = FrameType::Called;
    frame.number = static_cast<std::uint64_t>(other);
    frame.group = group;
    frame.text = encode(WaitCall{number, *call});
    membership->send(std::move(frame));
  }
}

void Waits::on_called(const Frame& frame) {
  const auto source = sources_->of(frame.group);
  const auto theirs = decode_wait_call(frame.text);
  if (!source || !theirs) return;
  const auto member = std::find(source->members.begin(), source->members.end(), frame.rank);
  const auto own = source->call(theirs->number);
  if (member == source->members.end() || !own || *own == theirs->call) return;
  const int rank = static_cast<int>(member - source->members.begin());
  source->differ("as operation " + std::to_string(theirs->number) + " of the group rank " +
                 std::to_string(rank) + " called " + theirs->call + " and rank " +
                 std::to_string(source->rank) + " called " + *own +
                 "; all ranks must call the same operations in the same order, with tensors of "
                 "the same size and dtype");
}

void Waits::begin_report(const std::string& group, const Wait& wait, std::size_t level,
                         bool is_told_to) {
  is_reporting_ = true;
  rounds_->begin(
      group, [weak = weak_from_this(), group, wait, level, is_told_to](const WaitAnswers& answers) {
        if (const auto self = weak.lock())
          self->end_report(group, wait, level, is_told_to, answers);
      });
}

void Waits::end_report(const std::string& group, const Wait& wait, std::size_t level,
                       bool is_told_to, const WaitAnswers& answers) {
  is_reporting_ = false;
  const int lower = answers.lowest_waiting;
  if (is_told_to || lower < 0 || lower > rank_) return report(group, wait, level, answers);
  said_.note(level);  // the lower rank will report, unless its wait is over by then
  Frame frame;
  frame.type = FrameType::Speak;
  frame.number = static_cast<std::uint64_t>(lower);
  frame.text = std::to_string(level);
  if (const auto membership = membership_.lock()) membership->send(std::move(frame));
}

void Waits::report(const std::string& group, const Wait& wait, std::size_t level,
                   const WaitAnswers& answers) {
  const auto source = sources_->of(group);
  const auto pending = source ? source->pending() : std::vector<Wait>();
  const auto is_same = [&](const Wait& one) {
    return one.what() == wait.what() && one.since == wait.since;
  };
  if (std::none_of(pending.begin(), pending.end(), is_same)) return;  // it has ended meanwhile
  said_.note(level);
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - wait.since);
  const std::string begin = "rank " + std::to_string(source->rank) + " has waited " +
                            describe_wait(waited) + " in " + wait.what() + " on group '" + group +
                            "': ";
  const auto blamed = blame(wait, source->rank, static_cast<int>(source->members.size()), answers);
  log::warn(begin + (blamed.empty() ? "all ranks have come to it, and it is under way"
                                    : joined(blamed) + kRemedy));
  tell_said(level);
}

void Waits::tell_said(std::size_t level) {
  Frame frame;
  frame.type = FrameType::Said;
  frame.number = level;
  if (const auto membership = membership_.lock()) membership->send(std::move(frame));
}

void Waits::report_unless_said(Clock::time_point since, std::size_t level,
                               const std::string& line) {
  const auto loop = loop_.lock();
  if (!loop) return;
  loop->post([weak = weak_from_this(), since, level, line] {
    const auto self = weak.lock();
    if (!self || self->said_.level_since(since) >= level) return;
    self->said_.note(level);
    log::warn(line);
    self->tell_said(level);
  });
}

}  // namespace weft::group
