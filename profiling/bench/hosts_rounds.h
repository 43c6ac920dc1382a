// SPDX-License-Identifier: Apache-2.0
// How the peers of hosts_bench time a collective. Their ranks are processes of one machine, so they
// meet in shared memory before each call, and the network under measurement carries nothing else. A
// call lasts from the moment at which the last rank calls, or the root of a broadcast does, until
// the last rank has its result. Includes nothing of Weft, because Open MPI's peer is built alone.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

namespace weft::bench {

// On the command line of a worker: OPERATION:BYTES:CALLS. Each rank gives so many bytes of floats;
// all_reduce and broadcast work in place.
struct HostsCase {
  std::string operation;
  std::size_t bytes = 0;
  int calls = 0;

  static HostsCase from(const std::string& text) {
    char operation[32] = "";
    HostsCase one;
    if (std::sscanf(text.c_str(), "%31[^:]:%zu:%d", operation, &one.bytes, &one.calls) != 3)
      std::exit(2);
    one.operation = operation;
    return one;
  }
  std::string text() const {
    return operation + ":" + std::to_string(bytes) + ":" + std::to_string(calls);
  }
};

class HostsRounds {
 public:
  static constexpr int kMostRanks = 16;

  // Makes the memory in which so many ranks meet. Returns its path, which is valid as long as this
  // process runs, or "".
  static std::string make(int ranks) {
    const int file = memfd_create("rounds", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, sizeof(Memory)) != 0) return "";
    const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&map(path)->together, &shared, static_cast<unsigned>(ranks));
    return path;
  }

  // A rank of them. Ends this process after five minutes, because one that waits for a rank that
  // has failed would wait for ever.
  HostsRounds(const std::string& path, int rank, int ranks)
      : memory_(map(path)), rank_(rank), ranks_(ranks) {
    alarm(300);
  }

  void meet() { pthread_barrier_wait(&memory_->together); }

  // Runs `call` as often as the case wants. Rank 0 prints a line: operation, bytes and the times in
  // seconds.
  void run(const HostsCase& one, const std::function<void()>& call) {
    std::vector<double> times;
    const int warm_up = 2 + one.calls / 5;
    for (int i = 0; i < warm_up + one.calls; ++i) {
      const double time = run_once(one.operation == "broadcast", call);
      if (i >= warm_up) times.push_back(time);
    }
    if (rank_ != 0) return;
    std::printf("%s %zu", one.operation.c_str(), one.bytes);
    for (const double time : times) std::printf(" %.9f", time);
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  struct Memory {
    pthread_barrier_t together;
    double begin[kMostRanks], end[kMostRanks];  // by rank
  };
  static Memory* map(const std::string& path) {
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    void* const memory = mmap(nullptr, sizeof(Memory), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
      std::perror(("hosts_bench: " + path).c_str());
      std::exit(2);
    }
    close(file);
    return static_cast<Memory*>(memory);
  }
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  double run_once(bool is_from_root, const std::function<void()>& call) {
    meet();
    memory_->begin[rank_] = now();
    call();
    memory_->end[rank_] = now();
    meet();
    const double begin = is_from_root ? memory_->begin[0]
                                      : *std::max_element(memory_->begin, memory_->begin + ranks_);
    return *std::max_element(memory_->end, memory_->end + ranks_) - begin;
  }

  Memory* const memory_;  // mapped until the process ends
  const int rank_, ranks_;
};

}  // namespace weft::bench
