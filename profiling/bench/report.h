// SPDX-License-Identifier: Apache-2.0
// The output of every bench: a table, and with --json FILE one object a row,
//   {"bench", "case", "peer", "bytes", "metric", "unit", "p50", "p99", "runs"}
// where "peer" names what was measured ("weft", "libtorch", …). Peers are measured in the same run,
// in turns, so that noise of the machine affects all of them. Not thread-safe.
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
  // The range of the rounds' medians, as a share of the median of all samples; 0 with fewer than
  // two rounds.
  double spread() const;

 private:
  std::vector<double> values_;
  std::vector<std::size_t> round_ends_;  // the number of values at the end of each round
};

// Rows of an earlier build have this suffix after the peer's name.
inline constexpr const char* kBefore = " before";

struct Row {
  std::string name;  // the case
  std::string peer;
  std::size_t bytes = 0;
  std::string metric;  // the quantity: "bandwidth", "step time"
  std::string unit;    // "GB/s", "ms"
  double p50 = 0;
  double p99 = 0;  // the bad end: 99 % of the runs were at least as good
  int runs = 0;
  double spread = 0;  // between the rounds, see Samples
};

// Makes a row from times in seconds; `factor` converts seconds to the unit (1e3: ms).
Row time_row(std::string name, std::string peer, std::size_t bytes, const Samples& seconds,
             double factor, std::string unit);
// Makes a row in GB/s from the times in seconds that moving `bytes` took.
Row bandwidth_row(std::string name, std::string peer, std::size_t bytes, const Samples& seconds);

// A peer to measure: `run` performs the operation once and returns when it is done.
struct Peer {
  std::string name;
  std::function<void()> run;
};

// Runs each peer once to warm up, then all of them in turns, `runs` rounds. Returns the times in
// seconds, one Samples for each peer.
std::vector<Samples> measure(const std::vector<Peer>& peers, int runs);

class Report {
 public:
  // Reads --json FILE, --case TEXT (only cases whose name contains it), --runs N and --before
  // PROGRAM (add_before() in workers.h, refused by a bench without it) from the command line;
  // prints the usage and exits on anything else.
  Report(std::string bench, int argc, char** argv, int default_runs, bool takes_before = false);
  bool wants(const std::string& name);
  int runs() const { return runs_; }
  // The same bench of an earlier build, with which this one is compared; "" without --before.
  const std::string& before() const { return before_; }

  // Prints a row, and writes it to the JSON file if one was asked for (exits if it cannot), so that
  // an interrupted run leaves its rows. Compares each row with the first row of its case, and
  // prints how many times as good the first one is. Compares a row of an earlier build ("<peer>
  // before") with the peer's row.
  void add(const Row& row);
  void note(const std::string& text) const;

  // Returns the exit code for main(): 2 if --case matches no case. With --before, lists the rows
  // that are slower than the earlier build's by more than 5 % and by more than twice the spread of
  // the earlier build's rounds.
  int finish() const;

 private:
  void print_header() const;
  int peer_width() const { return before_.empty() ? 16 : 28; }
  void write(const Row& row);
  void compare_with_before() const;

  std::string bench_;
  std::string json_name_;
  // Opened at the first row, because workers of a bench may have the bench's arguments.
  std::ofstream json_;
  std::string only_;
  std::string before_;
  bool any_wanted_ = false;
  std::set<std::string> unwanted_;
  int runs_;
  mutable bool has_header_ = false;  // whether the table's header has been printed
  std::vector<Row> rows_;
};

}  // namespace weft::bench
