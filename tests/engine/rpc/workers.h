// Workers for tests of RPC: one body, run by N threads of this process or by N forked processes,
// over one transport.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <weft/rpc.h>
#include <weft/tests/harness/ranks.h>

namespace weft::harness {

struct Setting {
  As as = As::Threads;
  std::string transport = "inproc";
  int workers = 4;
};

inline std::string name(const Setting& setting) {
  return setting.transport + name(setting.as) + std::to_string(setting.workers);
}
// Every transport, with threads and, where it can have them, with processes. Where all settings
// run, each with every number of workers; else threads with the fewest and the most, and processes
// with one of the numbers.
std::vector<Setting> settings(std::initializer_list<int> workers = {2, 4, 8});
// For what is asked of one transport's errors or faults: with workers that are neither the caller
// nor the callee.
std::vector<Setting> settings_of_faults();
inline std::string name_of(const testing::TestParamInfo<Setting>& setting) {
  return name(setting.param);
}
inline void PrintTo(const Setting& setting, std::ostream* out) { *out << name(setting); }

// Runs body on each worker, "worker0" … ; then, where it has not, the worker shuts down gracefully.
void run_workers(const Setting& setting, const std::function<void(rpc::Agent&)>& body,
                 const rpc::Options& options = {});
// For bodies that join by themselves, with options that are complete but for what the test adds.
void run_alone(const Setting& setting, const std::function<void(rpc::Options)>& body,
               const rpc::Options& options = {});

// The same, as threads over inproc, for what they log: warnings and worse, one a line.
std::string warnings_of(int workers, const std::function<void(rpc::Agent&)>& body);
// Blocks until all workers but this one have come here as often as this process: after it was
// killed, whoever hosts the store.
void meet_without(rpc::Agent& agent, int victim);
// The worker so many ranks further, around.
rpc::WorkerInfo after(const rpc::Agent& agent, int steps);

}  // namespace weft::harness
