// SPDX-License-Identifier: Apache-2.0
// WEFT_METRICS=:9400: serves what a process communicates as Prometheus text, over HTTP at /metrics.
// Each rank of a machine needs a port of its own: 9400 plus LOCAL_RANK, or plus the local rank that
// mpirun or srun sets instead.
//
//   weft_operations_total{group,kind,name}, weft_bytes_total{group,kind,name},
//   weft_errors_total{kind,blame}, weft_in_flight{kind}, weft_operation_seconds{kind} (a
//   histogram), weft_steps_total, weft_waited_seconds_total{host,backend}, weft_waited_share{host},
//   weft_calls_in_flight{peer}, weft_queued_handlers{agent}, weft_queued_messages{transport}; each
//   with the rank
#pragma once

#include <string>

namespace weft::instruments {

// Serves until the process ends; a second call does nothing. A process forked from one that serves
// can call it to serve on its own. Throws Caller for an address that is invalid or in use (in a
// forked process, an address in use is a warning: it may be the parent's), Unsupported in a build
// without prometheus-cpp.
void serve_metrics(const std::string& address, int rank);

// ":9400" -> "0.0.0.0:9400"; "127.0.0.1:9400" with local rank 2 -> "127.0.0.1:9402". Throws Caller.
std::string metrics_address(const std::string& text, int local_rank);

}  // namespace weft::instruments
