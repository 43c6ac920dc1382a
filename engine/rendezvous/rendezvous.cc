// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>

#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/log.h>
#include <weft/base/patience.h>
#include <weft/base/shortage.h>
#include <weft/engine/rendezvous/launcher_environment.h>
#include <weft/engine/rendezvous/multicast.h>
#include <weft/engine/rendezvous/rendezvous.h>
#include <weft/engine/rendezvous/url.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/backoff.h>
#include <weft/engine/store/file_store.h>
#include <weft/engine/store/store.h>
#include <weft/engine/store/tcp_store.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

struct Wanted {
  std::optional<int> rank;
  std::optional<int> world_size;
  std::string said_by;  // the source of the two numbers: "RANK and WORLD_SIZE"
};

// mpirun (Open MPI, MPICH) and srun have names of their own for these numbers.
constexpr auto kRankVariables = {"RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK",
                                 "SLURM_PROCID"};
constexpr auto kWorldSizeVariables = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                      "SLURM_NTASKS"};

// The first of these variables that is set; null if none is.
const char* first_set(const Environment& environment, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (environment(name) != nullptr) return name;
  }
  return nullptr;
}

std::optional<int> first_number(const Environment& environment,
                                std::initializer_list<const char*> names) {
  const char* const name = first_set(environment, names);
  return name == nullptr ? std::nullopt : std::optional(to_number(name, environment(name)));
}

std::optional<int> rank_variable(const Environment& environment) {
  return first_number(environment, kRankVariables);
}

std::optional<int> world_size_variable(const Environment& environment) {
  return first_number(environment, kWorldSizeVariables);
}

// Takes rank and world size from the options, else from the URL, else from the environment.
Wanted wanted_of(const RendezvousOptions& options, const Url& url, const Environment& environment) {
  Wanted wanted{options.rank, options.world_size, {}};
  const auto fill = [&](std::optional<int>& number, const char* name,
                        std::initializer_list<const char*> variables) {
    std::string from = std::string("the option ") + name;
    if (!number && (number = url.number(name))) from = std::string("?") + name + "= of the URL";
    const char* const variable = number ? nullptr : first_set(environment, variables);
    if (variable != nullptr) {
      number = to_number(variable, environment(variable));
      from = variable;
    }
    if (number) wanted.said_by += (wanted.said_by.empty() ? "" : " and ") + from;
  };
  fill(wanted.rank, "rank", kRankVariables);
  fill(wanted.world_size, "world_size", kWorldSizeVariables);
  return wanted;
}

// Warns on stderr, after the report times, that this rank waits for rank 0 before it can know any
// other rank. The ranks of a job cannot agree yet on one that reports, so one on each machine does:
// the first, or the second if the first is rank 0.
class Seeker {
 public:
  Seeker(const Wanted& wanted, const Environment& environment, WaitReports reports)
      : patience_(std::move(reports)), begin_(name_of(wanted)) {
    const auto local = local_rank(environment);
    speaks_ = wanted.rank.value_or(0) <= 1 || local.value_or(0) == 0;
    if (!wanted.said_by.empty()) said_by_ = "; its rank and world size are from " + wanted.said_by;
  }

  // `why`: the event that it waits for and the last observation, as a part of a sentence.
  void look(const std::function<std::string()>& why) {
    if (!patience_.is_over() || !speaks_) return;
    log::warn(begin_ + " has waited " + describe_wait(patience_.waited()) + " for " + why() +
              said_by_);
  }

 private:
  static std::string name_of(const Wanted& wanted) {
    if (!wanted.rank) return "a process without a rank";
    return "rank " + std::to_string(*wanted.rank) +
           (wanted.world_size ? " of " + std::to_string(*wanted.world_size) : "");
  }

  Patience patience_;
  const std::string begin_;
  std::string said_by_;
  bool speaks_ = true;
};

void check_range(int rank, int world_size) {
  if (world_size < 1)
    throw Error(Blame::Caller,
                "the world size is " + std::to_string(world_size) + "; it is at least 1");
  if (rank < 0 || rank >= world_size) {
    throw Error(Blame::Caller, "rank " + std::to_string(rank) + " is outside a world of " +
                                   std::to_string(world_size) + "; ranks go from 0 to " +
                                   std::to_string(world_size - 1));
  }
}

