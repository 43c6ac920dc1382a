// What weft-run goes on as where the nodes of a job meet at an endpoint: the same, with c10d's
// store.
#include <torch/headeronly/version.h>

#include <weft/base/version.h>
#include <weft/engine/launch/job.h>
#include <weft/engine/launch/tcp_shared_store.h>

int main(int argc, char** argv) {
  const std::string version = "weft-agent " + weft::version() + " (libtorch " TORCH_VERSION ")";
  return weft::launch::run_command(argc, argv, version, weft::launch::open_tcp_store);
}
