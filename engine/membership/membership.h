// SPDX-License-Identifier: Apache-2.0
// Which ranks of the job are alive, and which are leaving. The ranks that run Weft form a tree of
// TCP connections (neighbours.h), which are idle in quiet times. The kernel closes a dead process's
// connections at once, so the others learn of the death, with its rank, in milliseconds,
// independent of the backend. A keep-alive notices a cut cable in about 15 s, and then all ranks of
// the machine that does not answer are lost; a rank that reads nothing is lost after that time too,
// or as soon as 64 MiB wait for it. Ranks without Weft (Python's torch.distributed) simply take no
// part.
//
// Ranks connect while the first group is still being joined, so that a death is noticed then too.
// After joining no rank is special, and nobody needs the store.
//
// All state lives on the job's loop; public functions may be called from every thread and do not
// block unless they take a deadline.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/engine/membership/frame.h>
#include <weft/engine/membership/published.h>
#include <weft/engine/store/store.h>

namespace weft::group {

class Membership : public std::enable_shared_from_this<Membership> {
 public:
  // Events that a group is told of, on the loop. Ranks are the job's.
  struct Listener {
    std::function<void(int rank, const std::string& how)> lost;
    std::function<void(const Frame& abort)> aborted;
    std::function<void(const Frame& leaving)> leaving;
    std::function<void(int rank, int leaver)> completed;
    std::function<void(int rank)> gone;  // it left the job; a Leaving frame may have preceded
  };

  // Opens this rank's listening socket. Call publish() and connect() before use. With a secret, the
  // address is signed, and ranks prove to each other that they know it.
  static std::shared_ptr<Membership> make(int rank, int size, const std::string& local_address,
                                          std::shared_ptr<StoreBootstrap> store,
                                          std::shared_ptr<EventLoop> loop,
                                          const std::string& secret = {});
  // As leave(), without the wait.
  ~Membership();

  // Says goodbye to the job, and waits until the neighbours in the tree do not need this rank any
  // more, at most for kLeavingPatience. Call it last, outside of the loop.
  void leave();

  // Publishes this rank's address in the store, with the backends of its first group; together with
  // the next key that `with` sets, if it is not null.
  void publish(const std::string& backends, StoreBootstrap* with = nullptr);
  // The backends that the rank has published; nothing if it has not, or does not run Weft. Called
  // while this rank joins.
  std::optional<std::string> backends_of(int rank);
  // The key that is set once the rank has published is this text and the rank.
  static const char* key_of_ranks();

  // Connects to this rank's parent in the tree as soon as that has published its address; if the
  // parent is late, to the parent's parent. Also returns when stop() is true, since they may not
  // run Weft, or at the deadline. Throws PeerLost if the parent has published and is gone, Caller
  // if it gives another world size, Busy without descriptors.
  void connect_early(const std::function<bool()>& stop, Deadline deadline);
  // Looks in the store for this rank's children that have published their address, and from now on
  // notices it if one of them dies before it has connected. To be called again now and then, as
  // long as ranks are missing.
  void look_for_published();
  // Takes this rank's place in the tree, unless that has happened. Call it once all ranks have
  // published (any collective after make() ensures that). At the root, waits until all others say
  // that they have joined. Calls check() in between and passes its exceptions through. Throws as
  // connect_early(), and Timeout. `all_take_part`: every rank has published, so the store need not
  // be asked for that.
  void connect(const std::function<void()>& check, Deadline deadline, bool all_take_part = false);
  // Blocks until every rank has published. Throws Timeout.
  void wait_for_all(Deadline deadline);
  // True if the rank takes part; known after connect().
  bool has(int rank) const;

  // Tells `listener` about this group's events until forget(group), beginning with those that have
  // happened: aborts, ranks that are lost, ranks that have left. A rank that leaves the group after
  // forget() is answered that this one has completed everything.
  void listen(const std::string& group, Listener listener);
  void forget(const std::string& group);
  // Calls `told`, on the loop, with frames about waits (Asking to Called) that are meant for this
  // rank.
  void listen_to_waits(std::function<void(const Frame& frame)> told);
  // The same for frames about stores that ranks keep (StoreRequest, StoreReply).
  void listen_to_stores(std::function<void(const Frame& frame)> told);
  // A rank that is lost or has left the job.
  struct Gone {
    std::string how;  // the rest of a sentence that begins with the rank: "is lost: …"
    // Its machine does not answer: the rank may live on, out of reach.
    bool is_cut = false;
    std::optional<Published> address = {};  // if it is lost
  };
  // As far as this rank has heard.
  std::optional<Gone> gone(int rank) const;
  // Where the rank listens, if it takes part and this rank has heard so. Outside of the loop; waits
  // for a turn of it.
  std::optional<Published> address_of(int rank) const;
  // True as long as no rank is lost or has left. Until then no frame is lost either.
  bool is_whole() const;
  // Sends the frame to all other ranks; a frame whose type names a rank in `number`, to that rank
  // only. A frame for one rank may be lost with a rank on its way that dies or leaves: if the job
  // is not whole, the sender repeats a frame that has no answer.
  void send(Frame frame);

 private:
  struct State;
  explicit Membership(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace weft::group
