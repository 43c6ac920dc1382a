// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <span>
#include <string_view>
#include <utility>

#include <sys/epoll.h>
#include <sys/socket.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/shortage.h>
#include <weft/engine/membership/neighbours.h>
#include <weft/engine/membership/tree.h>
#include <weft/engine/store/address.h>

namespace weft::group {

namespace {

constexpr auto kHelloPatience = std::chrono::seconds(10);
constexpr auto kRest = std::chrono::milliseconds(100);
// How long the children of a rank that is gone may take to connect to this one, before this rank
// looks whether they live.
constexpr auto kChildrenCome = std::chrono::milliseconds(20);
constexpr int kTlsWarnings = 16;

// True if the frame is for one rank, named by `number`.
bool names_recipient(const Frame& frame) {
  return frame.type == FrameType::Completed || frame.type == FrameType::Answer ||
         frame.type == FrameType::Speak || frame.type == FrameType::Called ||
         frame.type == FrameType::StoreRequest || frame.type == FrameType::StoreReply;
}

constexpr std::string_view kPurpose = "weft membership challenge 1";

// A proof holds for one rank of one job.
std::vector<std::byte> bound(const Published& listener, int rank) {
  const std::string text =
      listener.token + " " + std::to_string(listener.size) + " " + std::to_string(rank);
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

void send_challenge(Link& link, int rank, const std::vector<std::byte>& message) {
  link.send(encode({FrameType::Challenge, rank, 0, "",
                    std::string(reinterpret_cast<const char*>(message.data()), message.size())}));
}

}  // namespace

Neighbours::Neighbours(std::shared_ptr<EventLoop> loop, int rank, Published own,
                       Descriptor listening, std::string secret, Events events)
    : loop_(std::move(loop)),
      rank_(rank),
      own_(std::move(own)),
      door_(std::make_shared<Door>(loop_, std::move(listening), "rank " + std::to_string(rank))),
      secret_(std::move(secret)),
      events_(std::move(events)),
      strangers_(static_cast<std::size_t>(own_.size)),
      ways_(static_cast<std::size_t>(own_.size), -1) {
  static_cast<void>(known_.take({FrameType::Here, rank_, 0, "", encode(own_)}));
}

void Neighbours::start() {
  const auto weak = weak_from_this();
  const auto greets = [weak] {
    const auto self = weak.lock();
    return self && !self->strangers_.is_empty();
  };
  const auto ended = [weak](int who, LinkEnd how) {
    const auto self = weak.lock();
    // While ranks join, one that cannot be reached from here may still connect to this one.
    if (!self || (how.is_cut && !self->has_settled_)) return;
    if (!self->has_settled_)
      how.how += " before it had connected to rank " + std::to_string(self->rank_);
    self->suspect(who, how);
  };
  awaited_ = std::make_shared<AwaitedRanks>(loop_, greets, ended);
  silent_ = std::make_shared<SilentMachines>(loop_);
  suspects_ = std::make_shared<Suspects>(
      loop_,
      [weak] {
        const auto self = weak.lock();
        return self && std::any_of(self->links_.begin(), self->links_.end(), [&](const auto& one) {
                 return self->known_.left().contains(one.first);
               });
      },
      [weak](int who, const LinkEnd& how) {
        if (const auto self = weak.lock()) self->note_lost(who, how);
      });
  door_->open(
      [weak](Descriptor socket) {
        if (const auto self = weak.lock()) self->take_in(std::move(socket));
      },
      [weak] {
        const auto self = weak.lock();
        return self && self->makes_room();
      });
}

// --- Links ---

Neighbours::LinkPointer Neighbours::make_link(Descriptor socket, int rank) {
  const auto weak = weak_from_this();
  const auto link =
      std::make_shared<Link>(loop_, std::move(socket), own_.size, rank,
                             Link::Events{.frame =
                                              [weak](Link& from, const Frame& frame) {
                                                if (const auto self = weak.lock())
                                                  self->on_frame(from, frame);
                                              },
                                          .read_all =
                                              [weak](Link& from) {
                                                const auto self = weak.lock();
                                                return self && self->on_read_all(from);
                                              },
                                          .ended =
                                              [weak](Link& from, const LinkEnd& end) {
                                                if (const auto self = weak.lock())
                                                  self->on_ended(from, end);
                                              }});
  link->start(kHelloPatience);
  return link;
}

void Neighbours::take_in(Descriptor socket) {
  const LinkPointer stranger = make_link(std::move(socket), -1);
  if (!secret_.empty())
    stranger->challenge.emplace(transport::Side::Listener, secret_, kPurpose, bound(own_, rank_));
  // There is room for all ranks: one whose connection is closed takes this rank for lost.
  if (const auto oldest = strangers_.add(stranger)) refuse(**oldest, kTooManyStrangers);
}

bool Neighbours::makes_room() {
  const auto oldest = strangers_.make_room();
  if (oldest) refuse(**oldest, kNoDescriptorForStrangers);
  return oldest.has_value();
}

void Neighbours::on_frame(Link& link, const Frame& frame) {
  if (!link.has_greeted())
    return frame.type == FrameType::Challenge ? on_challenge(link, frame) : on_hello(link, frame);
  handle(frame, link.rank());
}

void Neighbours::on_hello(Link& link, const Frame& hello) {
  const bool is_ours = link.rank() >= 0;  // this rank has connected
  if (link.challenge && !link.challenge->is_proven())
    return refuse(link, "it did not prove that it knows the group's secret");
  const bool is_expected = hello.type == FrameType::Hello && hello.rank != rank_ &&
                           (is_ours ? hello.rank == link.rank()
                                    : hello.text == own_.token && !links_.contains(hello.rank) &&
                                          !known_.lost().contains(hello.rank));
  if (!is_expected) return refuse(link, "it is not of this job");
  const LinkPointer stay = link.shared_from_this();
  link.greeted(hello.rank);
  strangers_.remove(stay);
  if (is_ours) dialled_.reset();
  links_[hello.rank] = stay;
  if (awaited_) awaited_->came(hello.rank);
  comers_.erase(hello.rank);
  if (!is_ours) link.send(encode({FrameType::Hello, rank_, 0, "", ""}));
  greet(link);
  if (is_ours) events_.placed();
}

void Neighbours::refuse(Link& link, const std::string& why) {
  link.end();
  on_ended(link, {why});
}

void Neighbours::open(Link& link, const Published& address) {
  if (secret_.empty()) return link.send(encode({FrameType::Hello, rank_, 0, "", address.token}));
  link.challenge.emplace(transport::Side::Connector, secret_, kPurpose,
                         bound(address, link.rank()));
  try {
    send_challenge(link, rank_, link.challenge->open());
  } catch (const Error& error) {  // the system gives no random bytes
    log::warn("rank " + std::to_string(rank_) + " cannot connect to rank " +
              std::to_string(link.rank()) + " yet: " + error.text());
    link.end();
    on_ended(link, {error.text(), true});
  }
}

void Neighbours::on_challenge(Link& link, const Frame& frame) {
  if (!link.challenge)
    return refuse(link, "it was given ProcessGroupOptions::secret, and this rank none");
  const auto answer = link.challenge->answer(std::as_bytes(std::span(frame.text)));
  if (!answer) return refuse(link, answer.error().text() + " of this group");
  if (!answer.value().empty()) send_challenge(link, rank_, answer.value());
  if (link.rank() >= 0 && link.challenge->is_proven()) {
    const std::string& token = known_.addresses().at(link.rank()).token;
    link.send(encode({FrameType::Hello, rank_, 0, "", token}));
  }
}

// Tells the other side what this rank knows.
void Neighbours::greet(Link& link) {
  for (const Frame& frame : known_.all()) link.send(encode(frame));
  if (link.rank() == parent_) {
    for (const int rank : joined_) link.send(encode({FrameType::Joined, rank, 0, "", ""}));
  }
  if (left_) say_goodbye(link);
}

void Neighbours::on_ended(Link& link, const LinkEnd& end) {
  const LinkPointer stay = link.shared_from_this();
  const int rank = link.rank();
  if (is_closed_) return;
  if (strangers_.remove(stay) || rank < 0) {
    const std::string text = "a connection to the group's port was closed: " + end.how;
    const bool is_warned = end.is_of_tls && ++tls_warnings_ <= kTlsWarnings;
    is_warned ? log::warn("rank " + std::to_string(rank_) + ": " + text) : log::debug(text);
    return;
  }
  if (dialled_ == stay) {
    dialled_.reset();
    if (!end.is_cut) return suspect(rank, end);
    if (dials_until_.passed()) return note_lost(rank, end);
    dials_again_ = loop_->at(Deadline::in(kRest), [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->dial();
    });
    return;
  }
  const auto found = links_.find(rank);
  if (found == links_.end() || found->second != stay) return;
  links_.erase(found);
  if (known_.left().contains(rank)) {
    find_parent();
  } else if (!left_) {
    note_lost(rank, end);
  } else if (!link.has_read_all()) {
    // It may be looking for another parent.
    suspect(rank, end);
  }
  go_on_leaving();
}

// --- Frames ---

void Neighbours::send(Frame frame) {
  frame.rank = rank_;
  known_.number(frame);
  if (frame.type == FrameType::Joined) return take_news(frame, rank_);
  static_cast<void>(known_.take(frame));
  pass_on(frame, rank_);
}

void Neighbours::handle(const Frame& frame, int from) {
  switch (frame.type) {
    case FrameType::Hello:
    case FrameType::Challenge: return;
    case FrameType::Here:
    case FrameType::Lost:
    case FrameType::Goodbye:
    case FrameType::Joined: return take_news(frame, from);
    default: break;
  }
  if (frame.rank == rank_ || !known_.take(frame)) return;
  ways_[static_cast<std::size_t>(frame.rank)] = from;
  if (frame.type == FrameType::Completed) return take_answers(frame, from);
  const bool is_meant =
      !names_recipient(frame) || frame.number == static_cast<std::uint64_t>(rank_);
  if (is_meant) events_.frame(frame);
  if (!is_meant || !names_recipient(frame)) pass_on(frame, from);
}

// Other ranks have completed the operations of one that is leaving a group.
void Neighbours::take_answers(const Frame& frame, int from) {
  const bool is_meant = frame.number == static_cast<std::uint64_t>(rank_);
  for (const int rank : completers(frame)) {
    ways_[static_cast<std::size_t>(rank)] = from;
    if (is_meant) events_.frame({FrameType::Completed, rank, frame.number, frame.group, ""});
  }
  if (!is_meant) pass_on(frame, from);
}

void Neighbours::take_news(const Frame& frame, int from) {
  if (frame.type == FrameType::Joined) {
    if (!joined_.insert(frame.rank).second) return;
    const auto parent = links_.find(parent_);
    if (parent != links_.end()) parent->second->send(encode(frame));
    return events_.placed();
  }
  if (frame.type == FrameType::Goodbye && from == frame.rank) on_goodbye(from);
  // The other ranks take this one for lost: their connections to it end, which it will notice.
  if (frame.rank == rank_ || !known_.take(frame)) return;
  pass_on(frame, from);
  if (frame.type == FrameType::Here) return;
  std::fill(ways_.begin(), ways_.end(), -1);
  suspects_->remove(frame.rank);
  if (frame.type == FrameType::Lost) {
    drop_link(frame.rank);
    if (frame.rank == parent_) has_told_parent_ = false;
  }
  events_.frame(frame);
  find_parent();
  go_on_leaving();
}

void Neighbours::drop_link(int rank) {
  const auto found = links_.find(rank);
  if (found == links_.end()) return;
  found->second->end();
  links_.erase(found);
}

void Neighbours::note_lost(int rank, const LinkEnd& end) {
  log::debug("rank " + std::to_string(rank) + " is lost: " + end.how + " (as rank " +
             std::to_string(rank_) + " has noticed)");
  take_news({FrameType::Lost, rank, end.is_cut ? kCut : 0, "", end.how}, rank_);
  // Otherwise this rank would wait for each rank of that machine in turn, and nobody would notice
  // the loss of those that are nobody's neighbours here.
  const auto silent = known_.address_of(rank);
  if (!end.is_silent || !silent || silent->host == own_.host) return;
  for (const auto& [other, address] : known_.addresses()) {
    if (address.host == silent->host && known_.is_present(other))
      take_news({FrameType::Lost, other, kCut, "", "its machine does not answer"}, rank_);
  }
}

// Sends an answer for one rank only on the way to that rank: a thousand ranks that leave at once
// send a million of them.
void Neighbours::pass_on(const Frame& frame, int from) {
  const bool is_answer = frame.type == FrameType::Completed;
  const std::string bytes = is_answer ? "" : encode(frame);
  const auto send = [&](Link& link) { is_answer ? link.answer(frame) : link.send(bytes); };
  if (names_recipient(frame)) {
    if (frame.number >= static_cast<std::uint64_t>(own_.size)) return;
    const int to = static_cast<int>(frame.number);
    const auto direct = links_.find(links_.contains(to) ? to : ways_[frame.number]);
    if (direct != links_.end() && direct->first != from && direct->second->can_send())
      return send(*direct->second);
  }
  for (const auto& [rank, link] : links_) {
    if (rank != from && rank != frame.rank) send(*link);
  }
}

// --- The place in the tree ---

void Neighbours::adopt_parent(int rank, const Published& address, Descriptor socket) {
  if (is_closed_ || parent_ >= 0) return;
  static_cast<void>(known_.take({FrameType::Here, rank, 0, "", encode(address)}));
  parent_ = rank;
  dials_until_ = Deadline::in(kDialPatience);
  dialled_ = make_link(std::move(socket), rank);
  open(*dialled_, address);
}

void Neighbours::settle(const std::map<int, Published>& addresses) {
  for (const auto& [rank, address] : addresses)
    take_news({FrameType::Here, rank, 0, "", encode(address)}, rank_);
  has_settled_ = true;
  door_->warn();
  find_parent();
  events_.placed();
}

void Neighbours::find_parent() {
  if (is_closed_ || !has_settled_) return;
  const auto present = [this](int rank) { return is_present(rank); };
  expect_children();
  if (parent_ >= 0 && (present(parent_) || has_told_parent_)) return;
  dialled_.reset();
  dials_again_.reset();
  if (parent_ >= 0 && known_.is_cut(parent_)) ask_machines();
  parent_ = parent_of(rank_, present);
  if (parent_ < 0) return events_.placed();
  dials_until_ = Deadline::in(kDialPatience);
  dial();
}

void Neighbours::dial() {
  if (is_closed_ || parent_ < 0 || !is_present(parent_)) return;
  const Published& address = known_.addresses().at(parent_);
  if (silent_->contains(address.host)) {
    // In a later turn: there may be many such machines, each of which this rank then loses.
    dials_again_ = loop_->at(Deadline::in(std::chrono::seconds(0)), [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self) self->note_lost(self->parent_, {"its machine does not answer", true, true});
    });
    return;
  }
  try {
    dialled_ = make_link(dial_socket(address), parent_);
    open(*dialled_, address);
  } catch (const Error& error) {
    if (error.native_code() == ECONNREFUSED) return suspect(parent_, {error.text()});
    if (error.blame() != Blame::Busy && dials_until_.passed())
      return note_lost(parent_, {error.text(), true, true});
    log::debug(error.text());
    dials_again_ = loop_->at(Deadline::in(kRest), [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->dial();
    });
  }
}

void Neighbours::await(int rank, const Published& address) {
  // A loopback address may be another machine's.
  if (!awaited_ || links_.contains(rank) || (is_loopback(address.host) && !is_loopback(own_.host)))
    return;
  try {
    awaited_->watch(rank, address.host, address.port);
  } catch (const Error& error) {
    log::debug("rank " + std::to_string(rank) + ": " + error.text());
  }
}

// The children of a rank that is gone connect to this one, which is their next parent. If one of
// them has died too, nobody else notices it.
void Neighbours::expect_children() {
  if (expecting_) return;
  expecting_ = loop_->at(Deadline::in(kChildrenCome), [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self || self->is_closed_) return;
    for (int rank = self->rank_ + 1; rank < self->own_.size; ++rank) {
      if (self->is_adopted(rank) && !self->links_.contains(rank))
        self->await(rank, self->known_.addresses().at(rank));
    }
  });
}

}  // namespace weft::group
