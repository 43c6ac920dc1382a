// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include <weft/base/error.h>
#include <weft/engine/rendezvous/launcher_environment.h>
#include <weft/engine/rendezvous/launcher_variables.h>
#include <weft/engine/rendezvous/url.h>

namespace weft::group {

namespace {

// Runs before main, which may print. The C library keeps what a program prints to a pipe until it
// has 4 KiB; weft-run would show it late, and never if the rank is killed.
[[maybe_unused]] const bool kPrintsLinesAtOnce = [] {
  const char* const wanted = std::getenv("WEFT_LINE_OUTPUT");
  return wanted != nullptr && std::string_view(wanted) == "on" &&
         std::setvbuf(stdout, nullptr, _IOLBF, 0) == 0;
}();

}  // namespace

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

Environment process_environment() {
  return [](const char* name) { return std::getenv(name); };
}

std::optional<int> local_rank(const Environment& environment) {
  return first_number(environment, kLocalRankVariables);
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
  return group::first_number(group::process_environment(), group::kWorldSizeVariables);
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
int launched_restarts() {
  return group::first_number(group::process_environment(),
                             {"TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"})
      .value_or(0);
}

}  // namespace weft
