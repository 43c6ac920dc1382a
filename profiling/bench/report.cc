#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <utility>

#include <nlohmann/json.hpp>

#include <weft/profiling/bench/report.h>

namespace weft::bench {

double Samples::quantile(double share) const {
  if (values_.empty()) return 0;
  std::vector<double> sorted = values_;
  std::sort(sorted.begin(), sorted.end());
  const auto last = static_cast<double>(sorted.size() - 1);
  return sorted[static_cast<std::size_t>(std::lround(share * last))];
}

Row time_row(std::string name, std::string peer, std::size_t bytes, const Samples& seconds, double factor,
             std::string unit) {
  return {std::move(name),
          std::move(peer),
          bytes,
          "time",
          std::move(unit),
          seconds.quantile(0.5) * factor,
          seconds.quantile(0.99) * factor,
          seconds.count()};
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
          seconds.count()};
}

std::vector<Samples> measure(const std::vector<Peer>& peers, int runs) {
  std::vector<Samples> samples(peers.size());
  for (const Peer& peer : peers) peer.run();
  for (int run = 0; run < runs; ++run) {
    for (std::size_t i = 0; i < peers.size(); ++i) {
      const auto start = std::chrono::steady_clock::now();
      peers[i].run();
      samples[i].add(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
  }
  return samples;
}

Report::Report(std::string bench, int argc, char** argv, int default_runs) : bench_(std::move(bench)), runs_(default_runs) {
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const char* value = i + 1 < argc ? argv[++i] : nullptr;
    if (option == "--json" && value != nullptr) {
      json_name_ = value;
    } else if (option == "--case" && value != nullptr) {
      only_ = value;
    } else if (option == "--runs" && value != nullptr && std::atoi(value) > 0) {
      runs_ = std::atoi(value);
    } else {
      std::fprintf(stderr, "usage: %s_bench [--json FILE] [--case TEXT] [--runs N]\n", bench_.c_str());
      std::exit(option == "--help" ? 0 : 2);
    }
  }
}

// With the first line, not before: a bench may leave the table to another process.
void Report::print_header() const {
  if (std::exchange(has_header_, true)) return;
  std::printf("%-42s %-16s %9s  %10s %10s %-5s\n", "case", "peer", "MiB", "p50", "p99", "unit");
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
  std::printf("%-42s %-16s %9.2f  %10.3f %10.3f %-5s", row.name.c_str(), row.peer.c_str(),
              static_cast<double>(row.bytes) / (1 << 20), row.p50, row.p99, row.unit.c_str());
  const auto first = std::find_if(rows_.begin(), rows_.end(),
                                  [&](const Row& other) { return other.name == row.name && other.metric == row.metric; });
  if (first + 1 != rows_.end()) {
    // More is better where the unit is a rate.
    const bool rate = row.unit.find('/') != std::string::npos;
    std::printf("  %s is %.2f x", first->peer.c_str(), rate ? first->p50 / row.p50 : row.p50 / first->p50);
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
    std::fprintf(stderr, "%s_bench: --case: no case's name contains '%s'; there are:\n", bench_.c_str(), only_.c_str());
    for (const std::string& name : unwanted_) std::fprintf(stderr, "  %s\n", name.c_str());
    return 2;
  }
  return 0;
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
  json_ << object.dump() << std::endl;
  if (json_) return;
  std::fprintf(stderr, "%s_bench: cannot write %s\n", bench_.c_str(), json_name_.c_str());
  std::exit(1);
}

}  // namespace weft::bench
