// SPDX-License-Identifier: Apache-2.0
// A program whose rank 1, or whose only rank, crashes: in main(), after it has joined a group, or
// in a rank of weft::spawn.
//
// usage: crashing main|group|spawn
#include <cstdio>
#include <cstring>

#include <weft/weft.h>

namespace crashing {

__attribute__((noinline)) int read_from(const volatile int* nowhere) { return *nowhere + 1; }

}  // namespace crashing

int main(int argc, char** argv) {
  const char* const where = argc > 1 ? argv[1] : "main";
  try {
    if (std::strcmp(where, "spawn") == 0) {
      weft::spawn(2, [](int rank, int) {
        if (rank == 1) crashing::read_from(nullptr);
        weft::init_process_group({.device = c10::Device(c10::kCPU)});
      });
    } else if (std::strcmp(where, "group") == 0) {
      auto group = weft::init_process_group({.device = c10::Device(c10::kCPU)});
      std::printf("rank %d has joined\n", group.rank());
      if (group.rank() == 1) crashing::read_from(nullptr);
      group.barrier().wait();
    } else {
      crashing::read_from(nullptr);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "caught: %s\n", error.what());
    return 1;
  }
}
