// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/engine/launch/process.h>
#include <weft/profiling/bench/workers.h>

namespace weft::bench {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void pin_to_core(int rank) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<unsigned>(rank) % std::max(1u, std::thread::hardware_concurrency()), &cores);
  sched_setaffinity(0, sizeof cores, &cores);
}

std::vector<double> time_each(int steps, const std::function<void()>& step) {
  std::vector<double> times;
  for (int i = 0; i < steps; ++i) {
    const double start = now();
    step();
    times.push_back(now() - start);
  }
  return times;
}

void print_numbers(const std::vector<double>& numbers) {
  for (const double number : numbers) std::printf("%.9f ", number);
  std::printf("\n");
  std::fflush(stdout);
}

int rank_of_worker() { return std::atoi(std::getenv("RANK")); }

void tell_other(const std::string& line) {
  const std::string text = line + "\n";
  if (write(std::atoi(std::getenv("WEFT_BENCH_OTHER")), text.data(), text.size()) < 0) std::exit(2);
}

std::string hear_other() {
  std::string line;
  for (char letter = 0; read(std::atoi(std::getenv("WEFT_BENCH_OTHER")), &letter, 1) == 1;) {
    if (letter == '\n') return line;
    line += letter;
  }
  std::exit(2);
}

std::string this_program() {
  char path[4096] = "";
  if (readlink("/proc/self/exe", path, sizeof path - 1) < 0) std::exit(2);
  return path;
}

std::string build_peer(const Report& report, const std::string& name, const std::string& command) {
  if (!report.before().empty()) return "";
  const std::string program = this_program() + "_" + name;
  const std::string log = program + ".log";
  if (std::system(("OUT='" + program + "'; { " + command + "; } >'" + log + "' 2>&1").c_str()) == 0)
    return program;
  report.note(name + " is not measured: it could not be built (" + log +
              "); its packages are in cmake/requirements/apt-bench.txt");
  return "";
}

WorkerOutput run_workers(const std::vector<std::string>& command, int ranks,
                         const std::map<std::string, std::string>& environment) {
  int ends[2];
  if (pipe(ends) != 0) std::exit(2);
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) std::exit(2);
  const int port = launch::free_port();
  WorkerOutput output;
  output.launched = now();
  launch::Children children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t process = fork();
    if (process < 0) {
      std::perror("bench: fork");
      std::exit(2);
    }
    if (process > 0) {
      children.add(process);
      continue;
    }
    // Ends the workers with the bench, which ends if one of them fails.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(pair[rank == 0 ? 1 : 0]);
    dup2(rank == 0 ? ends[1] : STDERR_FILENO, STDOUT_FILENO);
    const auto set = [](const std::string& name, const std::string& value) {
      setenv(name.c_str(), value.c_str(), 1);
    };
    set("RANK", std::to_string(rank));
    set("LOCAL_RANK", std::to_string(rank));
    set("WORLD_SIZE", std::to_string(ranks));
    set("LOCAL_WORLD_SIZE", std::to_string(ranks));
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", std::to_string(port));
    set("OMP_NUM_THREADS", "1");
    set("WEFT_BENCH_OTHER", std::to_string(pair[rank == 0 ? 0 : 1]));
    for (const auto& [name, value] : environment) set(name, value);
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    execvp(arguments[0], arguments.data());
    std::_Exit(127);
  }
  for (const int end : {ends[1], pair[0], pair[1]}) close(end);
  char buffer[65536];
  for (ssize_t count = 0; (count = read(ends[0], buffer, sizeof buffer)) > 0;) {
    output.text.append(buffer, static_cast<std::size_t>(count));
  }
  close(ends[0]);
  while (!children.running().empty()) {
    const auto ended = children.wait(std::chrono::minutes(5));
    if (ended.status != 0) {
      std::fprintf(stderr, "bench: a worker (%s) ended with %s\n", command[0].c_str(),
                   launch::describe_status(ended.status).c_str());
      std::exit(2);
    }
  }
  return output;
}

}  // namespace weft::bench
