// What the environment asks for to look inside a running process (docs/environment.md); the timeline's file is in config.h.
#pragma once

#include <functional>
#include <string>

namespace weft {

struct Instruments {
  std::string dump_folder;      // WEFT_DUMP_DIR
  std::string metrics_address;  // WEFT_METRICS
  std::string status_file;      // WEFT_STATUS_FILE, from weft-run

  static Instruments from(const std::function<const char*(const char*)>& variable);
  // This process's, read at the first call.
  static const Instruments& wanted();
};

}  // namespace weft
