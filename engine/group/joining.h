// SPDX-License-Identifier: Apache-2.0
// How a rank meets the other ranks of a group: when the group is made, and when the first operation
// on a device makes the communicator for it. Finds out which ranks are missing, and why a rank will
// not come.
//
// The group's Core owns it. join() runs once, on the thread that makes the group; communicator()
// may be called on any thread. Both block until the other ranks have come, at most for the group's
// timeout.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/engine/group/carriers.h>
#include <weft/engine/group/failure.h>
#include <weft/engine/group/job.h>
#include <weft/engine/group/ledger.h>
#include <weft/engine/group/meeting.h>
#include <weft/engine/store/store.h>
#include <weft/profiling/trace/description.h>
#include <weft/transport/transport.h>

namespace weft::group {

struct Core;

// Leaves the error in the store: the others find it there while the store lives, however late they
// come.
void tell_failure(const CoreOptions& options, const Error& error);
// Tells the other ranks why this one could not join, as far as they need to know.
void tell_given_up(const CoreOptions& options, const Error& error);

class Joining {
 public:
  // All are the group's, and outlive this object.
  Joining(const CoreOptions& options, const trace::Member& member, StoreBootstrap& store,
          Ledger& ledger, Failure& failure, Carriers& carriers);

  // Meets the other ranks. Throws Timeout naming the ranks that did not come, PeerLost naming a
  // rank that was lost meanwhile. `parent` is the group whose ranks make this one: aborting it ends
  // the joining, and a rank that leaves it will not come. Null for the first group.
  void join(Core* parent);
  // Returns the communicator for tensors of this device; makes it if need be. Throws Caller if no
  // backend carries them.
  transport::Communicator& communicator(c10::Device device);

 private:
  void meet_members();
  void await_members();
  void announce(StoreBootstrap* with = nullptr);
  std::function<void()> while_waiting(Meeting& joining) const;
  bool is_first() const;
  void on_all_met(bool all_run_weft);
  struct Attempt;
  void make_communicator(const Carrier& carrier, const c10::Device& device);
  std::shared_ptr<transport::Communicator> meet(const Carrier& carrier, c10::DeviceType type,
                                                const transport::JoinOptions& join);
  void begin(const std::shared_ptr<Attempt>& attempt, const Carrier& carrier,
             const transport::JoinOptions& join) const;
  void await(const Attempt& attempt, c10::DeviceType type);
  Error not_connected(const Error& timeout);
  void throw_if_hopeless();
  void throw_if_out_of_reach();
  bool agrees_with_first(c10::DeviceType type);
  // Finds the members that have not announced that they join.
  Meeting::Missing absent() const;
  std::vector<int> missing_ranks() const;
  Error not_come(const std::vector<int>& ranks) const;
  std::string what() const;
  std::string hint() const;

  const CoreOptions& options_;
  const trace::Member& member_;
  StoreBootstrap& store_;
  Ledger& ledger_;
  Failure& failure_;
  Carriers& carriers_;
  Core* parent_ = nullptr;   // set while join() runs, for the thread in it
  bool has_joined_ = false;  // join() has returned, and operations may begin
  Mutex making_mutex_;       // held while a communicator is made: one at a time
};

}  // namespace weft::group
