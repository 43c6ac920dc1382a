// SPDX-License-Identifier: Apache-2.0
// Measures how long a collective takes on one machine: Weft's backends, through ProcessGroup and
// through the Communicator, compared with Gloo (through c10d, and by its own C++ API) and Open MPI.
// Two or four ranks, rank r pinned to core r modulo the number of cores, float sums in place.
//
// A worker process runs one operation of one setting over all sizes: warm-up, then calls one after
// the other. Rank 0 times each call by itself; a call ends when its own operation ends (a
// broadcast's root does not wait for the others). Workers of all settings take turns, over several
// rounds.
//
// The rows "continuations" compare ways to continue after an all_reduce: Work::wait(), a function
// given to future().then(), and one given to on_done_inline(). The functions raise a flag, and the
// calling thread waits for the flag as wait() does.
//
// The rows "algorithms" are the measurements behind transport/mesh/choose.cc: all_reduce of float
// sums by each algorithm, also with more ranks, and by the chosen one.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/torch.h>

#include <weft/engine/store/store.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/profiling/bench/report.h>
#include <weft/profiling/bench/workers.h>
#include <weft/transport/mesh/mesh.h>
#include <weft/transport/registry.h>
#include <weft/weft.h>

namespace {

using weft::bench::now;

namespace mesh = weft::transport::mesh;

const std::vector<std::size_t> kSizes{4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20};
const std::vector<std::size_t> kSizesOfAlgorithms{4,         1 << 10, 4 << 10, 16 << 10, 64 << 10,
                                                  256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
// The size limit for algorithms that send more with more ranks: larger sizes take seconds.
constexpr std::size_t kMostToAll = 4 << 20;
const std::map<std::string, mesh::Algorithm> kAlgorithms{{"direct", mesh::Algorithm::Direct},
                                                         {"blocks", mesh::Algorithm::Blocks},
                                                         {"ring", mesh::Algorithm::Ring},
                                                         {"doubling", mesh::Algorithm::Doubling},
                                                         {"halving", mesh::Algorithm::Halving}};
constexpr double kSecondsPerSize = 0.3;

int calls_for(double one_call) {
  return std::clamp(static_cast<int>(kSecondsPerSize / std::max(one_call, 1e-7)), 6, 20000);
}

// Times `call` as often on all ranks: `agree` broadcasts rank 0's number of calls.
void time_calls(std::size_t bytes, int rank, const std::function<void()>& call,
                const std::function<int(int)>& agree) {
  for (int i = 0; i < 3; ++i) call();
  const double start = now();
  for (int i = 0; i < 5; ++i) call();
  const int calls = agree(calls_for((now() - start) / 5));
  for (int i = 0; i < calls / 5; ++i) call();
  std::vector<double> times;
  times.reserve(static_cast<std::size_t>(calls));
  for (int i = 0; i < calls; ++i) {
    const double begin = now();
    call();
    times.push_back(now() - begin);
  }
  if (rank != 0) return;
  std::printf("%zu", bytes);
  for (const double time : times) std::printf(" %.9f", time);
  std::printf("\n");
  std::fflush(stdout);
}

// Chooses that algorithm for every all_reduce, or as the backend does if no algorithm has that
// name.
mesh::Chooser chooser_of(const std::string& algorithm, const std::string& backend) {
  const auto known = kAlgorithms.find(algorithm);
  if (known == kAlgorithms.end()) return backend == "shm" ? mesh::choose_in_cache : mesh::choose;
  return [forced = known->second](const mesh::Call& call, const mesh::Arithmetic& arithmetic,
                                  int ranks) {
    mesh::Choice choice = mesh::choose(call, arithmetic, ranks);
    if (call.kind == mesh::Kind::AllReduce) choice.algorithm = forced;
    choice.chunk_bytes = std::max<std::size_t>(choice.chunk_bytes, 16 << 10);
    return choice;
  };
}

// The sizes for the workers of a level, see work().
std::vector<std::size_t> sizes_of(const std::string& level) {
  if (level != "chosen" && !kAlgorithms.contains(level)) return kSizes;
  std::vector<std::size_t> sizes = kSizesOfAlgorithms;
  if (level == "direct" || level == "doubling")
    std::erase_if(sizes, [](std::size_t bytes) { return bytes > kMostToAll; });
  return sizes;
}

// `level`: "group" (waits for the Work), "then", "inline", "communicator", or the name of an
// algorithm, with which the communicator runs.
int work(const std::string& backend, const std::string& level, const std::string& operation) {
  weft::bench::pin_to_core(std::atoi(std::getenv("RANK")));
  at::set_num_threads(1);
  weft::ProcessGroup group = weft::init_process_group({.backend = backend});
  const int rank = group.rank();
  const int size = group.size();
  const auto agree = [&](int number) {
    auto value = at::full({1}, number, at::kInt);
    group.broadcast(value, 0).wait();
    return value.item<int>();
  };
  const auto loop = std::make_shared<weft::EventLoop>("bench");
  std::shared_ptr<weft::transport::Communicator> raw;
  const auto transport = weft::transport::open(backend);
  if (level != "group" && level != "then" && level != "inline") {
    const auto store = c10::make_intrusive<c10d::PrefixStore>("bench", group.store());
    const weft::transport::JoinOptions options{
        .rank = rank,
        .size = size,
        .group_name = "bench",
        .store = std::make_shared<weft::group::StoreBootstrap>(store),
        .timeout = std::chrono::seconds(60),
        .loop = loop};
    raw = level == "communicator" ? transport->join(options)
                                  : mesh::join(*transport, options, chooser_of(level, backend));
  }
  for (const std::size_t bytes : sizes_of(level)) {
    const auto count = static_cast<std::int64_t>(bytes / sizeof(float));
    auto tensor = at::zeros({count});
    auto gathered = at::zeros({operation == "all_gather" ? count * size : 1});
    const weft::Slice slice{tensor.data_ptr(), bytes, {}};
    const weft::transport::Elements elements{slice, weft::Dtype::Float32};
    std::vector<weft::Slice> parts;
    for (int i = 0; operation == "all_gather" && i < size; ++i) {
      parts.push_back(
          {static_cast<std::byte*>(gathered.data_ptr()) + static_cast<std::size_t>(i) * bytes,
           bytes,
           {}});
    }
    const auto finish = [](const weft::Op& op) {
      if (!op.done().synchronize(weft::Deadline::in(std::chrono::minutes(1))) || op.error())
        std::exit(3);
    };
    std::function<void()> call;
    if (raw) {
      if (operation == "all_reduce") {
        call = [&] { finish(raw->all_reduce(elements, weft::ReduceOp::Sum, {}, {})); };
      } else if (operation == "broadcast") {
        call = [&] { finish(raw->broadcast(elements, 0, {}, {})); };
      } else {
        call = [&] { finish(raw->all_gather(parts, elements, {}, {})); };
      }
    } else if (level == "then") {
      call = [&] {
        const auto flag = std::make_shared<weft::HostFlag>();
        const auto end = group.all_reduce(tensor).future().then([flag] { flag->raise(); });
        static_cast<void>(flag->synchronize(weft::Deadline::never()));
      };
    } else if (level == "inline") {
      call = [&] {
        const auto flag = std::make_shared<weft::HostFlag>();
        group.all_reduce(tensor).on_done_inline(
            [flag](const std::optional<weft::Error>&) { flag->raise(); });
        static_cast<void>(flag->synchronize(weft::Deadline::never()));
      };
    } else if (operation == "all_reduce") {
      call = [&] { group.all_reduce(tensor).wait(); };
    } else if (operation == "broadcast") {
      call = [&] { group.broadcast(tensor, 0).wait(); };
    } else {
      call = [&] { group.all_gather_into(gathered, tensor).wait(); };
    }
    group.barrier().wait();
    time_calls(bytes, rank, call, agree);
  }
  group.barrier().wait();
  return 0;
}

struct Setting {
  std::string name;
  std::vector<std::string> command;
  std::vector<std::size_t> sizes = kSizes;
  std::map<std::size_t, weft::bench::Samples> times = {};
};

// The first setting must have all sizes.
void run_in_turns(std::vector<Setting>& settings, const std::string& name, int ranks,
                  weft::bench::Report& report) {
  weft::bench::add_before(settings, report);
  for (int round = 0; round < report.runs(); ++round) {
    for (Setting& setting : settings) {
      const bool is_mpi = setting.command[0] == "mpirun";  // mpirun starts its ranks itself
      std::istringstream lines(weft::bench::run_workers(setting.command, is_mpi ? 1 : ranks).text);
      for (std::string line; std::getline(lines, line);) {
        std::istringstream numbers(line);
        std::size_t bytes = 0;
        numbers >> bytes;
        for (double time = 0; numbers >> time;) setting.times[bytes].add(time);
        setting.times[bytes].end_round();
      }
    }
  }
  for (const std::size_t bytes : settings.front().sizes) {
    for (Setting& setting : settings) {
      if (std::ranges::find(setting.sizes, bytes) == setting.sizes.end()) continue;
      if (setting.times[bytes].count() == 0) {
        report.note(setting.name + " gave no time for " + name + " of " + std::to_string(bytes) +
                    " bytes");
        continue;
      }
      report.add(weft::bench::time_row(name + " " + std::to_string(bytes), setting.name, bytes,
                                       setting.times[bytes], 1e6, "us"));
    }
  }
}

void measure(const std::string& operation, int ranks, weft::bench::Report& report,
             const std::string& self, const std::string& gloo, const std::string& mpi) {
  std::vector<Setting> settings;
  settings.push_back({"weft shm", {self, "--worker", "shm", "group", operation}});
  settings.push_back(
      {"weft shm communicator", {self, "--worker", "shm", "communicator", operation}});
  settings.push_back({"weft tcp", {self, "--worker", "tcp", "group", operation}});
  settings.push_back({"gloo (c10d, by weft)", {self, "--worker", "gloo", "group", operation}});
  if (!gloo.empty()) settings.push_back({"gloo", {gloo, operation}});
  if (!mpi.empty()) {
    settings.push_back(
        {"Open MPI",
         {"mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n",
          std::to_string(ranks), "--mca", "btl", "vader,self", mpi, operation}});
  }
  run_in_turns(settings, operation + " " + std::to_string(ranks) + " ranks", ranks, report);
}

void compare_continuations(const std::string& name, const std::string& backend, int ranks,
                           weft::bench::Report& report, const std::string& self) {
  std::vector<Setting> settings;
  for (const std::string level : {"group", "inline", "then"}) {
    const std::string shown = level == "group"  ? "wait()"
                              : level == "then" ? "future().then()"
                                                : "on_done_inline()";
    settings.push_back({shown, {self, "--worker", backend, level, "all_reduce"}});
  }
  run_in_turns(settings, name, ranks, report);
}

void compare_algorithms(const std::string& name, const std::string& backend, int ranks,
                        weft::bench::Report& report, const std::string& self) {
  std::vector<std::string> levels{"chosen"};
  for (const auto& [algorithm, _] : kAlgorithms) levels.push_back(algorithm);
  std::vector<Setting> settings;
  for (const std::string& level : levels) {
    settings.push_back({level, {self, "--worker", backend, level, "all_reduce"}, sizes_of(level)});
  }
  run_in_turns(settings, name, ranks, report);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 5 && std::strcmp(argv[1], "--worker") == 0) return work(argv[2], argv[3], argv[4]);
  weft::bench::Report report("collectives", argc, argv, /*default_runs=*/3, /*takes_before=*/true);
  const std::string self = weft::bench::this_program();
  const std::string mpi = weft::bench::build_peer(
      report, "mpi", "command -v mpirun && mpicxx -O2 -std=c++17 " COLLECTIVES_MPI " -o $OUT");
  // -w, because its headers cause warnings.
  const std::string gloo = weft::bench::build_peer(
      report, "gloo", "c++ -O2 -std=c++17 -w " COLLECTIVES_GLOO " -o $OUT -lgloo -lpthread");
  for (const int ranks : {2, 4}) {
    for (const std::string operation : {"all_reduce", "broadcast", "all_gather"}) {
      if (report.wants(operation + " " + std::to_string(ranks) + " ranks"))
        measure(operation, ranks, report, self, gloo, mpi);
    }
  }
  for (const std::string backend : {"shm", "tcp"}) {
    const std::string name = "continuations " + backend + " 2 ranks";
    if (report.wants(name)) compare_continuations(name, backend, 2, report, self);
  }
  for (const std::string backend : {"shm", "tcp"}) {
    for (const int ranks : {4, 8, 12, 16}) {
      const std::string name = "algorithms " + backend + " " + std::to_string(ranks) + " ranks";
      if (report.wants(name)) compare_algorithms(name, backend, ranks, report, self);
    }
  }
  return report.finish();
}
