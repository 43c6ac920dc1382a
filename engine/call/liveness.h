// SPDX-License-Identifier: Apache-2.0
// Liveness probes: a worker is asked whether it still lives when a connection to it has ended or it
// does not answer, if anything here depends on it. A worker that does not answer a probe is lost,
// and everything that it holds ends.
//
// Owned by AgentCore. Usable from every thread. Only knock() blocks; probes go by off_loop(). The
// mutex is held only for this class's own members: the extensions and the other parts are called
// without it.
#pragma once

#include <chrono>
#include <exception>
#include <map>
#include <optional>
#include <set>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/directory.h>
#include <weft/engine/call/types.h>

namespace weft::call {

constexpr auto kProbeLimit = std::chrono::seconds(2);  // a live worker answers within this time

class AgentCore;

class Liveness {
 public:
  explicit Liveness(AgentCore& core) : core_(core) {}

  // Sends the worker a liveness probe, if anything here depends on it and no probe is under way. A
  // worker that answers too late counts as lost only if it is asked because a connection has ended.
  enum class Asked { ConnectionEnded, ByTheWay };
  void look_after(int rank, Asked why = Asked::ConnectionEnded);
  // Counts failed messages to that worker that will be sent again. As long as there are any, this
  // worker depends on that one.
  void depend_on(int rank, int change);
  // Whether the worker did not answer the last liveness probe, and has sent nothing since.
  bool is_lost(int rank) const;
  void heard_from(int rank);
  // The lowest rank of the lost workers.
  std::optional<int> first_lost() const;
  // Asks a worker whether it lives, while this worker has not joined yet, and returns why it is
  // lost. Others take no calls from a process without identity; the knock is the only message that
  // they answer. It is the Claims::Ask of this agent.
  std::optional<Error> knock(const Directory::Entry& worker, Deadline deadline);

 private:
  struct Inquiry {
    Asked why = Asked::ByTheWay;
    int failed = 0;  // attempts to ask that failed
  };
  // The outcome of asking a worker once.
  struct Answer {
    std::optional<Error> why_not;  // why there is no answer
    bool is_slow = false;          // it was asked, and did not answer in time
    bool failed_here = false;      // a failure on this side, no sign that the worker is gone
    bool is_gone = false;          // nobody has the rank any more
  };
  enum class Verdict { Alive, AskAgain, Lost, NewlyLost };

  bool depends_on(int rank) const;
  void ask(int rank);
  void ask_again(int rank);
  void asked(const Recipient& asked, const std::exception_ptr& error, bool was_sent);
  Verdict judge(int rank, const Answer& answer);
  void lost(const Recipient& asked, const Answer& answer, bool is_news);

  AgentCore& core_;
  mutable Mutex mutex_;
  // Ranks of workers that cannot be reached any more.
  std::set<int> lost_ WEFT_GUARDED_BY(mutex_);
  // Number of failed messages that will be sent again, by rank.
  std::map<int, int> depends_ WEFT_GUARDED_BY(mutex_);
  // Those under way, by rank.
  std::map<int, Inquiry> inquiries_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
