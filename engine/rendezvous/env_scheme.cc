// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/engine/rendezvous/job_store.h>
#include <weft/engine/rendezvous/launcher_variables.h>
#include <weft/engine/rendezvous/scheme.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/file_store.h>

namespace weft::group {

namespace {

// A name that all ranks of one mpirun or srun share.
std::string launcher_job(const Environment& environment) {
  std::string job;
  for (const char* name : {"PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID"}) {
    if (const char* text = environment(name)) job += std::string(job.empty() ? "" : "-") + text;
  }
  return job.empty() ? "parent-" + std::to_string(getppid()) : job;
}

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

}  // namespace

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

}  // namespace weft::group
