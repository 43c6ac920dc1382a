// SPDX-License-Identifier: Apache-2.0
#include <weft/transport/mesh/plan.h>

namespace weft::transport::mesh {

void Plan::clear(int ranks) {
  steps_.clear();
  links_.clear();
  folds_.clear();
  last_of_fold_.clear();
  stage_ = {};
  parts_.resize(static_cast<std::size_t>(ranks));
  for (Parts& parts : parts_) {
    parts.sent = 0;
    parts.received.clear();
  }
}

Plan::Index Plan::push(const Step& step) {
  steps_.push_back(step);
  return static_cast<Index>(steps_.size() - 1);
}

Plan::Index Plan::send(int peer, const std::byte* data, std::size_t bytes) {
  Step step;
  step.action = Action::Send;
  step.peer = rank_of(peer);
  step.number = parts_[static_cast<std::size_t>(step.peer)].sent++;
  step.data = const_cast<std::byte*>(data);
  step.bytes = bytes;
  const Index index = push(step);
  after(stage_.ready, index);
  after(stage_.turn, index);
  return index;
}

Plan::Index Plan::receive(int peer, std::byte* data, std::size_t bytes) {
  Step step;
  step.action = Action::Receive;
  step.peer = rank_of(peer);
  auto& received = parts_[static_cast<std::size_t>(step.peer)].received;
  step.number = static_cast<std::uint32_t>(received.size());
  step.data = data;
  step.bytes = bytes;
  received.push_back(push(step));
  return received.back();
}

Plan::Index Plan::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  Step step;
  step.data = to;
  step.from = from;
  step.bytes = bytes;
  const Index index = push(step);
  after(stage_.ready, index);
  return index;
}

Plan::Index Plan::fold(const Fold::Operands& place) {
  folds_.emplace_back(place);
  last_of_fold_.push_back(kNone);
  return static_cast<Index>(folds_.size() - 1);
}

Plan::Index Plan::add(Index fold, int peer) {
  const Index step = receive(peer, nullptr, folds_[fold].place().bytes);
  steps_[step].action = Action::Fold;
  steps_[step].fold = fold;
  after(last_of_fold_[fold] == kNone ? stage_.ready : last_of_fold_[fold], step);
  last_of_fold_[fold] = step;
  return step;
}

Plan::Index Plan::convert(const Fold::Operands& place) {
  const Index step = copy(nullptr, nullptr, 0);
  steps_[step].fold = fold(place);
  return step;
}

void Plan::after(Index earlier, Index later) {
  if (earlier == kNone) return;
  links_.push_back({later, steps_[earlier].first_link});
  steps_[earlier].first_link = static_cast<Index>(links_.size() - 1);
  ++steps_[later].waits_for;
}

Plan::Index Plan::both(Index one, Index other) {
  const Index joint = push(Step());
  after(one, joint);
  after(other, joint);
  return joint;
}

Plan::Index Plan::all_since(Index first, Index also, bool with_sends) {
  const Index end = next();
  Index only = also, joint = kNone;
  for (Index step = first; step < end; ++step) {
    if (!with_sends && steps_[step].action == Action::Send) continue;
    if (only == kNone) {
      only = step;
    } else if (joint == kNone) {
      joint = both(only, step);
    } else {
      after(step, joint);
    }
  }
  return joint == kNone ? only : joint;
}

std::uint32_t Plan::abandon() {
  std::uint32_t dropped = 0;
  for (Step& step : steps_) {
    step.first_link = kNone;
    if (step.state != State::Waiting) continue;
    step.state = State::Done;
    ++dropped;
  }
  for (Parts& parts : parts_) {
    parts.sent = 0;
    parts.received.clear();
  }
  return dropped;
}

std::byte* Plan::scratch(std::size_t bytes, Scratch& pool) {
  borrowed_.push_back({pool.take(bytes), bytes});
  return borrowed_.back().block.get();
}

void Plan::release(Scratch& pool) {
  for (Borrowed& borrowed : borrowed_) pool.give(std::move(borrowed.block), borrowed.bytes);
  borrowed_.clear();
}

Plan::Step* Plan::expected(int peer, std::uint32_t number) {
  const auto& received = parts_[static_cast<std::size_t>(peer)].received;
  return number < received.size() ? &steps_[received[number]] : nullptr;
}

}  // namespace weft::transport::mesh
