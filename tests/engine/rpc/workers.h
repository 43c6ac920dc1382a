// SPDX-License-Identifier: Apache-2.0
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
// Every transport, with threads and, if it connects processes, with processes. If
// runs_all_settings(), each runs with every number of workers; otherwise threads run with the
// fewest and the most, and processes with one of the numbers.
std::vector<Setting> settings(std::initializer_list<int> workers = {2, 4, 8});
// For tests of errors and faults: at least three workers, so that one is neither the caller nor the
// callee.
std::vector<Setting> settings_of_faults();
inline std::string name_of(const ::testing::TestParamInfo<Setting>& setting) {
  return name(setting.param);
}
inline void PrintTo(const Setting& setting, std::ostream* out) { *out << name(setting); }

// Runs `body` on each worker, "worker0", "worker1", …; then the worker shuts down gracefully,
// unless `body` has done so.
void run_workers(const Setting& setting, const std::function<void(rpc::Agent&)>& body,
                 const rpc::Options& options = {});
// Runs `body` on each worker with complete options, to which the test may add; `body` joins itself.
void run_alone(const Setting& setting, const std::function<void(rpc::Options)>& body,
               const rpc::Options& options = {});

// Runs `body` on workers that are threads over inproc, and returns the warnings and errors that
// they log, one a line.
std::string warnings_of(int workers, const std::function<void(rpc::Agent&)>& body);
// Blocks until all workers but the killed `victim` have called this as often as this process has.
// Needs no store, whose host may be the victim.
void meet_without(rpc::Agent& agent, int victim);
// Returns the worker `steps` ranks after this one; rank 0 follows the last.
rpc::WorkerInfo after(const rpc::Agent& agent, int steps);

}  // namespace weft::harness
