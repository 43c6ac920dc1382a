// How the processes of a job find each other: a URL (or a store that is given) becomes a store that
// all ranks share, and a rank and world size for this one. Blocks.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <weft/base/deadline.h>
#include <weft/base/patience.h>

namespace weft::group {

// A variable's value, or null. Tests give their own environment.
using Environment = std::function<const char*(const char*)>;
Environment process_environment();

// Which meeting of a name this is in this process: 1, 2, … One that is not kept, for not all have
// come, has not been: who tries again meets under the same number.
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

constexpr int kAnyRank = -1;  // of a member that comes and goes, and was given none

struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;  // prefixed for the job, not yet for a group
  // The store to which an earlier rank of the same number was connected; null if there was none.
  c10::intrusive_ptr<c10d::Store> before;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  // The address of this machine by which the others reach it; "" when the store says nothing about
  // it.
  std::string local_address;
  // Released once every rank has come to the store.
  std::shared_ptr<const void> until_all_came;
  std::shared_ptr<Numbered> number;  // null where the ranks need not count
  bool hosts = false;                // the store is in this process
  std::string said_by;               // where rank and world size are from: "RANK and WORLD_SIZE"
};

// Throws Caller, naming what is missing or wrong; Timeout, naming what was waited for.
// `open`: members come and go, and a rank that comes again finds those that are there; one without
// a rank hosts no store.
Rendezvous rendezvous(const RendezvousOptions& options, const Environment& environment,
                      Deadline deadline, bool open = false);

// LOCAL_RANK, or what mpirun and srun set in its place.
std::optional<int> local_rank(const Environment& environment);

}  // namespace weft::group
