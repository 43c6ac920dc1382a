// SPDX-License-Identifier: Apache-2.0
// Starts the ranks that a bench measures: processes on one machine with torchrun's environment
// variables. Rank 0 prints the results.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <weft/profiling/bench/report.h>

namespace weft::bench {

// Runs `command` once for each rank and waits for all. Returns rank 0's output, and the time of the
// start in seconds of the steady clock. Ends the bench with a message if a worker fails.
struct WorkerOutput {
  std::string text;
  double launched = 0;
};
WorkerOutput run_workers(const std::vector<std::string>& command, int ranks,
                         const std::map<std::string, std::string>& environment = {});

// For workers: the own rank, and a line to or from the other worker if there are two. hear_other()
// blocks, and ends the worker if the other one has ended. (WEFT_BENCH_OTHER names this worker's
// descriptor of a socket pair.)
int rank_of_worker();
void tell_other(const std::string& line);
std::string hear_other();

// For workers: pins this thread, and threads that it starts, to one core (rank modulo the number of
// cores).
void pin_to_core(int rank);

// For workers: runs `step` so many times; returns the time of each in seconds.
std::vector<double> time_each(int steps, const std::function<void()>& step);
// For workers: prints the numbers on one line.
void print_numbers(const std::vector<double>& numbers);

// Seconds of the steady clock, which all processes of a machine share.
double now();

// The path of this program.
std::string this_program();

// Adds settings for --before PROGRAM, the same bench of an earlier build: each setting whose
// command starts this program's workers appears twice, the second time as "<name> before" with
// PROGRAM's workers, so that both builds are measured in turns. Leaves out settings of other peers.
// A Setting has a name and a command.
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

// Builds a peer's program next to this one by a shell command, in which OUT is the program's path.
// Returns that path, or "" with a note if the build fails. With --before it builds nothing.
std::string build_peer(const Report& report, const std::string& name, const std::string& command);

}  // namespace weft::bench
