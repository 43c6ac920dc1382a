// Starts the ranks that a bench measures: processes of one machine, each with torchrun's environment, whose rank 0 prints
// what it found.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace weft::bench {

// Runs `command` once for each rank and waits for all; returns what rank 0 printed and the time of the start, in seconds of
// the steady clock. Ends the bench with a message when one fails.
struct WorkerOutput {
  std::string text;
  double launched = 0;
};
WorkerOutput run_workers(const std::vector<std::string>& command, int ranks,
                         const std::map<std::string, std::string>& environment = {});

// In a worker: keeps this thread, and those it starts, on one core of its own (rank modulo the number of cores).
void pin_to_core(int rank);

// Seconds of the steady clock, which all processes of a machine share.
double now();

// The path of this program.
std::string this_program();

}  // namespace weft::bench
