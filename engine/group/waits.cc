// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <set>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/group/waits.h>
#include <weft/engine/membership/membership.h>

namespace weft::group {

namespace {

using std::chrono::milliseconds;

constexpr auto kAnswers = std::chrono::seconds(1);  // for ranks to answer
constexpr auto kLongestTick = milliseconds(1000);   // between two looks at pending operations
constexpr auto kShortestTick = milliseconds(5);
constexpr auto kLongestTurn = milliseconds(20);  // for the next lower rank to report first
constexpr int kMostTurns = 100;
constexpr std::size_t kMostNamed = 8;   // ranks in one line
constexpr std::size_t kMostLines = 64;  // of waiting_for()
constexpr const char* kRemedy =
    "; to see what each rank did, send SIGUSR1 to all of them and run weft-debug analyze on their "
    "dumps, or run again with "
    "WEFT_DEBUG=detail, which compares all calls";

struct Blamed {
  int rank = 0;
  std::string text;
};

// True if a rank has begun another operation than the wait's under the same number. Backends that
// compare calls fail both.
bool is_another(const Waits::Wait& wait, const Waits::Progress& progress) {
  const std::string number = "#" + std::to_string(wait.collective);
  if (progress.collectives != wait.collective || !progress.last.starts_with(number + " ("))
    return false;
  const std::string name = wait.operation();
  return !progress.last.starts_with(number + " (" + name + ", ");
}

// The ranks that keep a wait waiting, and their last operations.
std::vector<Blamed> blame(const Waits::Wait& wait, int self, int size,
                          const Waits::Answers& answers) {
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
      blamed.push_back(
          {rank, who + " has not taken part; last seen in " + printable(found->second.last)});
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
  for (std::size_t i = 0; i < std::min(blamed.size(), kMostNamed); ++i)
    text += (i > 0 ? "; " : "") + blamed[i].text;
  if (blamed.size() > kMostNamed)
    text += "; and " + std::to_string(blamed.size() - kMostNamed) + " more ranks";
  return text;
}

}  // namespace

std::string encode(const WaitAnswer& answer) {
  return std::to_string(answer.round) + " " + (answer.waits ? "1 " : "0 ") +
         std::to_string(answer.progress.collectives) + " " +
         answer.progress.last.substr(0, kMostSaid);
}

std::optional<WaitAnswer> decode_wait_answer(std::string_view text) {
  const auto round = take_number(text);
  const auto waits = round ? take_number(text) : std::nullopt;
  const auto collectives = waits ? take_number(text) : std::nullopt;
  if (!collectives || *waits > 1) return std::nullopt;
  return WaitAnswer{*round, *waits == 1, {*collectives, std::string(text.substr(0, kMostSaid))}};
}

struct Waits::Round {
  std::string group;
  std::vector<int> members;
  std::set<int> awaited;  // ranks of the group
  Answers answers;
  std::function<void(const Answers&)> done;
  EventLoop::Registration end;
};

std::shared_ptr<Waits> Waits::make(int rank, const std::shared_ptr<Membership>& membership,
                                   const std::shared_ptr<EventLoop>& loop, WaitReports reports) {
  const std::shared_ptr<Waits> waits(new Waits(rank, membership, loop, std::move(reports)));
  membership->listen_to_waits([weak = std::weak_ptr(waits)](const Frame& frame) {
    if (const auto alive = weak.lock()) alive->on_frame(frame);
  });
  loop->post([waits] { waits->tick_later(); });
  return waits;
}

std::string called_as(const char* name, const char* called_by) {
  return called_by == nullptr ? name : std::string(called_by) + ": " + name;
}

std::string Waits::Wait::operation() const {
  if (collective == 0)
    return std::string(name) + (peer < 0 ? " any rank" : " rank " + std::to_string(peer));
  return called_as(name, called_by);
}

std::string Waits::Wait::what() const {
  return operation() + (collective == 0 ? "" : " #" + std::to_string(collective));
}

Waits::Waits(int rank, const std::shared_ptr<Membership>& membership,
             const std::shared_ptr<EventLoop>& loop, WaitReports reports)
    : rank_(rank), membership_(membership), loop_(loop), reports_(std::move(reports)) {}

void Waits::add(const std::string& group, Source source) {
  MutexLock lock(mutex_);
  sources_[group] = std::move(source);
}

void Waits::remove(const std::string& group) {
  Source last;  // destroyed after the lock is released
  MutexLock lock(mutex_);
  const auto found = sources_.find(group);
  if (found == sources_.end()) return;
  last = std::move(found->second);
  sources_.erase(found);
}

std::optional<Waits::Source> Waits::source_of(const std::string& group) const {
  MutexLock lock(mutex_);
  const auto found = sources_.find(group);
  return found == sources_.end() ? std::nullopt : std::optional(found->second);
}

std::optional<std::pair<std::string, Waits::Wait>> Waits::oldest(const std::string& but) const {
  // A copy, since a source may hold the last reference to its group, whose destructor takes the
  // lock.
  std::map<std::string, Source> sources;
  {
    MutexLock lock(mutex_);
    sources = sources_;
  }
  std::optional<std::pair<std::string, Wait>> oldest;
  for (const auto& [group, source] : sources) {
    if (group == but) continue;
    const auto pending = source.pending();
    if (pending.empty() || (oldest && oldest->second.since <= pending.front().since)) continue;
    oldest = {group, pending.front()};
  }
  return oldest;
}

// --- Asking ---

void Waits::begin_round(const std::string& group, std::function<void(const Answers&)> done) {
  const auto membership = membership_.lock();
  const auto loop = loop_.lock();
  const auto source = source_of(group);
  if (!loop || !source) return done({});
  const auto round = std::make_shared<Round>();
  round->group = group;
  round->members = source->members;
  round->done = std::move(done);
  for (int rank = 0; rank < static_cast<int>(source->members.size()); ++rank) {
    if (rank == source->rank) continue;
    const bool is_reached = membership && connected_ && !membership->is_alone() &&
                            membership->has(source->members[static_cast<std::size_t>(rank)]);
    if (is_reached) {
      round->awaited.insert(rank);
    } else {
      round->answers.unasked.push_back(rank);
    }
  }
  const auto number = ++last_round_;
  rounds_[number] = round;
  if (round->awaited.empty()) return end_round(number);
  round->end = loop->at(Deadline::in(kAnswers), [weak = weak_from_this(), number] {
    if (const auto self = weak.lock()) self->end_round(number);
  });
  Frame frame;
  frame.type = FrameType::Asking;
  frame.number = number;
  frame.group = group;
  membership->send(std::move(frame));
}

void Waits::end_round(std::uint64_t number) {
  const auto found = rounds_.find(number);
  if (found == rounds_.end()) return;
  const auto round = found->second;
  rounds_.erase(found);
  round->answers.silent.assign(round->awaited.begin(), round->awaited.end());
  round->done(round->answers);
}

void Waits::on_frame(const Frame& frame) {
  switch (frame.type) {
    case FrameType::Asking: return on_asked(frame);
    case FrameType::Answer: return on_answered(frame);
    case FrameType::Said:
      return note_said(
          static_cast<std::size_t>(std::min<std::uint64_t>(frame.number, reports_.size())));
    case FrameType::Speak: return on_told_to_speak(frame);
    case FrameType::Called: return on_called(frame);
    default: return;
  }
}

void Waits::on_asked(const Frame& frame) {
  const auto membership = membership_.lock();
  if (!membership) return;
  const auto source = source_of(frame.group);
  WaitAnswer answer;
  answer.round = frame.number;
  answer.progress = source
                        ? source->progress()
                        : Progress{0, "no operation: it has not made this group, or has left it"};
  std::string meeting;
  {
    MutexLock lock(mutex_);
    if (!meeting_.empty()) meeting = meeting_.back();
  }
  const auto wait = oldest();
  if (!meeting.empty()) {
    answer.progress.last += "; it is in " + meeting;
  } else if (const auto other = oldest(frame.group);
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
  const milliseconds enough = reports_.empty() ? milliseconds(kAnswers) : reports_.front() / 2;
  return Clock::now() - wait.since >= enough;
}

// A higher rank waits and has seen that this one does too. Meanwhile this one may have reported, or
// may wait for another operation.
void Waits::on_told_to_speak(const Frame& frame) {
  std::size_t level = 0;
  std::from_chars(frame.text.data(), frame.text.data() + frame.text.size(), level);
  level = std::clamp<std::size_t>(level, 1, std::max<std::size_t>(1, reports_.size()));
  const auto wait = oldest();
  if (!wait || is_reporting_ || said_of(wait->second) >= level || !is_long(wait->second)) return;
  begin_report(wait->first, wait->second, level, /*is_told_to=*/true);
}

void Waits::on_answered(const Frame& frame) {
  const auto answer = decode_wait_answer(frame.text);
  const auto found = answer ? rounds_.find(answer->round) : rounds_.end();
  if (found == rounds_.end() || found->second->group != frame.group) return;
  Round& round = *found->second;
  const auto member = std::find(round.members.begin(), round.members.end(), frame.rank);
  if (member == round.members.end()) return;  // a rank of the job that is no member of the group
  const int rank = static_cast<int>(member - round.members.begin());
  if (round.awaited.erase(rank) == 0) return;
  round.answers.progress[rank] = answer->progress;
  int& lowest = round.answers.lowest_waiting;
  if (answer->waits && (lowest < 0 || frame.rank < lowest)) lowest = frame.rank;
  if (round.awaited.empty()) end_round(answer->round);
}

Waits::Answers Waits::ask(const std::string& group) {
  const auto loop = loop_.lock();
  if (!loop || loop->inside()) return {};
  struct Asked : HostFlag {
    Mutex mutex;
    Answers answers WEFT_GUARDED_BY(mutex);
  };
  const auto asked = std::make_shared<Asked>();
  loop->post([weak = weak_from_this(), group, asked] {
    const auto self = weak.lock();
    if (!self) return asked->raise();
    self->begin_round(group, [asked](const Answers& answers) {
      {
        MutexLock lock(asked->mutex);
        asked->answers = answers;
      }
      asked->raise();
    });
  });
  static_cast<void>(asked->synchronize(Deadline::in(2 * kAnswers)));  // the loop may be held up
  MutexLock lock(asked->mutex);
  return asked->answers;
}

std::vector<std::string> Waits::waiting_for(const std::string& group) {
  std::vector<std::string> lines;
  const auto add = [&lines](const std::string& line) {
    if (lines.size() < kMostLines) lines.push_back(line);
  };
  {
    MutexLock lock(meetings_mutex_);
    for (const Meeting* meeting : meetings_) {
      if (meeting->group_ != group) continue;
      for (const int rank : meeting->missing_()) {
        add(meeting->what_ + ": rank " + std::to_string(rank) + " has not come");
      }
    }
    for (const LocalWait* wait : local_waits_) {
      if (wait->group_ == group) add(wait->what_ + ": " + wait->hint_);
    }
  }
  const auto source = source_of(group);
  const auto pending = source ? source->pending() : std::vector<Wait>();
  if (pending.empty()) return lines;
  const Answers answers = ask(group);
  for (const Wait& wait : pending) {
    for (const Blamed& one :
         blame(wait, source->rank, static_cast<int>(source->members.size()), answers)) {
      add(wait.what() + ": " + one.text);
    }
  }
  return lines;
}

Waits::Absent Waits::who_kept(const std::string& group, const Wait& wait) {
  const auto source = source_of(group);
  if (!source) return {};
  const Answers answers = ask(group);
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

milliseconds Waits::tick_length() const { return calls_differ_after(); }

milliseconds Waits::turn() const {
  if (reports_.empty()) return {};
  return std::min(rank_, kMostTurns) * std::min(reports_.front() / 10, kLongestTurn);
}

void Waits::tick_later() {
  const auto loop = loop_.lock();
  if (!loop) return;
  const auto now = Clock::now();
  const auto at =
      std::clamp<Clock::time_point>(next_tick_, now + kShortestTick, now + tick_length());
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
  const auto found = oldest();
  if (!found) return;
  const auto& [group, wait] = *found;
  const auto now = Clock::now();
  const auto waited = std::chrono::duration_cast<milliseconds>(now - wait.since) - turn();
  const auto level = Patience::reports_passed(reports_, waited);
  if (level < reports_.size())
    next_tick_ = std::min(next_tick_, now + std::min(reports_[level] - waited, tick_length()));
  if (level > said_of(wait)) begin_report(group, wait, level, /*is_told_to=*/false);
}

// --- Comparing calls ---

void Waits::tell_calls() {
  std::map<std::string, Source> sources;
  {
    MutexLock lock(mutex_);
    sources = sources_;
  }
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
    {
      MutexLock lock(mutex_);
      const auto found = sources_.find(group);
      if (found != sources_.end()) found->second.told = first->collective;
    }
    tell_call(group, source, first->collective);
  }
}

// The later of the two compares a rank's call with the lowest rank's: a rank that has not come has
// no call to compare, and tells the other its own once it has come and waits.
void Waits::tell_call(const std::string& group, const Source& source, std::uint64_t number) {
  const auto membership = membership_.lock();
  const auto call = source.call(number);
  if (!membership || !connected_ || membership->is_alone() || !call) return;
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
  const auto source = source_of(frame.group);
  const auto theirs = decode_wait_call(frame.text);
  if (!source || !theirs) return;
  const auto member = std::find(source->members.begin(), source->members.end(), frame.rank);
  const auto own = source->call(theirs->number);
  if (member == source->members.end() || !own || *own == theirs->call) return;
  const int rank = static_cast<int>(member - source->members.begin());
  source->differ("as operation " + std::to_string(theirs->number) + " of the group rank " +
                 std::to_string(rank) + " called " + theirs->call + " and rank " +
                 std::to_string(source->rank) + " called " + *own +
                 "; all ranks must call the same operations in the same order");
}

void Waits::begin_report(const std::string& group, const Wait& wait, std::size_t level,
                         bool is_told_to) {
  is_reporting_ = true;
  begin_round(group, [this, group, wait, level, is_told_to](const Answers& answers) {
    is_reporting_ = false;
    const int lower = answers.lowest_waiting;
    if (is_told_to || lower < 0 || lower > rank_) return report(group, wait, level, answers);
    note_said(level);  // the lower rank will report, unless its wait is over by then
    Frame frame;
    frame.type = FrameType::Speak;
    frame.number = static_cast<std::uint64_t>(lower);
    frame.text = std::to_string(level);
    if (const auto membership = membership_.lock()) membership->send(std::move(frame));
  });
}

void Waits::report(const std::string& group, const Wait& wait, std::size_t level,
                   const Answers& answers) {
  const auto source = source_of(group);
  const auto pending = source ? source->pending() : std::vector<Wait>();
  const auto is_same = [&](const Wait& one) {
    return one.what() == wait.what() && one.since == wait.since;
  };
  if (std::none_of(pending.begin(), pending.end(), is_same)) return;  // it has ended meanwhile
  note_said(level);
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

std::size_t Waits::said_of(const Wait& wait) const {
  return said_at_ >= wait.since ? said_level_ : 0;
}

void Waits::note_said(std::size_t level) {
  said_level_ = level;
  said_at_ = Clock::now();
}

// --- Waits of this rank alone ---

Waits::LocalWait::LocalWait(std::shared_ptr<Waits> waits, std::string group, std::string what,
                            int rank, std::string hint)
    : waits_(std::move(waits)),
      group_(std::move(group)),
      what_(std::move(what)),
      hint_(std::move(hint)),
      rank_(rank),
      patience_(waits_->reports_, since_ + waits_->turn()) {
  {
    MutexLock lock(waits_->meetings_mutex_);
    waits_->local_waits_.push_back(this);
  }
  waits_->begin_meeting("the wait for " + what_ + " on group '" + group_ + "'");
}

Waits::LocalWait::~LocalWait() {
  {
    MutexLock lock(waits_->meetings_mutex_);
    std::erase(waits_->local_waits_, this);
  }
  waits_->end_meeting("the wait for " + what_ + " on group '" + group_ + "'");
}

void Waits::LocalWait::look() {
  if (!patience_.is_over()) return;
  const auto loop = waits_->loop_.lock();
  const auto source = waits_->source_of(group_);
  if (!loop || (source && !source->pending().empty())) return;
  const auto level = Patience::reports_passed(waits_->reports_, patience_.waited());
  const std::string line = "rank " + std::to_string(rank_) + " has waited " +
                           describe_wait(patience_.waited()) + " for " + what_ + " on group '" +
                           group_ + "': " + hint_;
  loop->post([weak = std::weak_ptr(waits_), since = since_, level, line] {
    const auto self = weak.lock();
    if (!self || (self->said_at_ >= since && self->said_level_ >= level)) return;
    self->note_said(level);
    log::warn(line);
    self->tell_said(level);
  });
}

// --- Meetings ---

void Waits::begin_meeting(const std::string& name) {
  MutexLock lock(mutex_);
  meeting_.push_back(name);
}

void Waits::end_meeting(const std::string& name) {
  MutexLock lock(mutex_);
  const auto own = std::find(meeting_.begin(), meeting_.end(), name);
  if (own != meeting_.end()) meeting_.erase(own);
}

Waits::Meeting::Meeting(std::shared_ptr<Waits> waits, std::string group, std::string what, int rank,
                        std::string hint, Missing missing)
    : waits_(std::move(waits)),
      group_(std::move(group)),
      what_(std::move(what)),
      hint_(std::move(hint)),
      rank_(rank),
      missing_(std::move(missing)),
      patience_(waits_->reports_) {
  {
    MutexLock lock(waits_->meetings_mutex_);
    waits_->meetings_.push_back(this);
  }
  waits_->begin_meeting(what_ + " of group '" + group_ + "'");
}

Waits::Meeting::~Meeting() {
  {
    MutexLock lock(waits_->meetings_mutex_);
    std::erase(waits_->meetings_, this);
  }
  waits_->end_meeting(what_ + " of group '" + group_ + "'");
}

void Waits::Meeting::look() {
  if (!patience_.is_over()) return;
  const std::vector<int> missing = missing_();
  int lowest_here = 0;
  while (std::find(missing.begin(), missing.end(), lowest_here) != missing.end()) ++lowest_here;
  if (missing.empty() || lowest_here < rank_) return;
  const Answers answers = waits_->ask(group_);
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
    const std::size_t more = unseen.size() - std::min(unseen.size(), kMostNamed);
    const bool is_one = unseen.size() == 1;
    unseen.resize(unseen.size() - more);
    const std::string rest = more > 0 ? " and " + std::to_string(more) + " more" : "";
    seen.push_back(
        {unseen.front(), ranks_text(unseen) + rest + (is_one ? " has" : " have") + " not come"});
  }
  log::warn("rank " + std::to_string(rank_) + " has waited " + describe_wait(patience_.waited()) +
            " in " + what_ + " of group '" + group_ + "': " + joined(seen) + "; " + hint_);
}

}  // namespace weft::group
