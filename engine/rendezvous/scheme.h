// SPDX-License-Identifier: Apache-2.0
// Shared by the schemes of an init method (env, tcp, file, multicast): the numbers that a rank was
// given, the report that it waits, and the functions that join by each scheme.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <weft/base/deadline.h>
#include <weft/base/patience.h>
#include <weft/engine/rendezvous/rendezvous.h>
#include <weft/engine/rendezvous/url.h>

namespace weft::group {

struct Wanted {
  std::optional<int> rank;
  std::optional<int> world_size;
  std::string said_by;  // the source of the two numbers: "RANK and WORLD_SIZE"
};

// Warns on stderr, after the report times, that this rank waits for rank 0 before it can know any
// other rank. The ranks of a job cannot agree yet on one that reports, so one on each machine does:
// the first, or the second if the first is rank 0.
class Seeker {
 public:
  Seeker(const Wanted& wanted, const Environment& environment, WaitReports reports);

  // `why`: the event that it waits for and the last observation, as a part of a sentence.
  void look(const std::function<std::string()>& why);

 private:
  Patience patience_;
  const std::string begin_;
  std::string said_by_;
  bool speaks_ = true;
};

// Throws Caller unless 0 <= rank < world_size.
void check_range(int rank, int world_size);
// Return the number that was given. Throw Caller, which names `method` and the ways to give it.
int require_world_size(const Wanted& wanted, const std::string& method,
                       const char* or_else = ", ?world_size= or WORLD_SIZE");
int require_rank(const Wanted& wanted, const std::string& method,
                 const char* or_else = ", ?rank= or RANK");

// The time left, at most as long as c10d can wait.
std::chrono::milliseconds limit_for_c10d(Deadline deadline);
// Puts the keys of a group under its name. An empty name is that of Python's default group.
c10::intrusive_ptr<c10d::Store> under_name(const c10::intrusive_ptr<c10d::Store>& store,
                                           const std::string& name);
// "tcp://host:port".
std::string at(const std::string& host, int port);

struct TcpAddress {
  std::string host;
  int port = 0;
};

// Join by a scheme: block until this rank has reached the job's store. `open`: members come and go.
// Throw Caller, Timeout and PeerLost.
Rendezvous join_env(const Wanted& wanted, const std::string& group_name,
                    const Environment& environment, Deadline deadline, bool open, Seeker& seeker);
Rendezvous join_tcp(const TcpAddress& address, const Wanted& wanted, const std::string& group_name,
                    const Environment& environment, Deadline deadline, bool open, Seeker& seeker);
Rendezvous join_file(const Url& url, const Wanted& wanted, const std::string& group_name,
                     Deadline deadline, bool open);
Rendezvous join_multicast(const Url& url, const Wanted& wanted, const std::string& group_name,
                          Deadline deadline, Seeker& seeker);

}  // namespace weft::group
