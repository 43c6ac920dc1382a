// Who of the job lives, and who is leaving. The lowest rank that runs Weft is the hub: every other
// rank holds one TCP connection to it, over which nothing travels in quiet times. The kernel closes
// a dead process's connection at once, so its death is known, with its rank, in milliseconds,
// whatever the backend; a cut cable is noticed by keep-alives in about 15 s, and so is a rank that
// reads nothing, or as soon as 64 MiB wait for it. The hub passes frames on. Ranks without Weft
// (Python's torch.distributed) are simply not part of it.
//
// Ranks that come to rank 0 connect while the first group is still being joined, so that a death is
// noticed then as well.
//
// All state lives on the job's loop; public functions may be called from every thread and do not
// block unless they take a deadline.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/engine/membership/frame.h>
#include <weft/engine/store/store.h>

namespace weft::group {

class Membership : public std::enable_shared_from_this<Membership> {
 public:
  // What a group is told, on the loop. Ranks are the job's.
  struct Listener {
    std::function<void(int rank, const std::string& how)> lost;
    std::function<void(const Frame& abort)> aborted;
    std::function<void(const Frame& leaving)> leaving;
    std::function<void(int rank, int leaver)> completed;
    std::function<void(int rank)> gone;  // it left the job, without more ado or after Leaving
    std::function<void()> alone;         // the hub left: nothing will come any more
  };

  // Opens this rank's listening socket and publishes it. Not yet usable; see connect.
  static std::shared_ptr<Membership> make(int rank, int size, const std::string& local_address,
                                          std::shared_ptr<StoreBootstrap> store,
                                          std::shared_ptr<EventLoop> loop);
  // Says goodbye.
  ~Membership();

  // Connects to rank 0 as soon as that is there; returns then, or when `stop` says so (rank 0 may
  // be no Weft rank). Throws PeerLost when it was there and is no more, Caller when it gives
  // another world size.
  void connect_to_first(const std::function<bool()>& stop, Deadline deadline);
  // Once all ranks have published (any collective after make() ensures it): finds the hub and
  // connects to it, if that has not happened; the hub waits until all others say that they have
  // joined. Throws as connect_to_first, Timeout, and what `check` throws, which is called in
  // between.
  void connect(const std::function<void()>& check, Deadline deadline);
  // Blocks until every rank has published. Throws Timeout.
  void wait_for_all(Deadline deadline);
  // Whether a rank takes part; known after connect.
  bool has(int rank) const;

  // Tells `listener` about this group's events until forget(group). Ranks that were lost, or left,
  // before are told at once.
  void listen(const std::string& group, Listener listener);
  void forget(const std::string& group);
  // Calls `told`, on the loop, with what ranks ask and answer about their waits (Asking to Called)
  // and means this one.
  void listen_to_waits(std::function<void(const Frame& frame)> told);
  // The hub is gone: nobody hears of anybody any more.
  bool is_alone() const;
  // To all ranks but this one; of those types that name a rank in `number` to that one only.
  void send(Frame frame);

 private:
  void wait_for_hellos(const std::function<void()>& check, Deadline deadline);
  struct Peer;
  struct State;
  explicit Membership(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace weft::group
