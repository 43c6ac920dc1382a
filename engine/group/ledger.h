// SPDX-License-Identifier: Apache-2.0
// Counts the operations that this rank has begun and completed in one group, and knows which ranks
// are leaving it. A rank that drops its group may still have bytes on the way to others, and
// closing the connections would throw them away. So it tells the others how far it came, and leaves
// when they have completed all of that.
//
// Shared by the group and by membership's callbacks, which outlive it. Thread-safe.
//
// It has 26 functions and 15 members, because whether a rank may leave, and whether an operation
// can still complete, follows from all of its counts together, which change under one mutex.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/engine/membership/frame.h>

namespace weft::group {

class Ledger {
 public:
  // `members`: the group's ranks as ranks of the job, in the group's order. `send` passes a frame
  // to the other ranks.
  Ledger(std::string group, int rank, std::vector<int> members, std::function<void(Frame)> send);

  // Numbers a collective: 1, 2, … Throws PeerLost if a member has left that would have to take
  // part.
  std::uint64_t begin_collective();
  void complete_collective(std::uint64_t number);
  std::uint64_t collectives_begun() const;
  // Throws PeerLost if the receiver has left.
  void begin_send(int to);
  // The send has failed: the receiver need not wait for it.
  void fail_send(int to);
  // `from`: a rank, or -1 for any. Throws PeerLost if nothing can arrive from there any more.
  void begin_recv(int from);
  // `from`: as given to begin_recv(). `source`: the sender of the message that was taken, even if
  // the recv failed because of that message; -1: no message.
  void complete_recv(int from, int source);

  // This rank is connected to the others, or has given up. Ranks that leave before that wait for
  // it.
  void on_joined();

  // Events from membership. All ranks are the job's.
  void on_leaving(const Frame& frame);
  void on_completed(int rank, int leaver);
  // The rank will not answer any more: it is lost, or has left the job.
  void on_gone(int rank);
  // The rank does not count as living: it is lost, or has left the group after an error.
  void on_lost(int rank);
  // The reason why a pending operation here will never complete: a rank has left that would have to
  // take part in it.
  std::optional<Error> left_behind() const;
  // As left_behind(), for collectives that have already failed here for lack of that rank.
  std::optional<Error> left_before() const;
  // True if the rank (of the job) has left the group, or is not a member.
  bool has_left(int rank) const;
  // True if the rank (of the group) has left it, and said so.
  bool member_has_left(int rank) const;
  // The ranks that have left the group, by group rank, in the order in which they left.
  std::vector<int> leavers() const;
  // The members that are neither lost nor have left, by group rank, in order.
  std::vector<int> living() const;
  // Throws PeerLost if a rank has left the group without having come to a meeting. `came` returns
  // true if the rank has come, or need not come.
  void throw_if_left_without(const std::function<bool(int rank)>& came) const;
  // "rank 1 has left group 'x'"; "" if none has.
  std::string who_left() const;

  // Tells the others that this rank leaves, and how far it came. Said again, they answer again.
  void say_leaving();
  // Blocks until each of the others has completed everything that this rank took part in, or is
  // gone. `known` tells which ranks answer at all. Returns the ranks for which it still waited at
  // the deadline (empty: none).
  std::vector<int> await_others(const std::function<bool(int)>& known, Deadline deadline);

 private:
  struct Leaver {
    std::uint64_t collectives = 0;
    std::uint64_t messages = 0;  // sent to this rank
    bool answered = false;
    std::size_t place = 0;  // in the order in which ranks have left
  };
  std::uint64_t completed_through() const WEFT_REQUIRES(mutex_);
  std::optional<Error> missed(std::uint64_t last, const std::string& text) const
      WEFT_REQUIRES(mutex_);
  std::optional<Error> never_received(int from, std::uint64_t more) const WEFT_REQUIRES(mutex_);
  void answer_leavers() WEFT_REQUIRES(mutex_);
  int group_rank(int job_rank) const;

  const std::string group_;
  const int rank_;  // in the group
  const std::vector<int> members_;
  const std::function<void(Frame)> send_;

  mutable Mutex mutex_;
  std::condition_variable changed_;
  bool joined_ WEFT_GUARDED_BY(mutex_) = false;
  std::uint64_t begun_ WEFT_GUARDED_BY(mutex_) = 0;
  std::set<std::uint64_t> unfinished_ WEFT_GUARDED_BY(mutex_);
  std::vector<std::uint64_t> sent_ WEFT_GUARDED_BY(mutex_);      // by group rank
  std::vector<std::uint64_t> received_ WEFT_GUARDED_BY(mutex_);  // by group rank
  // Receives that have begun and not completed, by group rank; the last element counts those from
  // any.
  std::vector<std::uint64_t> expected_ WEFT_GUARDED_BY(mutex_);
  std::map<int, Leaver> leavers_ WEFT_GUARDED_BY(mutex_);  // by group rank
  // Group ranks that need nothing more from this one.
  std::set<int> satisfied_ WEFT_GUARDED_BY(mutex_);
  std::set<int> lost_ WEFT_GUARDED_BY(mutex_);  // group ranks
};

}  // namespace weft::group
