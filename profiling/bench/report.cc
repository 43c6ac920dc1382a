// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

#include <nlohmann/json.hpp>
#include <unistd.h>

#include <weft/profiling/bench/report.h>

namespace weft::bench {

double Samples::quantile(double share) const {
  if (values_.empty()) return 0;
  std::vector<double> sorted = values_;
  std::sort(sorted.begin(), sorted.end());
  const auto last = static_cast<double>(sorted.size() - 1);
  return sorted[static_cast<std::size_t>(std::lround(share * last))];
}

void Samples::end_round() { round_ends_.push_back(values_.size()); }

double Samples::spread() const {
  Samples medians;
  std::size_t begin = 0;
  for (const std::size_t end : round_ends_) {
    Samples round;
    round.values_.assign(values_.begin() + static_cast<std::ptrdiff_t>(begin),
                         values_.begin() + static_cast<std::ptrdiff_t>(end));
    if (round.count() > 0) medians.add(round.quantile(0.5));
    begin = end;
  }
  return medians.count() < 2 ? 0 : (medians.quantile(1) - medians.quantile(0)) / quantile(0.5);
}

Row time_row(std::string name, std::string peer, std::size_t bytes, const Samples& seconds,
             double factor, std::string unit) {
  return {std::move(name),
          std::move(peer),
          bytes,
          "time",
          std::move(unit),
          seconds.quantile(0.5) * factor,
          seconds.quantile(0.99) * factor,
          seconds.count(),
          seconds.spread()};
}

Row bandwidth_row(std::string name, std::string peer, std::size_t bytes, const Samples& seconds) {
  const double gigabytes = static_cast<double>(bytes) * 1e-9;
  return {std::move(name),
          std::move(peer),
          bytes,
          "bandwidth",
          "GB/s",
          gigabytes / seconds.quantile(0.5),
          gigabytes / seconds.quantile(0.99),
          seconds.count(),
          seconds.spread()};
}

std::vector<Samples> measure(const std::vector<Peer>& peers, int runs) {
  std::vector<Samples> samples(peers.size());
  for (const Peer& peer : peers) peer.run();
  for (int run = 0; run < runs; ++run) {
    for (std::size_t i = 0; i < peers.size(); ++i) {
      const auto start = std::chrono::steady_clock::now();
      peers[i].run();
      samples[i].add(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
  }
  return samples;
}

Report::Report(std::string bench, int argc, char** argv, int default_runs, bool takes_before)
    : bench_(std::move(bench)), runs_(default_runs) {
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const char* value = i + 1 < argc ? argv[++i] : nullptr;
    if (option == "--json" && value != nullptr) {
      json_name_ = value;
    } else if (option == "--case" && value != nullptr) {
      only_ = value;
    } else if (option == "--runs" && value != nullptr && std::atoi(value) > 0) {
      runs_ = std::atoi(value);
    } else if (takes_before && option == "--before" && value != nullptr) {
      before_ = std::filesystem::absolute(value);
      if (access(value, X_OK) == 0) continue;
      std::fprintf(
          stderr, "%s_bench: --before: '%s' is not a program; name the %s_bench of another build\n",
          bench_.c_str(), value, bench_.c_str());
      std::exit(2);
    } else {
      std::fprintf(stderr, "usage: %s_bench [--json FILE] [--case TEXT] [--runs N]%s\n",
                   bench_.c_str(), takes_before ? " [--before PROGRAM]" : "");
      std::exit(option == "--help" ? 0 : 2);
    }
  }
}

namespace {

// How many times as good `other` is; for a rate, more is better.
double times_as_good(const Row& other, const Row& row) {
  const bool rate = row.unit.find('/') != std::string::npos;
  return rate ? other.p50 / row.p50 : row.p50 / other.p50;
}

bool same_measure(const Row& one, const Row& other) {
  return one.name == other.name && one.metric == other.metric;
}

}  // namespace

// Prints the header only with the first line, because a bench may leave the table to another
// process.
void Report::print_header() const {
  if (std::exchange(has_header_, true)) return;
  std::printf("%-42s %-*s %9s  %10s %10s %-5s\n", "case", peer_width(), "peer", "MiB", "p50", "p99",
              "unit");
}

bool Report::wants(const std::string& name) {
  const bool wanted = name.find(only_) != std::string::npos;
  any_wanted_ = any_wanted_ || wanted;
  if (!wanted) unwanted_.insert(name);
  return wanted;
}

void Report::add(const Row& row) {
  print_header();
  rows_.push_back(row);
  if (!json_name_.empty()) write(row);
  std::printf("%-42s %-*s %9.2f  %10.3f %10.3f %-5s", row.name.c_str(), peer_width(),
              row.peer.c_str(), static_cast<double>(row.bytes) / (1 << 20), row.p50, row.p99,
              row.unit.c_str());
  const auto compared = std::ranges::find_if(rows_, [&](const Row& other) {
    return same_measure(other, row) && (before_.empty() || other.peer + kBefore == row.peer);
  });
  if (compared != rows_.end() && compared + 1 != rows_.end()) {
    std::printf("  %s is %.2f x", compared->peer.c_str(), times_as_good(*compared, row));
  }
  std::printf("\n");
  std::fflush(stdout);
}

void Report::note(const std::string& text) const {
  print_header();
  std::printf("# %s\n", text.c_str());
}

int Report::finish() const {
  if (!only_.empty() && rows_.empty() && !any_wanted_) {
    std::fprintf(stderr, "%s_bench: --case: no case's name contains '%s'; there are:\n",
                 bench_.c_str(), only_.c_str());
    for (const std::string& name : unwanted_) std::fprintf(stderr, "  %s\n", name.c_str());
    return 2;
  }
  if (!before_.empty()) compare_with_before();
  return 0;
}

void Report::compare_with_before() const {
  std::vector<std::string> slower;
  int compared = 0;
  for (const Row& before : rows_) {
    const auto now = std::ranges::find_if(rows_, [&](const Row& row) {
      return same_measure(row, before) && row.peer + kBefore == before.peer;
    });
    if (now == rows_.end()) continue;
    ++compared;
    const double times_as_long = times_as_good(before, *now);
    if (times_as_long <= 1 + std::max(0.05, 2 * before.spread)) continue;
    char line[200];
    std::snprintf(line, sizeof line,
                  "%s, %s: %.2f times as slow as before, whose rounds differ by %.0f %%",
                  before.name.c_str(), now->peer.c_str(), times_as_long, 100 * before.spread);
    slower.emplace_back(line);
  }
  note(std::to_string(slower.size()) + " of " + std::to_string(compared) +
       " rows are slower than before by more than 5 % and by more than twice the spread of the "
       "rounds before" +
       (slower.empty() ? "" : ":"));
  for (const std::string& line : slower) note(line);
}

void Report::write(const Row& row) {
  if (!json_.is_open()) json_.open(json_name_);
  nlohmann::ordered_json object;
  object["bench"] = bench_;
  object["case"] = row.name;
  object["peer"] = row.peer;
  object["bytes"] = row.bytes;
  object["metric"] = row.metric;
  object["unit"] = row.unit;
  object["p50"] = row.p50;
  object["p99"] = row.p99;
  object["runs"] = row.runs;
  if (!before_.empty()) object["spread"] = row.spread;
  json_ << object.dump() << std::endl;
  if (json_) return;
  std::fprintf(stderr, "%s_bench: cannot write %s\n", bench_.c_str(), json_name_.c_str());
  std::exit(1);
}

}  // namespace weft::bench
