// A job as one weft-run sees it: round after round, until all ranks have ended well, or no restart
// is left.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <weft/engine/launch/options.h>
#include <weft/engine/launch/shared_store.h>

namespace weft::launch {

// The store at the endpoint, and the address by which others reach this machine. Blocks until it is
// there; throws Timeout.
struct OpenedStore {
  std::shared_ptr<SharedStore> store;
  std::string local_address;
};
using OpenStore = std::function<OpenedStore(const Options&)>;

// What weft-run does: reads the command line, runs the job, merges the timeline. `open_store` is
// called where the nodes meet at an endpoint; where there is none, goes on as the program beside
// this one that has it (weft-agent), so that jobs of one machine start without libtorch. --version
// prints `version`, the program's name and version. The exit code: 0, or that of the rank that
// failed first; 1 when only its output could not be written, ranks could not be started, or the
// store is lost; 2 after a mistake in the call; 128 and a signal's number.
int run_command(int argc, char** argv, const std::string& version, const OpenStore& open_store);

}  // namespace weft::launch