int require_world_size(const Wanted& wanted, const std::string& method,
                       const char* or_else = ", ?world_size= or WORLD_SIZE") {
  if (wanted.world_size) return *wanted.world_size;
  throw Error(Blame::Caller,
              "no world size for " + method + ": set world_size in the options" + or_else);
}

int require_rank(const Wanted& wanted, const std::string& method,
                 const char* or_else = ", ?rank= or RANK") {
  if (wanted.rank) return *wanted.rank;
  throw Error(Blame::Caller, "no rank for " + method + ": set rank in the options" + or_else);
}

std::chrono::milliseconds limit_for_c10d(Deadline deadline) {
  return std::min(deadline.remaining(), kLongestTimeout);
}

// c10d would wait for all ranks by polling every 10 ms; instead the group waits for them, and knows
// which are missing.
c10d::TCPStoreOptions server_options(int port, Deadline deadline) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.isServer = true;
  options.waitWorkers = false;
  options.multiTenant = true;  // several groups of one process may share the port
  options.timeout = limit_for_c10d(deadline);
  return options;
}

c10::intrusive_ptr<c10d::Store> under_name(const c10::intrusive_ptr<c10d::Store>& store,
                                           const std::string& name) {
  return c10::make_intrusive<c10d::PrefixStore>(name.empty() ? "default_pg" : name, store);
}

