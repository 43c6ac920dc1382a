// SPDX-License-Identifier: Apache-2.0
// The state that all groups of one init_process_group share, and the options of one group.
// Internal.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <weft/base/event_loop.h>
#include <weft/engine/group/continuations.h>
#include <weft/engine/group/waits.h>
#include <weft/engine/membership/member_store.h>
#include <weft/engine/membership/membership.h>
#include <weft/engine/tensor/cuda_devices.h>

namespace weft::group {

// How long to wait for the news of a lost rank: its connections may break before this rank hears of
// the loss.
constexpr auto kLossIsTold = std::chrono::seconds(1);
// The same if that rank's process no longer listens, so that the news is on its way: on a busy
// machine, or past a rank that is stopped, it may take longer.
constexpr auto kLossIsTrue = std::chrono::minutes(1);

// State that all groups of one init_process_group share. The groups own it together; the last one
// ends it.
struct Job {
  std::shared_ptr<EventLoop> loop;
  std::shared_ptr<Membership> membership;
  std::shared_ptr<MemberStores> stores;
  std::shared_ptr<Waits> waits;
  std::atomic<bool> connected{false};  // set once the first communicator of the first group is made
  std::string local_address;
  bool hosts_store = false;  // this process hosts c10d's store, to which the ranks connect
  std::shared_ptr<tensor::CudaDevices> devices;
  const std::shared_ptr<Continuations> continuations = std::make_shared<Continuations>();
  std::shared_ptr<const void> looked_into;  // keeps engine/instruments running while it lives

  Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job();
};

struct CoreOptions {
  int rank = 0;
  int size = 1;
  std::string name;
  c10::Device device = c10::Device(c10::kCPU);
  std::chrono::milliseconds timeout{};
  std::vector<int> global_ranks;
  c10::intrusive_ptr<c10d::Store> store;  // prefixed for this group; the one that the user gets
  // The same over the connection that all groups share (connection_of).
  c10::intrusive_ptr<c10d::Store> own_store;
  std::string backend;  // as the user wrote it
  std::string said_by;  // source of rank and size, for messages; "" for a later group
  // This rank's place in the mesh that has made the group: "shard[3] of replicate[0]"; "" without a
  // mesh. The name of the group is the same on all its ranks, and this is not.
  std::string place_in_mesh;
  std::shared_ptr<Job> job;
  std::string secret;  // of ProcessGroupOptions, as the next
  std::size_t max_connections = 256;

  std::string self() const;   // "group 'x' (rank 0 of 2)", with place_in_mesh behind the 2
  std::string place() const;  // "on " + self()
  void check_rank(int rank, const char* what) const;
};

// A store that the group's first rank keeps, in which its members meet without the job's store;
// null unless all of them run Weft and are connected.
c10::intrusive_ptr<c10d::Store> kept_by_members(const CoreOptions& group);

// Blocks until the loop has finished its present turn and everything that was posted before. Must
// not be called on the loop.
void finish_turn(EventLoop& loop);

}  // namespace weft::group
