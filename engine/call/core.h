// SPDX-License-Identifier: Apache-2.0
// One agent: owns its event loop, its threads and its parts, and joins and leaves the job. Each
// part is a class with a contract of its own; callers go to the part.
//
//   lifetime        whether the agent is open
//   identity        which worker it is
//   devices         the GPUs, device maps and memory that its calls use
//   connections     to and from other workers
//   extensions      references and distributed autograd
//   pauses          tasks that run later
//   outgoing_calls  the calls that it makes, and those that wait for replies
//   incoming_calls  the calls that it serves
//   liveness        probes, and which workers are lost
//   members         workers that come and go
//   shutdown        graceful shutdown
//
// Usable from every thread. make() and leave() block. No part calls another one, or an extension,
// while it holds its mutex, except where its header says so.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/engine/call/agent_identity.h>
#include <weft/engine/call/call_devices.h>
#include <weft/engine/call/connections.h>
#include <weft/engine/call/directory.h>
#include <weft/engine/call/extensions.h>
#include <weft/engine/call/incoming_calls.h>
#include <weft/engine/call/job_members.h>
#include <weft/engine/call/lifetime.h>
#include <weft/engine/call/liveness.h>
#include <weft/engine/call/outgoing_calls.h>
#include <weft/engine/call/pauses.h>
#include <weft/engine/call/shutdown.h>
#include <weft/engine/call/thread_pool.h>
#include <weft/engine/call/types.h>

// The functions that agents call on each other. Their names are part of the wire (docs/wire.md).
namespace weft::rpc::internal {
// A liveness probe: returns at once.
void alive();
}  // namespace weft::rpc::internal

namespace weft::call {

class AgentCore : public std::enable_shared_from_this<AgentCore> {
 public:
  struct Parts {
    WorkerInfo self;
    std::optional<int> world_size;
    Options options;
    std::shared_ptr<tensor::CudaDevices> devices;
    std::shared_ptr<transport::Bootstrap> store;
    // The same store over a connection of its own, where workers come and go: a thread waits there
    // for announcements.
    std::shared_ptr<transport::Bootstrap> announcements;
    // Kept alive as long as the agent, such as the objects that host the store.
    std::vector<std::shared_ptr<const void>> kept;
    // Make the agent's extensions.
    std::function<std::unique_ptr<ReferenceExtension>(AgentCore&)> make_references;
    std::function<std::unique_ptr<ContextExtension>(AgentCore&)> make_contexts;
  };
  // Joins the job: listens, publishes this worker, waits for the others. A rank of -1 stands for
  // any free rank.
  static std::shared_ptr<AgentCore> make(const Parts& parts, const std::string& local_address,
                                         Deadline deadline);
  ~AgentCore();
  void leave() noexcept;

  const WorkerInfo& self() const { return identity_.self; }
  bool closed() const { return lifetime_.closed(); }
  const Options& options() const { return options_; }
  DebugInfo debug_info();

  const std::shared_ptr<EventLoop>& loop() const { return loop_; }
  const std::shared_ptr<ThreadPool>& thread_pool() const { return thread_pool_; }
  Directory& directory() { return directory_; }

  Lifetime& lifetime() { return lifetime_; }
  const AgentIdentity& identity() const { return identity_; }
  CallDevices& devices() { return devices_; }
  Connections& connections() { return connections_; }
  Extensions& extensions() { return extensions_; }
  Pauses& pauses() { return pauses_; }
  OutgoingCalls& outgoing_calls() { return outgoing_calls_; }
  IncomingCalls& incoming_calls() { return incoming_calls_; }
  Liveness& liveness() { return liveness_; }
  JobMembers& members() { return members_; }
  Shutdown& shutdown() { return shutdown_; }

 private:
  explicit AgentCore(const Parts& parts);
  void join(const Parts& parts, const std::string& local_address, Deadline deadline);

  Lifetime lifetime_;
  AgentIdentity identity_;
  const Options options_;
  CallDevices devices_;
  const std::shared_ptr<EventLoop> loop_;
  Connections connections_;
  const std::shared_ptr<ThreadPool> thread_pool_;
  Directory directory_;
  Extensions extensions_;
  Pauses pauses_;
  OutgoingCalls outgoing_calls_;
  IncomingCalls incoming_calls_;
  Liveness liveness_;
  JobMembers members_;
  Shutdown shutdown_;
};

}  // namespace weft::call
