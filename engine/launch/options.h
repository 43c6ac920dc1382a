// SPDX-License-Identifier: Apache-2.0
// weft-run's command line.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <weft/engine/launch/rendezvous.h>

namespace weft::launch {

// Selects stdout, stderr or both for each local rank.
class Streams {
 public:
  // Parses torchrun's form: 0 none, 1 stdout, 2 stderr, 3 both, for all ranks or for single ones as
  // in "0:3,1:2". Throws Caller, also for a local rank that is not below `ranks`.
  static Streams parse(const std::string& option, const std::string& text, int ranks);
  bool has(int local_rank, int descriptor) const;
  bool any() const { return of_all_ != 0 || !of_rank_.empty(); }

 private:
  int of_all_ = 0;
  std::map<int, int> of_rank_;
};

// It has 17 members, because each is one option of the command line.
struct Options {
  int ranks = 1;  // on this machine
  Rendezvous::Settings rendezvous;
  std::string endpoint_host;  // "": each node is told its rank
  int endpoint_port = 0;
  // Whether this node hosts the store at the endpoint; nothing: if the endpoint is this machine.
  std::optional<bool> is_host;
  std::string local_address;     // "": that of the route to the endpoint
  std::optional<int> node_rank;  // only a wish if there is an endpoint
  std::string master_address = "127.0.0.1";
  int master_port = 0;
  std::string run_id = "none";
  int grace_seconds = 5;
  bool no_prefix = false;
  int status_seconds = 0;  // 0: no status lines
  std::string log_folder;  // of this run; "": no log files
  Streams redirected;      // written to the logs only
  Streams teed;            // written to the logs as well
  std::vector<std::string> command;
};

// Parses the command line. Ends the process after --help, after --version (it prints `version`) and
// after a mistake that CLI11 finds; throws Caller for other mistakes.
Options parse_options(int argc, char** argv, const std::string& version);

}  // namespace weft::launch
