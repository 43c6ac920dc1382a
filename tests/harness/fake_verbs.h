// RDMA devices that exist in this process only, for tests of what stands on libibverbs: queue pairs
// carry out at once what is posted, by copying, once they are joined; a completion waits in its
// queue. Registrations are checked as a device does: who writes where nothing is registered gets an
// error and nothing is written. For one thread, but for registering. Nobody is woken by what comes:
// an event loop that is to see it must have something else to do.
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

  // One device with one active RoCE port, or as many as give_ports() says, with the addresses
  // 192.0.2.1 and on.
  std::shared_ptr<transport::verbs::Device> open() const;
  transport::verbs::Path path() const;

  void give_ports(int count);
  // Of the queue pairs there are.
  std::vector<int> ports_in_use() const;

  std::size_t registrations() const;
  // From now on registering fails like where the limit of locked memory is reached.
  void limit_locked_memory(bool is_limited);
  // Memory that is mapped read-only: registering any of it so that the device may write fails.
  void map_read_only(const void* address, std::size_t bytes);
  // From now on no dma-buf is registered, as by drivers that do not know them.
  void refuse_dma_bufs(bool is_refusing);
  // Of what is registered now, how much came as dma-buf (the fake CUDA driver's).
  std::size_t dma_bufs() const;
  // Where the bytes at an address are, of memory that the host may not touch and devices may (a
  // fake GPU's); what goes inline is read by the host.
  void look_through(std::function<std::byte*(const void*)> behind);
  // Called in the middle of the next registration, by the thread that registers.
  void at_next_registration(std::function<void()> call);
  // Called when half of the next write to a peer's memory has been carried out. The rest is as
  // well, unless the peer's queue pair has been destroyed by then: cutting it does not stop what is
  // under way.
  void in_the_next_write(std::function<void()> call);
  // What is posted from now on is carried out when queues have been found empty so many times, and
  // nothing is held then.
  void hold(std::size_t polls);
  // The next one of these that is to be given back is not, with this error.
  enum class Thing { QueuePair, Registration, CompletionQueue };
  void refuse_to_end(Thing thing, int error);
  std::size_t queue_pairs() const;
  std::uint32_t newest_pair() const;
  // A peer that sends this again whenever that queue pair has posted a receive, so many times; how
  // many are left.
  void go_on_sending(std::uint32_t queue_pair, const void* bytes, std::size_t count,
                     std::size_t times);
  std::size_t left_to_send() const;
  // What the device says beside completions, of that queue pair where it is about one; how much of
  // it was not acknowledged.
  void say(ibv_event_type event, std::uint32_t queue_pair = 0);
  std::size_t unacknowledged() const;
  // Posted receives that nothing has come for, of the queue pair with that number.
  std::size_t receives_of(std::uint32_t queue_pair) const;

  // A peer that says what it likes, to a queue pair of ours: a message as SEND, a write with an
  // immediate, both without bytes checked by anybody but us. False where there was no receive for
  // it.
  bool send_to(std::uint32_t queue_pair, const void* bytes, std::size_t count) const;
  bool write_to(std::uint32_t queue_pair, std::uint32_t immediate) const;

  struct World;

 private:
  std::unique_ptr<World> world_;
};

}  // namespace weft::harness
