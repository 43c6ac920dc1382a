// SPDX-License-Identifier: Apache-2.0
// This rank's place in the tree of the job's ranks (tree.h): one connection to its parent, one to
// each child. Frames for all ranks pass from link to link, and so reach each rank once. A rank
// whose parent has died or left connects to the next one, and both then tell each other what they
// know. So no rank is one that the others cannot do without, and a dead rank's neighbours, of whom
// each remaining part of the tree has one, tell of its death at once.
//
// Frames for one rank take the way on which that rank's own frames have arrived. A rank that does
// not know it passes them to all its neighbours.
//
// Membership owns it. For the thread of the job's loop, but for lacks(); nothing blocks.
//
// It has more than 25 functions and 15 members, beside those of its parts (Door, Link, Known,
// AwaitedRanks, SilentMachines, Suspects): each piece of news may change who this rank's parent is,
// whom it expects and whether it may leave, and these follow from the links and the news together.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/descriptor.h>
#include <weft/base/event_loop.h>
#include <weft/base/strangers.h>
#include <weft/engine/membership/awaited_ranks.h>
#include <weft/engine/membership/door.h>
#include <weft/engine/membership/frame.h>
#include <weft/engine/membership/known.h>
#include <weft/engine/membership/link.h>
#include <weft/engine/membership/published.h>
#include <weft/engine/membership/silent_machines.h>
#include <weft/engine/membership/suspects.h>

namespace weft::group {

class Neighbours : public std::enable_shared_from_this<Neighbours> {
 public:
  struct Events {
    // A frame for this rank has arrived, or news that this rank had not known. Lost frames of this
    // rank's own finding too.
    std::function<void(const Frame&)> frame;
    // This rank has a parent, or none and is the root.
    std::function<void()> placed;
  };
  // `own`: at which `listening` listens. The job has own.size ranks. With a secret, both ends of a
  // connection prove that they know it before they read anything else.
  Neighbours(std::shared_ptr<EventLoop> loop, int rank, Published own, Descriptor listening,
             std::string secret, Events events);

  // Begins to take in children.
  void start();
  // Sends the frame to all other ranks, or to the rank that it names.
  void send(Frame frame);
  // Takes the connection as that to the parent, unless there is one.
  void adopt_parent(int rank, const Published& address, Descriptor socket);
  // From now on this rank looks for a parent by itself; `addresses` are some that it may need.
  void settle(const std::map<int, Published>& addresses);
  // Notices it if the process at that address ends before the rank has connected to this one.
  void await(int rank, const Published& address);
  // Says goodbye, and goes on passing on the frames of others until no neighbour sends anything
  // this way any more, or `patience` is over (not in order); then closes all connections and calls
  // `left`. Lives until then. Says goodbye to its next parent too, if it is looking for one.
  void leave(std::chrono::milliseconds patience, std::function<void(bool in_order)> left);

  const Known& known() const { return known_; }
  bool is_root() const { return has_settled_ && parent_ < 0; }
  bool is_placed() const { return is_root() || (parent_ >= 0 && links_.contains(parent_)); }
  // The ranks that have said that they have joined.
  const std::set<int>& joined() const { return joined_; }
  // errno of the last accept() if it failed for lack of resources, else 0. Any thread may ask.
  int lacks() const { return door_->lacks(); }

 private:
  using LinkPointer = std::shared_ptr<Link>;
  LinkPointer make_link(Descriptor socket, int rank);
  void take_in(Descriptor socket);
  bool makes_room();
  void on_frame(Link& link, const Frame& frame);
  void on_hello(Link& link, const Frame& hello);
  void on_challenge(Link& link, const Frame& frame);
  void refuse(Link& link, const std::string& why);
  // Begins to talk to the rank that this one has connected to.
  void open(Link& link, const Published& address);
  void on_ended(Link& link, const LinkEnd& end);
  void greet(Link& link);
  void handle(const Frame& frame, int from);
  void take_answers(const Frame& frame, int from);
  void take_news(const Frame& frame, int from);
  void note_lost(int rank, const LinkEnd& end);
  void drop_link(int rank);
  void pass_on(const Frame& frame, int from);
  void find_parent();
  void ask_machines();
  void dial();
  void expect_children();
  void say_goodbye(Link& link);
  void on_goodbye(int from);
  bool on_read_all(Link& link);
  void go_on_leaving();
  bool is_present(int rank) const;
  bool is_adopted(int rank) const;
  void suspect(int rank, const LinkEnd& end);
  void end(bool in_order);

  const std::shared_ptr<EventLoop> loop_;
  const int rank_;
  const Published own_;
  const std::shared_ptr<Door> door_;
  const std::string secret_;
  const Events events_;
  Known known_;

  std::map<int, LinkPointer> links_;  // to neighbours that have greeted, by rank
  Strangers<LinkPointer> strangers_;  // accepted, and not greeted yet
  std::shared_ptr<AwaitedRanks> awaited_;
  std::shared_ptr<Suspects> suspects_;
  std::shared_ptr<SilentMachines> silent_;
  int parent_ = -1;
  LinkPointer dialled_;  // to the parent, until it has greeted
  Deadline dials_until_ = Deadline::never();
  EventLoop::Registration dials_again_;
  EventLoop::Registration expecting_;
  std::vector<int> ways_;  // the neighbour from which a rank's frames arrive; -1: not known
  std::set<int> joined_;
  bool has_settled_ = false;
  std::function<void(bool)> left_;  // set while this rank is leaving
  bool has_told_parent_ = false;    // that this rank is leaving
  EventLoop::Registration leaves_until_;
  std::set<int> comers_;  // ranks that are connecting to this one, and do not know that it leaves
  EventLoop::Registration stops_expecting_;
  bool is_closed_ = false;
  int tls_warnings_ = 0;
};

}  // namespace weft::group
