// Where the time of a run went. Of each step and rank:
//
//   communication  operations between ranks were under way (the union of their times)
//   exposed        a thread of the host waited for one (Work::wait of CPU tensors, synchronize,
//   futures) while no thread
//                  worked for other ranks (a called function, a continuation, a backward pass, a
//                  remote optimizer's step); or a CUDA stream waited (Work::wait of CUDA tensors:
//                  the time between the events around it, but for graphs). Not recorded, and NaN,
//                  where the program was built with WEFT_TRACE=OFF; compute is as well
//   compute        the rest of the step: step - exposed
//   waiting        collectives had begun here and not yet on the last rank: what others cost this
//   one
//
// A step is from one mark to the next (DistributedDataParallel's forward passes,
// weft::begin_step()). A rank without marks has those of the first rank that has some; a run
// without any is one step.
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

// A message counts from when both sides had begun until the receive ended; a call, with its reply,
// for what it took longer than the function that it called. Collectives are of no link.
struct Link {
  int from = 0;  // of calls, the caller
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
  std::size_t calls = 0;  // that others made to it, and that it answered
  double microseconds = 0;
  double mean() const { return calls > 0 ? microseconds / static_cast<double>(calls) : 0; }
};

struct Gap {
  int rank = 0;
  double begin = 0;
  double end = 0;
};

struct Summary {
  bool marked = false;  // steps are; else the whole run stands for one
  std::vector<Step> steps;
  // The mean of their steps; where there are three, without the first, which warms up, and the
  // last, which reaches to the end of the program.
  std::map<int, Times> ranks;
  std::map<int, Times> whole;       // the sums of total and exposed over all steps
  std::map<int, std::size_t> last;  // how many collectives each rank was the last to begin
  std::size_t collectives = 0;      // that all ranks took part in
  std::vector<Link> links;  // the slowest first, and last those that moved nothing or took no time
  std::vector<Gap>
      gaps;  // the longest times without anything between ranks; the longest first, at most 5
  // Last to collectives most often; in a run without any the one whose answers to calls took
  // longest, on the average.
  std::optional<int> slowest_rank;
  std::map<int, Answers> answers;  // of each rank that was called
};

Summary summarize(const Run& run);

constexpr std::size_t kStepsShown = 20;

// As a table for people, with so many of the steps: the longest.
std::string to_text(const Run& run, const Summary& summary, std::size_t steps = kStepsShown);
// As an object for programs.
std::string to_json(const Summary& summary);

}  // namespace weft::tools
