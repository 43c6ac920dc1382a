// weft-run's command line.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <weft/engine/launch/rendezvous.h>

namespace weft::launch {

struct Options {
  int ranks = 1;  // on this machine
  Rendezvous::Settings rendezvous;
  std::string endpoint_host;  // "": the nodes are told who they are
  int endpoint_port = 0;
  std::optional<bool> is_host;   // of the store there; nothing: where the endpoint is this machine
  std::string local_address;     // "": as the route to the endpoint says
  std::optional<int> node_rank;  // with an endpoint a wish
  std::string master_address = "127.0.0.1";
  int master_port = 0;
  std::string run_id = "none";
  int grace_seconds = 5;
  bool no_prefix = false;
  int status_seconds = 0;  // 0: no status
  std::vector<std::string> command;
};

// Ends the process after --help and after a mistake of CLI11's kind; throws Caller for others.
Options parse_options(int argc, char** argv);

}  // namespace weft::launch
