// Starts the ranks that a bench measures: processes of one machine, each with torchrun's
// environment, whose rank 0 prints what it found.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <weft/profiling/bench/report.h>

namespace weft::bench {

// Runs `command` once for each rank and waits for all; returns what rank 0 printed and the time of
// the start, in seconds of the steady clock. Ends the bench with a message when one fails.
struct WorkerOutput {
  std::string text;
  double launched = 0;
};
WorkerOutput run_workers(const std::vector<std::string>& command, int ranks,
                         const std::map<std::string, std::string>& environment = {});

// In a worker: its rank, and a line from or to the other one where there are two. hear_other()
// blocks, and ends the worker when the other one has ended. (A descriptor of each pair's socket
// stands in WEFT_BENCH_OTHER.)
int rank_of_worker();
void tell_other(const std::string& line);
std::string hear_other();

// In a worker: keeps this thread, and those it starts, on one core of its own (rank modulo the
// number of cores).
void pin_to_core(int rank);

// Seconds of the steady clock, which all processes of a machine share.
double now();

// The path of this program.
std::string this_program();

// Where the bench was called with --before PROGRAM, the same bench of an earlier build: each
// setting whose command starts this program's workers stands twice, the second time as "<name>
// before" with PROGRAM's workers, so that both builds are measured in turns. Settings of other
// peers are left out. A Setting has a name and a command.
template <class Setting>
void add_before(std::vector<Setting>& settings, const Report& report) {
  if (report.before().empty()) return;
  std::vector<Setting> pairs;
  for (const Setting& setting : settings) {
    Setting before = setting;
    const auto program = std::ranges::find(before.command, this_program());
    if (program == before.command.end()) continue;
    *program = report.before();
    before.name += kBefore;
    pairs.push_back(setting);
    pairs.push_back(std::move(before));
  }
  settings = std::move(pairs);
}

// Builds a peer's program next to this one by a shell command, for which OUT is its path; returns
// that, or "" with a note where it is not possible. With --before it builds nothing.
std::string build_peer(const Report& report, const std::string& name, const std::string& command);

}  // namespace weft::bench
