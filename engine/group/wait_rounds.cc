// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/mutex.h>
#include <weft/engine/group/wait_rounds.h>
#include <weft/engine/membership/membership.h>

namespace weft::group {

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

struct WaitRounds::Round {
  std::string group;
  std::vector<int> members;
  std::set<int> awaited;  // ranks of the group
  WaitAnswers answers;
  std::function<void(const WaitAnswers&)> done;
  EventLoop::Registration end;
};

std::shared_ptr<Membership> WaitRounds::connected_membership() const {
  auto membership = membership_.lock();
  return membership && connected_ ? membership : nullptr;
}

void WaitRounds::begin(const std::string& group, std::function<void(const WaitAnswers&)> done) {
  const auto membership = connected_membership();
  const auto loop = loop_.lock();
  const auto source = sources_->of(group);
  if (!loop || !source) return done({});
  const auto round = std::make_shared<Round>();
  round->group = group;
  round->members = source->members;
  round->done = std::move(done);
  for (const int rank : source->living()) {
    if (rank == source->rank) continue;
    const bool is_reached =
        membership && membership->has(source->members[static_cast<std::size_t>(rank)]);
    if (is_reached) {
      round->awaited.insert(rank);
    } else {
      round->answers.unasked.push_back(rank);
    }
  }
  const auto number = ++last_round_;
  rounds_[number] = round;
  if (round->awaited.empty()) return end(number);
  round->end = loop->at(Deadline::in(kLimit), [weak = weak_from_this(), number] {
    if (const auto self = weak.lock()) self->end(number);
  });
  Frame frame;
  frame.type = FrameType::Asking;
  frame.number = number;
  frame.group = group;
  membership->send(std::move(frame));
}

void WaitRounds::end(std::uint64_t number) {
  const auto found = rounds_.find(number);
  if (found == rounds_.end()) return;
  const auto round = found->second;
  rounds_.erase(found);
  // A rank that has left meanwhile is not called silent.
  const auto source = sources_->of(round->group);
  for (const int rank : source ? source->living() : std::vector<int>()) {
    if (round->awaited.contains(rank)) round->answers.silent.push_back(rank);
  }
  round->done(round->answers);
}

void WaitRounds::on_answered(const Frame& frame) {
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
  if (round.awaited.empty()) end(answer->round);
}

WaitAnswers WaitRounds::ask(const std::string& group) {
  const auto loop = loop_.lock();
  if (!loop || loop->inside()) return {};
  struct Asked : HostFlag {
    Mutex mutex;
    WaitAnswers answers WEFT_GUARDED_BY(mutex);
  };
  const auto asked = std::make_shared<Asked>();
  loop->post([weak = weak_from_this(), group, asked] {
    const auto self = weak.lock();
    if (!self) return asked->raise();
    self->begin(group, [asked](const WaitAnswers& answers) {
      {
        MutexLock lock(asked->mutex);
        asked->answers = answers;
      }
      asked->raise();
    });
  });
  static_cast<void>(asked->synchronize(Deadline::in(2 * kLimit)));  // the loop may be held up
  MutexLock lock(asked->mutex);
  return asked->answers;
}

}  // namespace weft::group
