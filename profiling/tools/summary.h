// SPDX-License-Identifier: Apache-2.0
// Computes where the time of a run went. For each step and rank:
//
//   communication  operations between ranks were open (the union of their times)
//   exposed        a host thread waited for another rank (Work::wait of CPU tensors, synchronize,
//                  futures) while no thread worked for other ranks (an incoming call, a
//                  continuation, a backward pass, a remote optimizer's step); or a CUDA stream
//                  waited (Work::wait of CUDA tensors: the time between the events around it,
//                  except in CUDA graphs). Not recorded, and NaN, if the program was built with
//                  WEFT_TRACE=OFF; so is compute
//   compute        the rest of the step: step - exposed
//   waiting        collectives had begun here and not yet on the last rank: the time that other
//                  ranks cost this one
//
// A step lasts from one mark to the next (DistributedDataParallel's forward passes,
// weft::begin_step()). A rank without marks uses those of the first rank that has some; a run
// without any mark is one step.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <weft/profiling/tools/timeline.h>

namespace weft::tools {

struct Times {  // microseconds
  double total = 0;
  double compute = 0;
  double communication = 0;
  double exposed = 0;
  double waiting = 0;
};

struct Step {
  int number = 0;  // from 0
  std::map<int, Times> ranks;
};

// The traffic from one rank to another. A message counts from when both sides had begun until the
// receive ended. A call with its reply counts for its time minus that of the function that it
// called. Collectives belong to no link.
struct Link {
  int from = 0;  // the caller of calls
  int to = 0;
  std::uint64_t messages = 0;
  std::uint64_t calls = 0;
  std::uint64_t bytes = 0;
  double microseconds = 0;
  bool has_speed() const { return bytes > 0 && microseconds > 0; }
  double gigabytes_per_second() const {
    return microseconds > 0 ? static_cast<double>(bytes) / microseconds / 1000 : 0;
  }
};

struct Answers {
  std::size_t calls = 0;  // calls of other ranks that it answered
  double microseconds = 0;
  double mean() const { return calls > 0 ? microseconds / static_cast<double>(calls) : 0; }
};

struct Gap {
  int rank = 0;
  double begin = 0;
  double end = 0;
};

struct Summary {
  bool marked = false;  // steps are marked; otherwise the whole run is one step
  std::vector<Step> steps;
  // The mean of the steps; if there are at least three, without the first, which warms up, and the
  // last, which reaches to the end of the program.
  std::map<int, Times> ranks;
  std::map<int, Times> whole;       // the sums of total and exposed over all steps
  std::map<int, std::size_t> last;  // how many collectives each rank was the last to begin
  // How much later than the first rank each began the collectives, in all; in microseconds.
  std::map<int, double> late;
  std::size_t collectives = 0;  // collectives with several ranks
  // The slowest first; links that moved nothing or took no time last.
  std::vector<Link> links;
  // The longest times without operations between ranks, the longest first, at most 5.
  std::vector<Gap> gaps;
  // The rank that began collectives latest (`late`); in a run without collectives, the rank
  // with the longest mean time to answer a call.
  std::optional<int> slowest_rank;
  std::map<int, Answers> answers;  // by rank that was called
};

Summary summarize(const Run& run);

constexpr std::size_t kStepsShown = 20;

// A table for people, with so many of the longest steps.
std::string to_text(const Run& run, const Summary& summary, std::size_t steps = kStepsShown);
// A JSON object for programs.
std::string to_json(const Summary& summary);

}  // namespace weft::tools
