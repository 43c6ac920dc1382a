// SPDX-License-Identifier: Apache-2.0
// A job as one weft-run sees it: it runs round after round, until all ranks have ended well or no
// restart is left.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <weft/engine/launch/options.h>
#include <weft/engine/launch/shared_store.h>

namespace weft::launch {

// The store at the endpoint, and the address by which other nodes reach this machine. An OpenStore
// blocks until the store answers; it throws Timeout.
struct OpenedStore {
  std::shared_ptr<SharedStore> store;
  std::string local_address;
};
using OpenStore = std::function<OpenedStore(const Options&)>;

// The body of weft-run: reads the command line, runs the job and merges the timeline. If the nodes
// meet at an endpoint, opens the store there with `open_store`; if that is empty, replaces this
// program by weft-agent, the program beside it that has one, so that jobs of one machine start
// without libtorch. --version prints `version`, the program's name and version. Returns the exit
// code: 0, or that of the rank that failed first; 1 if only its output could not be written, ranks
// could not be started, or the store is lost; 2 after a mistake in the call; 128 plus the number of
// a signal that ended the job.
int run_command(int argc, char** argv, const std::string& version, const OpenStore& open_store);

}  // namespace weft::launch
