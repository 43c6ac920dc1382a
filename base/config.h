// SPDX-License-Identifier: Apache-2.0
// Weft's own environment variables, read once; docs/environment.md lists them. Other code reads
// only variables that belong to others: the rendezvous' (RANK, MASTER_ADDR, …), TMPDIR, those of
// mpirun. weft-run also checks whether its workers' environment sets some of these.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace weft {

enum class LogLevel { Off, Error, Warn, Info, Debug };
enum class DebugLevel { Off, Info, Detail };
enum class GpuDirect { Auto, DmaBuf, PeerMemory, Off };
enum class ShmCopies { Auto, One, Two };
enum class Hierarchy { Auto, Off };

struct Config {
  LogLevel log = LogLevel::Warn;       // WEFT_LOG
  DebugLevel debug = DebugLevel::Off;  // WEFT_DEBUG
  bool crash_trace = false;  // WEFT_CRASH_TRACE; base/crash.cc reads it itself, before main
  // WEFT_LINE_OUTPUT; engine/rendezvous/launcher_environment.cc reads it itself, before main
  bool line_output = false;
  std::vector<std::string> socket_interfaces;  // WEFT_SOCKET_IFNAME, comma-separated
  int tcp_sockets = 1;                         // WEFT_TCP_SOCKETS
  ShmCopies shm_copies = ShmCopies::Auto;      // WEFT_SHM_COPIES
  Hierarchy hierarchy = Hierarchy::Auto;       // WEFT_HIERARCHY
  std::vector<std::string> ib_devices;     // WEFT_IB_HCA, comma-separated: "mlx5_0" or "mlx5_0:1"
  std::optional<int> ib_gid_index;         // WEFT_IB_GID_INDEX
  std::optional<int> ib_service_level;     // WEFT_IB_SL
  std::optional<int> ib_traffic_class;     // WEFT_IB_TC
  std::optional<int> ib_timeout;           // WEFT_IB_TIMEOUT
  GpuDirect gpu_direct = GpuDirect::Auto;  // WEFT_GPUDIRECT
  std::string backend;                     // WEFT_BACKEND, as ProcessGroupOptions::backend
  std::string timeline_file;               // WEFT_TIMELINE
  std::string dump_folder;                 // WEFT_DUMP_DIR
  std::string metrics_address;             // WEFT_METRICS
  std::string status_file;                 // WEFT_STATUS_FILE, from weft-run

  // Reads the variables through `variable` (null: not set). A value outside the allowed ones throws
  // a Caller error that lists them. Values are case-insensitive.
  static Config from(const std::function<const char*(const char*)>& variable);
};

// This process's Config. The first call reads the environment and throws the errors of
// Config::from; after a failure, every later call does so too.
const Config& config();

// Returns the variables of an environment ("NAME=value", null-terminated) that begin with WEFT_ and
// that Weft does not read.
std::vector<std::string> unknown_variables(const char* const* environment);

// Called before the first wait for another rank or worker: throws what config() throws, and warns
// once about unknown variables, which may be misspelt. Of a machine's ranks only the first warns.
void check_environment();

}  // namespace weft
