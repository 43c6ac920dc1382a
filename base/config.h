// What the environment sets, read once. The table is docs/environment.md; nothing else in Weft calls getenv for itself,
// except the rendezvous, whose variables (RANK, MASTER_ADDR, …) are arguments of one call.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace weft {

enum class LogLevel { Off, Error, Warn, Info, Debug };
enum class DebugLevel { Off, Info, Detail };

struct Config {
  LogLevel log = LogLevel::Warn;               // WEFT_LOG
  DebugLevel debug = DebugLevel::Off;          // WEFT_DEBUG
  std::vector<std::string> socket_interfaces;  // WEFT_SOCKET_IFNAME, comma-separated
  std::vector<std::string> ib_devices;         // WEFT_IB_HCA, comma-separated
  std::string timeline_file;                   // WEFT_TIMELINE

  // Reads the variables through `variable` (null = not set). A value that is none of the allowed ones is a Caller error
  // that lists them. Values are case-insensitive.
  static Config from(const std::function<const char*(const char*)>& variable);
};

// This process's Config. The first call reads the environment and throws what Config::from throws; so does every later one.
const Config& config();

}  // namespace weft
