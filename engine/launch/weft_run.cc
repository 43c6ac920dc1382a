// SPDX-License-Identifier: Apache-2.0
// weft-run: starts the ranks of a program on this machine, as torchrun does. Sets the variables
// that torchrun sets and prefixes each line of output with its rank. On the first failure, ends the
// other ranks and prints which rank failed first and why, or starts all ranks again if
// --max-restarts allows it.
#include <weft/base/version.h>
#include <weft/engine/launch/guard.h>
#include <weft/engine/launch/job.h>

int main(int argc, char** argv) {
  return weft::launch::run_guarded([&] {
    return weft::launch::run_command(argc, argv, "weft-run " + weft::version(), nullptr);
  });
}
