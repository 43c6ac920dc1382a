#include <cstdlib>

#include <unistd.h>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <weft/base/error.h>
#include <weft/engine/group/address.h>
#include <weft/engine/group/rendezvous.h>
#include <weft/engine/group/url.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

struct Wanted {
  std::optional<int> rank;
  std::optional<int> world_size;
};

// The first of these variables that is set. mpirun (Open MPI, MPICH) and srun have their own names for the same numbers.
std::optional<int> first_number(const Environment& environment, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const char* text = environment(name)) return to_number(name, text);
  }
  return std::nullopt;
}

std::optional<int> rank_variable(const Environment& environment) {
  return first_number(environment, {"RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"});
}

std::optional<int> world_size_variable(const Environment& environment) {
  return first_number(environment, {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"});
}

void check_range(int rank, int world_size) {
  if (world_size < 1) throw Error(Blame::Caller, "the world size is " + std::to_string(world_size) + "; it is at least 1");
  if (rank < 0 || rank >= world_size) {
    throw Error(Blame::Caller, "rank " + std::to_string(rank) + " is outside a world of " + std::to_string(world_size) +
                                   "; ranks go from 0 to " + std::to_string(world_size - 1));
  }
}

int require_world_size(const Wanted& wanted, const std::string& method) {
  if (wanted.world_size) return *wanted.world_size;
  throw Error(Blame::Caller,
              "no world size for " + method + ": set ProcessGroupOptions::world_size, ?world_size= or WORLD_SIZE");
}

int require_rank(const Wanted& wanted, const std::string& method) {
  if (wanted.rank) return *wanted.rank;
  throw Error(Blame::Caller, "no rank for " + method + ": set ProcessGroupOptions::rank, ?rank= or RANK");
}

c10d::TCPStoreOptions tcp_options(int port, int world_size, bool is_server, Deadline deadline) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.isServer = is_server;
  options.numWorkers = static_cast<std::size_t>(world_size);
  options.multiTenant = true;  // several groups of one process may share the port
  options.timeout = std::min(deadline.remaining(), std::chrono::milliseconds(std::chrono::hours(24 * 24)));
  return options;
}

c10::intrusive_ptr<c10d::Store> tcp_store(const std::string& host, int port, const Wanted& ranks, bool is_server,
                                          Deadline deadline) {
  const std::string where = "tcp://" + host + ":" + std::to_string(port);
  try {
    // c10d's client backs off for up to a second when the host is not there yet: look for it more often before asking.
    if (!is_server) wait_for_listener(host, port, deadline);
    return c10::make_intrusive<c10d::TCPStore>(host, tcp_options(port, *ranks.world_size, is_server, deadline));
  } catch (const Error& error) {
    throw error.within("rank " + std::to_string(*ranks.rank) + " cannot reach the store of rank 0 at " + where);
  } catch (const std::exception& error) {
    if (!is_server) {
      throw Error(deadline.passed() ? Blame::Timeout : Blame::PeerLost,
                  "the store of rank 0 at " + where + " did not answer: " + tensor::text_of(error));
    }
    if (deadline.passed()) {
      throw Error(Blame::Timeout, "not all " + std::to_string(*ranks.world_size) + " ranks came to the store at " + where +
                                      " in time: " + tensor::text_of(error));
    }
    throw Error(Blame::Caller, "rank 0 cannot open its store at " + where + "; is the port taken by another job? " +
                                   tensor::text_of(error));
  }
}

Rendezvous join_tcp(const std::string& host, int port, Wanted wanted, const Environment& environment, Deadline deadline) {
  wanted.rank = require_rank(wanted, "tcp://" + host + ":" + std::to_string(port));
  wanted.world_size = require_world_size(wanted, "tcp://" + host + ":" + std::to_string(port));
  check_range(*wanted.rank, *wanted.world_size);
  // Under torchrun the agent hosts the store, and every rank is a client.
  const char* agent = environment("TORCHELASTIC_USE_AGENT_STORE");
  const bool agent_hosts = agent != nullptr && std::string(agent) == "True";
  Rendezvous result;
  result.store = tcp_store(host, port, wanted, *wanted.rank == 0 && !agent_hosts, deadline);
  result.rank = *wanted.rank;
  result.world_size = *wanted.world_size;
  result.local_address = local_address_towards(host, port);
  return result;
}

// One name for all ranks of one mpirun or srun.
std::string launcher_job(const Environment& environment) {
  std::string job;
  for (const char* name : {"PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID"}) {
    if (const char* text = environment(name)) job += std::string(job.empty() ? "" : "-") + text;
  }
  return job.empty() ? "parent-" + std::to_string(getppid()) : job;
}

// mpirun and srun say who we are but not where rank 0 is. On one machine rank 0 takes any free port and writes it down.
Rendezvous join_below_launcher(const Wanted& wanted, const Environment& environment, Deadline deadline) {
  const auto local = first_number(environment, {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"});
  const auto nodes = first_number(environment, {"SLURM_JOB_NUM_NODES", "SLURM_NNODES"});
  if (!(local && *local == *wanted.world_size) && !(nodes && *nodes == 1)) {
    throw Error(Blame::Caller,
                "MASTER_ADDR and MASTER_PORT are not set; over several machines pass the address of rank 0 to all ranks "
                "(mpirun -x MASTER_ADDR=… -x MASTER_PORT=…, or export both before srun)");
  }
  const auto file = std::make_shared<LauncherFile>(launcher_job(environment));
  Rendezvous result;
  result.rank = *wanted.rank;
  result.world_size = *wanted.world_size;
  result.local_address = "127.0.0.1";
  if (*wanted.rank == 0) {
    auto options = tcp_options(0, *wanted.world_size, /*is_server=*/true, deadline);
    options.multiTenant = false;
    options.waitWorkers = false;
    auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    file->publish(store->getPort());
    result.store = store;
    result.until_joined = file;
  } else {
    result.store = tcp_store("127.0.0.1", file->port(deadline), wanted, /*is_server=*/false, deadline);
  }
  return result;
}

Rendezvous join_env(const Wanted& given, const Environment& environment, Deadline deadline) {
  Wanted wanted = given;
  if (!wanted.rank) wanted.rank = rank_variable(environment);
  if (!wanted.world_size) wanted.world_size = world_size_variable(environment);
  const char* address = environment("MASTER_ADDR");
  const char* port = environment("MASTER_PORT");
  std::string missing;
  const auto need = [&](bool present, const char* name) {
    if (!present) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  need(wanted.rank.has_value(), "RANK");
  need(wanted.world_size.has_value(), "WORLD_SIZE");
  const bool below_launcher = environment("RANK") == nullptr && address == nullptr && missing.empty() && !given.rank;
  if (!below_launcher) {
    need(address != nullptr, "MASTER_ADDR");
    need(port != nullptr, "MASTER_PORT");
  }
  if (!missing.empty()) {
    throw Error(Blame::Caller, "env:// needs " + missing +
                                   " in the environment; weft-run, torchrun, mpirun and srun set them, or give them in "
                                   "ProcessGroupOptions");
  }
  check_range(*wanted.rank, *wanted.world_size);
  if (below_launcher) return join_below_launcher(wanted, environment, deadline);
  return join_tcp(address, to_number("MASTER_PORT", port), wanted, environment, deadline);
}

Rendezvous join_file(const Url& url, const Wanted& wanted) {
  const std::string path = url.host + url.path;
  if (path.empty()) throw Error(Blame::Caller, "file:// needs a path: file:///tmp/job");
  Rendezvous result;
  result.world_size = require_world_size(wanted, "file://" + path);
  try {
    result.store = c10::make_intrusive<c10d::FileStore>(path, result.world_size);
    if (wanted.rank) {
      result.rank = *wanted.rank;
    } else {
      result.rank = static_cast<int>(result.store->add("weft/arrivals", 1) - 1);
      if (result.rank >= result.world_size) {
        throw Error(Blame::Caller, "file://" + path + ": " + std::to_string(result.rank + 1) +
                                       " processes came to a world of " + std::to_string(result.world_size) +
                                       "; or an earlier job left the file: remove it");
      }
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(Blame::Caller, "file://" + path + " cannot be used: " + tensor::text_of(error));
  }
  check_range(result.rank, result.world_size);
  return result;
}

// A store outlives groups: the second group of one rank on one address must not find the keys of the first. Each rank
// counts its own lives in the store, so all ranks count alike; the first has no prefix, as in Python's torch.distributed.
c10::intrusive_ptr<c10d::Store> next_life(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  const auto life = store->add("weft/lives/" + std::to_string(rank), 1);
  if (life <= 1) return store;
  return c10::make_intrusive<c10d::PrefixStore>("life" + std::to_string(life), store);
}

}  // namespace

Environment process_environment() {
  return [](const char* name) { return std::getenv(name); };
}

int local_rank(const Environment& environment) {
  return first_number(environment, {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"})
      .value_or(0);
}

Rendezvous rendezvous(const ProcessGroupOptions& options, const Environment& environment, Deadline deadline) {
  Rendezvous result;
  if (options.store) {
    Wanted wanted{options.rank, options.world_size};
    result.rank = require_rank(wanted, "a given store");
    result.world_size = require_world_size(wanted, "a given store");
    check_range(result.rank, result.world_size);
    result.store = options.store;
  } else {
    const Url url = Url::parse(options.init_method);
    Wanted wanted{options.rank ? options.rank : url.number("rank"),
                  options.world_size ? options.world_size : url.number("world_size")};
    if (url.scheme == "env") {
      result = join_env(wanted, environment, deadline);
    } else if (url.scheme == "file") {
      result = join_file(url, wanted);
    } else {
      if (url.host.empty() || !url.port) {
        throw Error(Blame::Caller, "'" + options.init_method + "' needs a host and a port: tcp://10.0.0.1:29500");
      }
      if (!wanted.world_size) wanted.world_size = world_size_variable(environment);
      if (!wanted.rank) wanted.rank = rank_variable(environment);
      result = join_tcp(url.host, *url.port, wanted, environment, deadline);
    }
    // What Python's init_process_group puts before its keys, so that Python ranks and C++ ranks meet.
    if (options.group_name.empty()) result.store = c10::make_intrusive<c10d::PrefixStore>("default_pg", result.store);
  }
  if (!options.group_name.empty()) result.store = c10::make_intrusive<c10d::PrefixStore>(options.group_name, result.store);
  result.store = next_life(result.store, result.rank);
  result.local_rank = local_rank(environment);
  return result;
}

}  // namespace weft::group
