// What every bench prints: a table, and with --json FILE one object a row,
//   {"bench", "case", "peer", "bytes", "metric", "unit", "p50", "p99", "runs"}
// where "peer" is who was measured ("weft", "libtorch", …). Peers are measured in the same run, in
// turns, so that a noisy machine is noisy for all of them. Not thread-safe.
#pragma once

#include <cstddef>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace weft::bench {

// Times or rates of one peer in one case.
class Samples {
 public:
  void add(double value) { values_.push_back(value); }
  // Ends a round: the values added since the last call belong to it.
  void end_round();
  // The value below which the share (0 to 1) of the samples lies.
  double quantile(double share) const;
  int count() const { return static_cast<int>(values_.size()); }
  // How far the medians of the rounds lie apart, as a share of the median of all samples; 0 with
  // fewer than two rounds.
  double spread() const;

 private:
  std::vector<double> values_;
  std::vector<std::size_t> round_ends_;  // how many values there were at the end of each
};

// The rows of an earlier build carry this suffix behind the peer's name.
inline constexpr const char* kBefore = " before";

struct Row {
  std::string name;  // of the case
  std::string peer;
  std::size_t bytes = 0;
  std::string metric;  // what was measured: "bandwidth", "step time"
  std::string unit;    // "GB/s", "ms"
  double p50 = 0;
  double p99 = 0;  // the bad end: 99 % of the runs were at least as good
  int runs = 0;
  double spread = 0;  // of the rounds, see Samples
};

// A row from times in seconds; `per_second` turns a time into the unit (1e3: ms).
Row time_row(std::string name, std::string peer, std::size_t bytes, const Samples& seconds,
             double factor, std::string unit);
// A row in GB/s from the times in seconds that moving `bytes` took.
Row bandwidth_row(std::string name, std::string peer, std::size_t bytes, const Samples& seconds);

// Somebody to measure: `run` does the thing once and returns when it is done.
struct Peer {
  std::string name;
  std::function<void()> run;
};

// Runs each peer once to warm up, then all of them in turns, `runs` rounds; the times in seconds,
// one Samples a peer.
std::vector<Samples> measure(const std::vector<Peer>& peers, int runs);

class Report {
 public:
  // Reads --json FILE, --case TEXT (only cases whose name contains it), --runs N and --before
  // PROGRAM (add_before() in workers.h, refused by a bench without it) from the command line;
  // prints the usage and exits on anything else.
  Report(std::string bench, int argc, char** argv, int default_runs, bool takes_before = false);
  bool wants(const std::string& name);
  int runs() const { return runs_; }
  // The same bench of an earlier build, with which this one is compared; "" where --before names
  // none.
  const std::string& before() const { return before_; }

  // Prints a row, and writes it to the JSON file if one was asked for (it exits where it cannot): a
  // run that is ended has what was measured until then. The first row of a case is the one the
  // others are compared with: behind each of those stands how many times as good the first one is.
  // A row of an earlier build ("<peer> before") is compared with the peer's.
  void add(const Row& row);
  void note(const std::string& text) const;

  // Returns what main() returns: 2 where --case names no case that there is. With --before it lists
  // the rows that are slower than the earlier build's by more than 5 % and by more than twice the
  // spread of the earlier build's rounds.
  int finish() const;

 private:
  void print_header() const;
  int peer_width() const { return before_.empty() ? 16 : 28; }
  void write(const Row& row);
  void compare_with_before() const;

  std::string bench_;
  std::string json_name_;
  std::ofstream json_;  // open from the first row on: workers of a bench may have its arguments
  std::string only_;
  std::string before_;
  bool any_wanted_ = false;
  std::set<std::string> unwanted_;
  int runs_;
  mutable bool has_header_ = false;  // on the screen
  std::vector<Row> rows_;
};

}  // namespace weft::bench