std::string at(const std::string& host, int port) {
  const bool six = host.find(':') != std::string::npos;
  return "tcp://" + (six ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

// Under torchrun, its agent hosts the store and every rank is a client.
bool agent_hosts(const Environment& environment) {
  const char* agent = environment("TORCHELASTIC_USE_AGENT_STORE");
  return agent != nullptr && std::string(agent) == "True";
}

// The store of torchrun's agent outlives failures, and ranks may have failed before all had counted
// their lives in it. So each restart of the ranks uses a part of the store of its own. The agents
// of several machines count restarts separately; there the ranks' own count serves. The first start
// has no prefix, as in Python's torch.distributed.
c10::intrusive_ptr<c10d::Store> of_this_attempt(const c10::intrusive_ptr<c10d::Store>& store,
                                                const Environment& environment) {
  const char* const agents = environment("GROUP_WORLD_SIZE");
  const char* const attempt = environment("TORCHELASTIC_RESTART_COUNT");
  const bool is_told = agents != nullptr && std::string(agents) == "1" && attempt != nullptr;
  if (!is_told || std::string(attempt) == "0") return store;
  return c10::make_intrusive<c10d::PrefixStore>("/worker/attempt_" + std::string(attempt), store);
}

struct TcpAddress {
  std::string host;
  int port = 0;
};

// Keys in a store that a Weft rank 0 hosts. kHosted: this rank 0 announces, by begun(), which lives
// (see next_life()) at this address it has begun.
constexpr const char* kHosted = "weft/hosted";
std::string begun(std::int64_t life) { return "weft/begun/" + std::to_string(life); }
// Counts how often `who` has joined at the store.
std::string lives(const std::string& who) { return "weft/lives/" + who; }

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

void tell_group_of_rank_zero(c10d::Store& store, const std::string& group_name) {
  if (!store.check({kHosted})) return;
  const auto number = store.add(kGroupsOfRankZero, 1);
  store.set(group_of_rank_zero(number),
            std::vector<std::uint8_t>(group_name.begin(), group_name.end()));
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
    for (auto pause = Backoff::between_connections();; pause.wait(deadline)) {
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

c10::intrusive_ptr<c10d::Store> join_store_of_this_life(const TcpAddress& address, int rank,
                                                        const std::string& group_name,
                                                        Deadline deadline, Seeker& seeker) {
  std::string why = "the store there belongs to an earlier group";
  for (auto pause = Backoff::between_connections();; pause.wait(deadline)) {
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

// Opens a socket for IPv4 alone if the host has no other addresses. c10d's daemon looks up the name
// of every address that connects to it, one after the other. For an IPv4 address at a socket of
// both families even /etc/hosts has no name, so a slow or silent name server would hold up all
// ranks.
c10::intrusive_ptr<c10d::TCPStore> open_store(const std::string& host,
                                              c10d::TCPStoreOptions options) {
  if (is_ipv4_only(host)) {
    try {
      Descriptor socket = open_listener(AF_INET, options.port);
      options.port = static_cast<std::uint16_t>(port_of(socket.get()));
      options.masterListenFd = socket.release();  // the store closes it
    } catch (const Error& error) {
      // This process may have a store there, which is shared; any other failure c10d reports.
      log::debug(error.text());
    }
  }
  const BriskLookups brisk;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

// The reason why c10d could not open a store. c10d gives the errno only as a part of a text.
Error why_no_store(const TcpAddress& address, const std::string& text) {
  if (text.find("EADDRINUSE") != std::string::npos) {
    return {Blame::Caller,
            "the port is taken, by another job perhaps; take another port, or give each job a "
            "group_name: " +
                text};
  }
  try {
    static_cast<void>(open_listener(is_ipv4_only(address.host) ? AF_INET : AF_INET6, 0));
  } catch (const Error& error) {
    if (is_shortage(error.native_code())) return {Blame::Busy, error.text(), error.native_code()};
  }
  if (!has_route_to(address.host, address.port)) {
    return {
        Blame::Unsupported,
        "no network interface leads there; if it is this machine, its loopback interface is down "
        "(ip link set lo up): " +
            text};
  }
  return {Blame::Caller, text};
}

// Throws Busy beforehand if this process may run out of descriptors. c10d does not report that
// limit, or retries until its time is over; and a host that cannot accept a rank's connection
// cannot tell that rank why.
void require_descriptors_to_host(int world_size) {
  // c10d's listener and loop, and both ends of this rank's own three connections.
  constexpr int kStore = 14;
  // The job's loop and listener, the backend's, and short-lived ones.
  constexpr int kGroup = 6;
  constexpr int kRank = 4;  // two to the store, one beside them, one of the job
  require_descriptors(kStore + kGroup + kRank * (world_size - 1),
                      "rank 0, which hosts the store of " + std::to_string(world_size) + " ranks,");
}

// If `shared`, another job's store at this address serves too: the group's name keeps their keys
// apart.
c10::intrusive_ptr<c10d::Store> host_store(const TcpAddress& address, int world_size, bool shared,
                                           Deadline deadline, Seeker& seeker) {
  require_descriptors_to_host(world_size);
  // c10d would try to reach its own store until the deadline.
  if (!has_route_to(address.host, address.port)) {
    throw why_no_store(address, "no route")
        .within("rank 0 cannot open its store at " + at(address.host, address.port));
  }
  try {
    const auto store = open_store(address.host, server_options(address.port, deadline));
    store->set(kHosted, std::vector<std::uint8_t>{1});
    return store;
  } catch (const std::exception& error) {
    const std::string text = tensor::text_of(error);
    if (shared && text.find("EADDRINUSE") != std::string::npos) {
      log::info("another job hosts a store at " + at(address.host, address.port) +
                "; this one shares it");
      return join_store(address, 0, deadline, seeker);
    }
    const std::string what = "rank 0 cannot open its store at " + at(address.host, address.port);
    throw why_no_store(address, text).within(what);
  }
}

Rendezvous join_tcp(const TcpAddress& address, const Wanted& wanted, const std::string& group_name,
                    const Environment& environment, Deadline deadline, bool open, Seeker& seeker) {
  Rendezvous result;
  result.rank =
      open && !wanted.rank ? kAnyRank : require_rank(wanted, at(address.host, address.port));
  result.world_size = require_world_size(wanted, at(address.host, address.port));
  if (result.rank != kAnyRank) check_range(result.rank, result.world_size);
  wait_for_name(address.host, deadline);
  const bool by_agent = agent_hosts(environment);
  if (result.rank == 0 && !by_agent) {
    result.store =
        host_store(address, result.world_size, /*shared=*/!group_name.empty(), deadline, seeker);
    result.hosts = true;
  } else {
    result.store = by_agent || open ? join_store(address, result.rank, deadline, seeker)
                                    : join_store_of_this_life(address, result.rank, group_name,
                                                              deadline, seeker);
  }
  if (by_agent) result.store = of_this_attempt(result.store, environment);
  if (result.rank == 0 && !by_agent) tell_group_of_rank_zero(*result.store, group_name);
  result.local_address = address_for_others(address.host, address.port);
  return result;
}

// A name that all ranks of one mpirun or srun share.
std::string launcher_job(const Environment& environment) {
  std::string job;
  for (const char* name : {"PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID"}) {
    if (const char* text = environment(name)) job += std::string(job.empty() ? "" : "-") + text;
  }
  return job.empty() ? "parent-" + std::to_string(getppid()) : job;
}

// Number of meetings that this process has had under each name. All ranks of a job count alike, if
// each meeting succeeds or fails for all of them.
constinit ForkMutex meetings_mutex(ForkOrder::Engine);
auto& meetings = *new std::map<std::string, int>();

// mpirun and srun tell each rank its number, but not where rank 0 is. On one machine rank 0 takes
// any free port and writes it to a file, one for each meeting: an agent and a group of one job have
// a store each.
Rendezvous join_below_launcher(const Wanted& wanted, const std::string& group_name,
                               const Environment& environment, Deadline deadline, Seeker& seeker) {
  const auto local = first_number(environment, {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"});
  const auto nodes = first_number(environment, {"SLURM_JOB_NUM_NODES", "SLURM_NNODES"});
  if (!(local && *local == *wanted.world_size) && !(nodes && *nodes == 1)) {
    throw Error(Blame::Caller,
                "MASTER_ADDR and MASTER_PORT are not set; over several machines pass the address "
                "of rank 0 to all ranks "
                "(mpirun -x MASTER_ADDR=… -x MASTER_PORT=…, or export both before srun)");
  }
  Rendezvous result;
  result.number = std::make_shared<Numbered>(group_name);
  const auto file = std::make_shared<LauncherFile>(launcher_job(environment) + "-" + group_name +
                                                   "-" + std::to_string(result.number->value()));
  result.rank = *wanted.rank;
  result.world_size = *wanted.world_size;
  result.local_address = "127.0.0.1";
  if (result.rank != 0) {
    const auto look = [&] {
      seeker.look([&] {
        return "rank 0, which should write its address into " + file->path() +
               "; it must be started";
      });
    };
    result.store =
        join_store({"127.0.0.1", file->port(deadline, look)}, result.rank, deadline, seeker);
    return result;
  }
  require_descriptors_to_host(result.world_size);
  auto options = server_options(0, deadline);
  options.multiTenant = false;
  const auto store = open_store("127.0.0.1", options);
  result.hosts = true;
  file->publish(store->getPort());
  result.store = store;
  result.until_all_came = file;
  return result;
}

Rendezvous join_env(const Wanted& wanted, const std::string& group_name,
                    const Environment& environment, Deadline deadline, bool open, Seeker& seeker) {
  const char* address = environment("MASTER_ADDR");
  const char* port = environment("MASTER_PORT");
  std::string missing;
  const auto need = [&](bool present, const char* name) {
    if (!present) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  need(wanted.rank.has_value() || open, "RANK");
  need(wanted.world_size.has_value(), "WORLD_SIZE");
  const bool below_launcher = missing.empty() && wanted.rank && address == nullptr &&
                              port == nullptr && environment("RANK") == nullptr &&
                              rank_variable(environment) == wanted.rank;
  if (!below_launcher) {
    need(address != nullptr, "MASTER_ADDR");
    need(port != nullptr, "MASTER_PORT");
  }
  if (!missing.empty()) {
    throw Error(
        Blame::Caller,
        "env:// needs " + missing +
            " in the environment; weft-run, torchrun, mpirun and srun set them, or give rank and "
            "world_size in ProcessGroupOptions and the address as tcp://host:port");
  }
  if (wanted.rank) check_range(*wanted.rank, *wanted.world_size);
  if (below_launcher) return join_below_launcher(wanted, group_name, environment, deadline, seeker);
  const int number = to_number("MASTER_PORT", port, /*least=*/1, kMaxPort);
  return join_tcp({address, number}, wanted, group_name, environment, deadline, open, seeker);
}

// A life is one use of the store by a rank and name. A store outlives groups: the second group of a
// rank at one address must not find the keys of the first. Each rank counts its own lives in the
// store, so all ranks count alike. The first has no prefix, as in Python's torch.distributed.
struct NextLife {
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Store> before;  // of the previous life; null in the first
};

NextLife next_life(const c10::intrusive_ptr<c10d::Store>& store, const std::string& who) {
  const auto life = store->add(lives(who), 1);
  if (who == "0") store->set(begun(life), "1");  // read by store_if_of_this_life()
  const auto of = [&](std::int64_t number) -> c10::intrusive_ptr<c10d::Store> {
    if (number <= 1) return store;
    return c10::make_intrusive<c10d::PrefixStore>("life" + std::to_string(number), store);
  };
  return {of(life), life <= 1 ? nullptr : of(life - 1)};
}

// Identifies this process; also this thread, if threads are ranks without a number. Differs in a
// forked child.
std::string identity(bool of_thread) {
  const auto random = [] {
    return std::to_string(std::random_device()()) + std::to_string(std::random_device()());
  };
  static const std::string process = random();
  thread_local const std::string thread = random();
  return std::to_string(getpid()) + "-" + (of_thread ? thread : process);
}

// Claims one of the file's ranks, each of which can be claimed once. This also detects ranks that
// an earlier job left in the file.
int claim_rank(c10d::Store& store, std::optional<int> given, int world_size,
               const std::string& path) {
  const std::string remedy = "; or an earlier job that was killed left the file: remove it";
  const auto is_free = [&](int rank) {
    return store.add("weft/claims/" + std::to_string(rank), 1) == 1;
  };
  if (given) {
    if (is_free(*given)) return *given;
    throw Error(Blame::Caller,
                "file://" + path + ": rank " + std::to_string(*given) + " came twice" + remedy);
  }
  for (int rank = 0; rank < world_size; ++rank) {
    if (is_free(rank)) return rank;
  }
  throw Error(Blame::Caller, "file://" + path + ": more processes came than the world size " +
                                 std::to_string(world_size) + remedy);
}

Rendezvous join_file(const Url& url, const Wanted& wanted, const std::string& group_name,
                     Deadline deadline, bool open) {
  const std::string path = url.host + url.path;
  if (path.empty()) throw Error(Blame::Caller, "file:// needs a path: file:///tmp/job");
  Rendezvous result;
  result.world_size = require_world_size(wanted, "file://" + path);
  check_range(wanted.rank.value_or(0), result.world_size);
  // c10d would wait for minutes for the folder to appear.
  const auto slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw system_error(Blame::Caller,
                       "file://" + path + ": the folder " + folder + " cannot be written to",
                       errno);
  }
  try {
    result.store = open_job_file(path, result.world_size);
    result.store->setTimeout(limit_for_c10d(deadline));
    result.store = under_name(result.store, group_name);
    const bool numbered = wanted.rank.has_value();
    if (open) {
      result.rank = wanted.rank.value_or(kAnyRank);  // the members settle which rank it gets
    } else {
      const std::string who =
          identity(!numbered) + (numbered ? "-" + std::to_string(*wanted.rank) : "");
      result.store = next_life(result.store, who).store;
      result.rank = claim_rank(*result.store, wanted.rank, result.world_size, path);
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(Blame::Caller, "file://" + path + " cannot be used: " + tensor::text_of(error));
  }
  return result;
}

Rendezvous join_multicast(const Url& url, const Wanted& wanted, const std::string& group_name,
                          Deadline deadline, Seeker& seeker) {
  Rendezvous result;
  result.world_size = require_world_size(wanted, at(url.host, *url.port));
  check_range(wanted.rank.value_or(0), result.world_size);
  const auto look = [&](const std::function<std::string()>& who_came) {
    seeker.look([&] {
      return "the others at " + at(url.host, *url.port) + "; so far there are " + who_came();
    });
  };
  Meeting meeting = meet_by_multicast(url.host, *url.port, group_name, wanted.rank,
                                      result.world_size, deadline, look);
  result.rank = meeting.rank;
  result.local_address = meeting.local_address;
  result.until_all_came = meeting.announcing;
  if (!meeting.hosts) {
    result.store = join_store({meeting.host, meeting.port}, result.rank, deadline, seeker);
    return result;
  }
  require_descriptors_to_host(result.world_size);
  result.hosts = true;
  auto options = server_options(meeting.port, deadline);
  options.multiTenant = false;
  options.masterListenFd = meeting.listener.release();  // the store closes it
  try {
    result.store = c10::make_intrusive<c10d::TCPStore>(meeting.host, options);
  } catch (const std::exception& error) {
    throw Error(Blame::Caller, at(url.host, *url.port) +
                                   ": the store cannot be opened: " + tensor::text_of(error));
  }
  return result;
}

}  // namespace

Environment process_environment() {
  return [](const char* name) { return std::getenv(name); };
}

std::optional<int> local_rank(const Environment& environment) {
  return first_number(environment, {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                    "SLURM_LOCALID"});
}

Numbered::Numbered(std::string name) : name_(std::move(name)) {
  std::lock_guard lock(meetings_mutex);
  value_ = ++meetings[name_];
}

Numbered::~Numbered() {
  std::lock_guard lock(meetings_mutex);
  if (!is_kept_ && meetings[name_] == value_) --meetings[name_];
}

Rendezvous rendezvous(const RendezvousOptions& options, const Environment& environment,
                      Deadline deadline, bool open) {
  Rendezvous result;
  const Url url = options.store ? Url() : Url::parse(options.init_method);
  const Wanted wanted = options.store ? Wanted{options.rank, options.world_size, {}}
                                      : wanted_of(options, url, environment);
  Seeker seeker(wanted, environment, options.wait_reports);
  if (options.store) {
    result.rank = open && !wanted.rank ? kAnyRank : require_rank(wanted, "a given store", "");
    result.world_size = require_world_size(wanted, "a given store", "");
    if (result.rank != kAnyRank) check_range(result.rank, result.world_size);
    result.store = options.store;
  }
  const bool shared = !options.group_name.empty();
  if (url.scheme == "file") {
    result = join_file(url, wanted, options.group_name, deadline, open);
  } else if (url.scheme == "env") {
    result = join_env(wanted, options.group_name, environment, deadline, open, seeker);
  } else if (url.scheme == "tcp") {
    if (url.host.empty() || !url.port) {
      throw Error(Blame::Caller,
                  "'" + options.init_method + "' needs a host and a port: tcp://10.0.0.1:29500");
    }
    if (open && !wanted.rank && is_multicast(url.host)) {
      throw Error(Blame::Caller, "'" + options.init_method +
                                     "' is a multicast address, where a worker that comes and goes "
                                     "needs a rank: set it, or "
                                     "give the address of rank 0");
    }
    result = is_multicast(url.host)
                 ? join_multicast(url, wanted, options.group_name, deadline, seeker)
                 : join_tcp({url.host, *url.port}, wanted, options.group_name, environment,
                            deadline, open, seeker);
  }
  if (url.scheme != "file") {
    // A given store stays as it is. Others get the prefix of Python's init_process_group, so that
    // Python and C++ ranks meet.
    if (!options.store || shared) result.store = under_name(result.store, options.group_name);
    try {
      if (!open) {
        auto [store, before] = next_life(result.store, std::to_string(result.rank));
        result.store = std::move(store);
        result.before = std::move(before);
      }
    } catch (const std::exception& error) {
      throw Error(
          Blame::PeerLost,
          "rank " + std::to_string(result.rank) +
              " was not counted by the job's store; the process that hosts it may have ended: " +
              tensor::text_of(error));
    }
  }
  result.local_rank = local_rank(environment).value_or(0);
  result.said_by = wanted.said_by;
  return result;
}

}  // namespace weft::group

namespace weft {

namespace {

int launched(const std::optional<int>& number, const std::string& function, const char* variables) {
  if (number) return *number;
  throw Error(Blame::Caller,
              function + "(): no launcher has told this process (none of " + variables +
                  " is set); start it by weft-run, torchrun, mpirun or srun, or call " + function +
                  "_or(…), which returns a number of your choice if there is no launcher");
}

std::optional<int> rank_of_launcher() { return group::rank_variable(group::process_environment()); }
std::optional<int> size_of_launcher() {
  return group::world_size_variable(group::process_environment());
}
std::optional<int> local_rank_of_launcher() {
  return group::local_rank(group::process_environment());
}

}  // namespace

int launched_rank() {
  return launched(rank_of_launcher(), "launched_rank",
                  "RANK, OMPI_COMM_WORLD_RANK, PMIX_RANK, PMI_RANK, SLURM_PROCID");
}
int launched_world_size() {
  return launched(size_of_launcher(), "launched_world_size",
                  "WORLD_SIZE, OMPI_COMM_WORLD_SIZE, PMI_SIZE, SLURM_NTASKS");
}
int launched_local_rank() {
  return launched(local_rank_of_launcher(), "launched_local_rank",
                  "LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID, SLURM_LOCALID");
}
int launched_rank_or(int otherwise) { return rank_of_launcher().value_or(otherwise); }
int launched_world_size_or(int otherwise) { return size_of_launcher().value_or(otherwise); }
int launched_local_rank_or(int otherwise) { return local_rank_of_launcher().value_or(otherwise); }

}  // namespace weft
