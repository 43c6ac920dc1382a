// weft-run's command line.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <weft/engine/launch/rendezvous.h>

namespace weft::launch {

// Of which of a machine's ranks which streams are meant.
class Streams {
 public:
  // torchrun's form: 0 none, 1 stdout, 2 stderr, 3 both, of all ranks, or of single ones as in
  // "0:3,1:2". Throws Caller, also for one that is none of these `ranks`.
  static Streams parse(const std::string& option, const std::string& text, int ranks);
  bool has(int local_rank, int descriptor) const;
  bool any() const { return of_all_ != 0 || !of_rank_.empty(); }

 private:
  int of_all_ = 0;
  std::map<int, int> of_rank_;
};

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
  std::string log_folder;  // of this run; "": no logs
  Streams redirected;      // to the logs alone
  Streams teed;            // to the logs as well
  std::vector<std::string> command;
};

// Ends the process after --help, after --version (it prints `version`) and after a mistake of
// CLI11's kind; throws Caller for others.
Options parse_options(int argc, char** argv, const std::string& version);

}  // namespace weft::launch
