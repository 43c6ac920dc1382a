// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <map>
#include <sstream>
#include <string>

#include <torch/cuda.h>

#include <weft/profiling/bench/fsdp_on_gpu.h>
#include <weft/profiling/bench/workers.h>

namespace weft::bench {

void bench_fsdp_on_gpu(Report& report) {
  const std::string name = "gpu blocks step";
  const std::string program = FSDP_GPU_WORKER;
  if (!report.wants(name) || !report.before().empty()) return;
  if (program.empty()) return report.note("no GPU cases: this build has no libtorch with CUDA");
  if (torch::cuda::device_count() == 0) return report.note("no GPU cases: there is no GPU");
  const std::string worker = std::filesystem::path(this_program()).replace_filename(program);
  std::map<std::string, Samples> seconds;  // by peer
  for (int round = 0; round < report.runs(); ++round) {
    std::istringstream lines(run_workers({worker}, 1).text);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string peer;
      std::getline(words, peer, ':');
      for (double time = 0; words >> time;) seconds[peer].add(time);
    }
    for (auto& [peer, samples] : seconds) samples.end_round();
  }
  for (const auto& [peer, samples] : seconds)
    report.add(time_row(name, peer, 0, samples, 1e3, "ms"));
  const auto note = [&](const std::string& mine, const std::string& plain) {
    if (!seconds.contains(mine) || !seconds.contains(plain)) return;
    std::ostringstream text;
    text.precision(4);
    text << name << ", " << mine << " / " << plain << ": "
         << seconds[mine].quantile(0.5) / seconds[plain].quantile(0.5);
    report.note(text.str());
  };
  note("weft nccl", "plain");
  note("weft nccl captured", "plain captured");
}

}  // namespace weft::bench
