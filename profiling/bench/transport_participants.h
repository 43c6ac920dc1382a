// SPDX-License-Identifier: Apache-2.0
// The participants of the transport bench that are part of its own program, each in a worker
// process. `name` is the case: "polled" and "blocked" round trips, "stream" or "fresh".
#pragma once

#include <string>

#include <weft/profiling/bench/report.h>

namespace weft::bench {

int be_weft(const std::string& backend, const std::string& name);
// Measures the limits of the machine, without a library: "spinning flag", "memcpy", "two-copy
// ring", "one copy", "raw socket"; and those of its GPU: "device copy" in one process, "copies in
// turn" in two, between which the GPU has to switch.
int be_floor(const std::string& which, const std::string& name);

// Measures the cost of a connection over its stream, by itself, in this process.
void measure_costs(Report& report);

}  // namespace weft::bench
