// SPDX-License-Identifier: Apache-2.0
// How a rank leaves the tree, and how the others tell that from its death.
//
// A rank that leaves says goodbye to its neighbours. A neighbour that stays finishes: it sends
// nothing more over that connection, and reads on. Until its neighbours have finished the leaving
// rank passes on the frames of others, such as the goodbye of a rank that leaves at the same time.
// Two neighbours that both leave go on like this: first the child finishes, as soon as all ranks
// below it have, and at last the parent closes the connection. So nobody waits in a circle.
//
// A rank that cannot be reached has died or has left. As long as a neighbour is leaving, the
// goodbye may still come from there.
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <weft/base/log.h>
#include <weft/engine/membership/neighbours.h>
#include <weft/engine/membership/tree.h>

namespace weft::group {

namespace {

// How long a rank that is connecting to one that leaves may take.
constexpr auto kComersCome = std::chrono::milliseconds(100);

}  // namespace

void Neighbours::leave(std::chrono::milliseconds patience, std::function<void(bool)> left) {
  if (left_ || is_closed_) return;
  left_ = std::move(left);
  suspects_->stop();
  // Keeps this object until it has left.
  leaves_until_ = loop_->at(Deadline::in(patience), [self = shared_from_this()] {
    log::debug("rank " + std::to_string(self->rank_) +
               " leaves the job, and not all of its neighbours have noticed");
    self->end(false);
  });
  for (const auto& [rank, link] : links_) say_goodbye(*link);
  for (int rank = rank_ + 1; rank < own_.size && has_settled_; ++rank) {
    if (is_adopted(rank) && !links_.contains(rank)) comers_.insert(rank);
  }
  if (!comers_.empty()) {
    stops_expecting_ = loop_->at(Deadline::in(kComersCome), [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (!self || self->is_closed_) return;
      self->comers_.clear();
      self->go_on_leaving();
    });
  }
  go_on_leaving();
}

void Neighbours::say_goodbye(Link& link) {
  link.send(encode({FrameType::Goodbye, rank_, 0, "", ""}));
  if (link.rank() == parent_) has_told_parent_ = true;
}

void Neighbours::on_goodbye(int from) {
  const auto found = links_.find(from);
  if (found != links_.end() && !left_) found->second->finish();
}

// Without a goodbye on either side the end of the bytes is the end of the neighbour's process.
bool Neighbours::on_read_all(Link& link) {
  if (!left_ || !link.has_greeted()) return false;
  // In a later turn: the link is in use.
  loop_->post([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->go_on_leaving();
  });
  return true;
}

// Finishes, and ends, as soon as the other ranks allow it.
void Neighbours::go_on_leaving() {
  if (!left_ || is_closed_ || dialled_ || dials_again_) return;
  const auto has_finished = [](const auto& one) { return one.second->has_read_all(); };
  const auto below = links_.upper_bound(rank_);
  if (!std::all_of(below, links_.end(), has_finished)) return;
  std::erase_if(comers_, [this](int rank) { return !is_present(rank); });
  if (!comers_.empty()) return;
  for (auto above = links_.begin(); above != below; ++above) above->second->finish();
  if (!std::all_of(links_.begin(), below, has_finished)) return;
  end(true);
}

// --- Ranks that cannot be reached ---

bool Neighbours::is_present(int rank) const {
  return known_.is_present(rank) && !suspects_->contains(rank);
}

// True if this rank has become the parent of that one, because the ranks between them are gone.
bool Neighbours::is_adopted(int rank) const {
  const auto present = [this](int one) { return is_present(one); };
  return present(rank) && static_parent(rank) != rank_ && parent_of(rank, present) == rank_;
}

// This rank's parent is behind a cable that was cut, and so may be those that would be its parent
// next. Asks one rank of each other machine.
void Neighbours::ask_machines() {
  std::set<std::string> hosts{own_.host};
  std::vector<Published> others;
  for (const auto& [rank, address] : known_.addresses()) {
    if (is_present(rank) && hosts.insert(address.host).second) others.push_back(address);
  }
  silent_->ask(others);
}

// The process of a rank that is no neighbour has ended.
void Neighbours::suspect(int rank, const LinkEnd& end) {
  if (known_.lost().contains(rank) || known_.left().contains(rank)) return;
  if (rank == parent_) has_told_parent_ = false;
  suspects_->add(rank, end);
  find_parent();
  go_on_leaving();
}

void Neighbours::end(bool in_order) {
  is_closed_ = true;
  for (const auto& [rank, link] : links_) {
    link->flush();
    link->end();
  }
  links_.clear();
  strangers_.take_all();
  dialled_.reset();
  dials_again_.reset();
  expecting_.reset();
  door_->close();
  awaited_.reset();
  silent_.reset();
  leaves_until_.reset();
  stops_expecting_.reset();
  left_(in_order);
}

}  // namespace weft::group
