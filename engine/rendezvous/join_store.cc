// SPDX-License-Identifier: Apache-2.0
#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/engine/rendezvous/job_store.h>
#include <weft/engine/rendezvous/lives.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/backoff.h>
#include <weft/engine/store/store.h>
#include <weft/engine/store/tcp_store.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

// Keys under which rank 0 writes the names of the groups that it joins into the store that it
// hosts.
constexpr const char* kGroupsOfRankZero = "weft/groups";
std::string group_of_rank_zero(std::int64_t number) {
  return "weft/group/" + std::to_string(number);
}

// Describes a group in the words of the program that joins it.
std::string spelled(const std::string& group_name) {
  constexpr std::string_view kRpc = "rpc";  // the name that rpc::init() gives its groups
  if (group_name.empty()) return "the group without a name (init_process_group)";
  if (group_name == kRpc) return "the workers of rpc::init";
  if (group_name.starts_with("rpc/"))
    return "the workers of rpc::init of group_name '" + group_name.substr(4) + "'";
  return "group '" + group_name + "'";
}

// Explains why this rank does not meet rank 0 at its store: "rank 0 has joined group 'a' there,
// this rank joins group 'b'".
std::string other_groups(c10d::Store& store, const std::string& group_name, std::int64_t life) {
  constexpr std::int64_t kMost = 4;
  const auto last = store.add(kGroupsOfRankZero, 0);
  std::string names;
  bool is_among = false;
  for (auto number = std::max<std::int64_t>(1, last - kMost + 1); number <= last; ++number) {
    if (!store.check({group_of_rank_zero(number)})) continue;
    const auto name = store.get(group_of_rank_zero(number));
    const std::string text(name.begin(), name.end());
    is_among = is_among || text == group_name;
    names += (names.empty() ? "" : ", ") + spelled(text);
  }
  const std::string own = spelled(group_name);
  if (names.empty()) return "rank 0 has joined nothing there yet, this rank joins " + own;
  if (life > 1)
    return "rank 0 has joined " + names + " there, and this rank joins " + own +
           " once more (a rank of the same number has joined it before)";
  return "rank 0 has joined " + names + " there, this rank joins " + own +
         (is_among ? "" : "; all ranks must join the same");
}

// After waiting this long at one store, a rank checks whether another store has replaced it.
constexpr std::chrono::milliseconds kLongestAtAStore = std::chrono::seconds(10);

// Returns an empty Descriptor if this process has no descriptor left. The next one that it needs
// fails too, at a point where it can tell the others.
Descriptor connection_beside(const TcpAddress& address, Deadline deadline) {
  try {
    return Descriptor(connect_to(address.host, address.port, deadline));
  } catch (const Error& error) {
    if (error.native_code() != EMFILE) throw;
    return Descriptor();
  }
}

// Joins the store, and waits there until rank 0 has begun this life too: a rank that rejoins at
// once may find the store of the life that has just ended, whose host is about to close it. Returns
// null if that store has ended, or after kLongestAtAStore, since a host that was cut off closes
// nothing. A second, idle connection shows the end first, because c10d's client would log an error
// and a stack trace when the host closes its connection.
c10::intrusive_ptr<c10d::Store> store_if_of_this_life(const TcpAddress& address, int rank,
                                                      const std::string& group_name,
                                                      Deadline deadline, Seeker& seeker,
                                                      std::string& why) {
  const auto store = join_store(address, rank, deadline, seeker);
  const Descriptor beside = connection_beside(address, deadline);
  if (!store->check({kHosted})) return store;  // by Python, or not yet marked
  const auto named = under_name(store, group_name);
  const auto life = named->add(lives(std::to_string(rank)), 0) + 1;
  const auto mine = begun(life);
  const Deadline turn = Deadline::sooner(deadline, Deadline::in(kLongestAtAStore));
  for (Backoff pause; !has_ended(beside); pause.wait(turn)) {
    if (named->check({mine})) return store;
    const bool is_over = turn.passed();
    if (is_over) why = other_groups(*store, group_name, life);
    seeker.look([&] {
      return "rank 0, whose store it has reached at " + at(address.host, address.port) + ": " +
             other_groups(*store, group_name, life);
    });
    if (is_over) return nullptr;
  }
  return nullptr;
}

}  // namespace

void tell_group_of_rank_zero(c10d::Store& store, const std::string& group_name) {
  if (!store.check({kHosted})) return;
  const auto number = store.add(kGroupsOfRankZero, 1);
  store.set(group_of_rank_zero(number),
            std::vector<std::uint8_t>(group_name.begin(), group_name.end()));
}

c10::intrusive_ptr<c10d::Store> join_store(const TcpAddress& address, int rank, Deadline deadline,
                                           Seeker& seeker) {
  const std::string where = at(address.host, address.port);
  try {
    // c10d's client backs off for up to a second if the host is not there yet, so poll more often
    // before using it.
    const auto look = [&](const std::string& failure) {
      seeker.look([&] {
        return "rank 0, which should host the store at " + where + " (" + failure +
               "); it must be started, with that address";
      });
    };
    const auto look_for_answer = [&] { look("it listens but does not answer"); };
    for (Backoff pause;; pause.wait(deadline)) {
      const std::string found = wait_for_listener(address.host, address.port, deadline, look);
      try {
        return connect_to_store(found, address.port, limit_for_c10d(deadline), deadline,
                                look_for_answer);
      } catch (const Error&) {
        throw;
        // It listened just now and may listen again, perhaps as the host's next life.
      } catch (const std::exception& error) {
        if (deadline.passed()) throw;
        log::debug("the store at " + where +
                   " turned this process away: " + tensor::text_of(error));
        look("it closed the connection");
      }
    }
  } catch (const Error& error) {
    if (rank == kAnyRank) {
      throw error.within("a worker without a rank cannot reach the job's store at " + where +
                         ", which the worker that is given rank 0 hosts");
    }
    throw error.within("rank " + std::to_string(rank) + " cannot reach the store of rank 0 at " +
                       where);
  } catch (const std::exception& error) {
    throw Error(deadline.passed() ? Blame::Timeout : Blame::PeerLost,
                "the store of rank 0 at " + where + " did not answer: " + tensor::text_of(error));
  }
}

c10::intrusive_ptr<c10d::Store> join_store_of_this_life(const TcpAddress& address, int rank,
                                                        const std::string& group_name,
                                                        Deadline deadline, Seeker& seeker) {
  std::string why = "the store there belongs to an earlier group";
  for (Backoff pause;; pause.wait(deadline)) {
    try {
      if (auto store = store_if_of_this_life(address, rank, group_name, deadline, seeker, why))
        return store;
    } catch (const Error& error) {
      if (deadline.passed() || error.native_code() == EMFILE) throw;
    } catch (const std::exception& error) {
      log::debug("the store at " + at(address.host, address.port) +
                 " belongs to an earlier group: " + tensor::text_of(error));
    }
    if (deadline.passed()) {
      throw Error(Blame::Timeout, "rank " + std::to_string(rank) + " waits for rank 0 at " +
                                      at(address.host, address.port) + ": " + why)
          .with_ranks({0});
    }
  }
}

}  // namespace weft::group
