// SPDX-License-Identifier: Apache-2.0
// How the processes of a job find each other: turns a URL (or a given store) into a store that all
// ranks share, and a rank and world size for this process. Blocks.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <weft/base/deadline.h>
#include <weft/base/patience.h>

namespace weft::group {

// Returns a variable's value, or null. Tests pass their own environment.
using Environment = std::function<const char*(const char*)>;
Environment process_environment();

// Numbers the meetings of one name in this process: 1, 2, … A meeting that failed because not all
// ranks came is not kept, so the next attempt has the same number.
class Numbered {
 public:
  explicit Numbered(std::string name);
  ~Numbered();
  Numbered(const Numbered&) = delete;
  Numbered& operator=(const Numbered&) = delete;
  int value() const { return value_; }
  void keep() { is_kept_ = true; }

 private:
  const std::string name_;
  int value_ = 0;
  bool is_kept_ = false;
};

// How this process is to find the others.
struct RendezvousOptions {
  // env://  file:///path  tcp://host:port  tcp://[multicast address]:port; ?rank=&world_size=
  // override the environment.
  std::string init_method = "env://";
  // Override URL and environment.
  std::optional<int> rank{}, world_size{};
  // Stands in for init_method; needs rank and world_size.
  c10::intrusive_ptr<c10d::Store> store{};
  // Isolates jobs that share an address.
  std::string group_name{};
  // After how long a rank says on stderr that it waits for others.
  WaitReports wait_reports = default_wait_reports();
};

constexpr int kAnyRank = -1;  // rank of a member that comes and goes and was given none

struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;  // prefixed for the job, not yet for a group
  // The store that an earlier rank of the same number used; null if there was none.
  c10::intrusive_ptr<c10d::Store> before;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  // The address of this machine for the other ranks; "" if the store does not tell it.
  std::string local_address;
  // To be released once every rank has come to the store.
  std::shared_ptr<const void> until_all_came;
  std::shared_ptr<Numbered> number;  // null if the ranks need no count
  bool hosts = false;                // this process hosts the store
  std::string said_by;               // the source of rank and world size: "RANK and WORLD_SIZE"
};

// Throws Caller, naming the argument that is missing or wrong; Timeout, naming the event that did
// not happen. `open`: members come and go; a rank that joins again finds those that are present,
// and a member without a rank does not host the store.
Rendezvous rendezvous(const RendezvousOptions& options, const Environment& environment,
                      Deadline deadline, bool open = false);

// LOCAL_RANK, or its counterpart of mpirun and srun.
std::optional<int> local_rank(const Environment& environment);

}  // namespace weft::group
