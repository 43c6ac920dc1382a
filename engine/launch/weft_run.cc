// weft-run: starts the ranks of a program on this machine, as torchrun does. Sets the variables
// that torchrun sets, prefixes each line of output with its rank, and on the first failure ends the
// others and says first which rank failed, and why; or starts all again, where --max-restarts
// allows.
#include <weft/base/version.h>
#include <weft/engine/launch/guard.h>
#include <weft/engine/launch/job.h>

int main(int argc, char** argv) {
  return weft::launch::run_guarded([&] {
    return weft::launch::run_command(argc, argv, "weft-run " + weft::version(), nullptr);
  });
}
