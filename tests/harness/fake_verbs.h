// SPDX-License-Identifier: Apache-2.0
// RDMA devices that exist only in this process, for tests of code that uses libibverbs. Connected
// queue pairs execute a posted request at once, by copying; its completion waits in the queue.
// Registrations are checked as a device checks them: a write to memory that is not registered fails
// and writes nothing. Only for one thread, except registering. Completions wake no thread, so an
// event loop that is to see them must have something else to do.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <weft/transport/verbs/device.h>

namespace weft::harness {

class FakeVerbs {
 public:
  FakeVerbs();
  ~FakeVerbs();
  FakeVerbs(const FakeVerbs&) = delete;
  FakeVerbs& operator=(const FakeVerbs&) = delete;

  // Opens a device with one active RoCE port, or as many as give_ports() set, with the addresses
  // 192.0.2.1, 192.0.2.2, …
  std::shared_ptr<transport::verbs::Device> open() const;
  transport::verbs::Path path() const;

  void give_ports(int count);
  // Returns the ports of the existing queue pairs.
  std::vector<int> ports_in_use() const;

  std::size_t registrations() const;
  std::vector<Slice> registered() const;  // the memory of each
  // Makes registering fail from now on, as at the limit of locked memory.
  void limit_locked_memory(bool is_limited);
  // Marks memory as mapped read-only: registering any of it with write access for the device fails.
  void map_read_only(const void* address, std::size_t bytes);
  // Makes registering a dma-buf fail from now on, as with drivers that do not support it.
  void refuse_dma_bufs(bool is_refusing);
  // Returns how many of the current registrations are dma-bufs (of the fake CUDA driver).
  std::size_t dma_bufs() const;
  // Sets the function that translates an address to where its bytes are, for memory that devices
  // may access but the host may not (a fake GPU's). The host itself reads inline payloads.
  void look_through(std::function<std::byte*(const void*)> behind);
  // Sets a function that the next registration calls in the middle, on its thread.
  void at_next_registration(std::function<void()> call);
  // Sets a function that the next write to a peer's memory calls after half of its bytes. The write
  // then completes unless the peer's queue pair has been destroyed; cutting the pair does not stop
  // it.
  void in_the_next_write(std::function<void()> call);
  // Holds requests that are posted from now on until queues have been polled empty `polls` times;
  // then executes them and holds no more.
  void hold(std::size_t polls);
  // Makes the next destruction of such an object fail with this error.
  enum class Thing { QueuePair, Registration, CompletionQueue };
  void refuse_to_end(Thing thing, int error);
  std::size_t queue_pairs() const;
  std::uint32_t newest_pair() const;
  // Plays a peer that sends these bytes, and again `times` times whenever that queue pair has
  // posted a receive. left_to_send() returns how many are left.
  void go_on_sending(std::uint32_t queue_pair, const void* bytes, std::size_t count,
                     std::size_t times);
  std::size_t left_to_send() const;
  // Reports an asynchronous event of the device, about that queue pair if it concerns one.
  // unacknowledged() returns how many were not acknowledged.
  void say(ibv_event_type event, std::uint32_t queue_pair = 0);
  std::size_t unacknowledged() const;
  // Returns the number of unused posted receives of that queue pair.
  std::size_t receives_of(std::uint32_t queue_pair) const;

  // Plays a peer that sends arbitrary data to one of our queue pairs: a message as SEND, or a write
  // with an immediate. Only our own code checks the bytes. False if no receive was posted.
  bool send_to(std::uint32_t queue_pair, const void* bytes, std::size_t count) const;
  bool write_to(std::uint32_t queue_pair, std::uint32_t immediate) const;

  struct World;

 private:
  std::unique_ptr<World> world_;
};

}  // namespace weft::harness
