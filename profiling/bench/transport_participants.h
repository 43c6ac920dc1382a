// The participants of the transport bench that are in its own program, each in a worker process.
// `name` is the case: "polled" and "blocked" round trips, "stream".
#pragma once

#include <string>

#include <weft/profiling/bench/report.h>

namespace weft::bench {

int be_weft(const std::string& backend, const std::string& name);
// What the machine can do without a library: "spinning flag", "memcpy", "two-copy ring", "raw
// socket"; and its GPU: "device copy" in one process, "copies in turn" in two, between which the
// GPU has to change.
int be_floor(const std::string& which, const std::string& name);

// What a connection costs over its stream, by itself and in this process.
void measure_costs(Report& report);

}  // namespace weft::bench
