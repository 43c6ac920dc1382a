// SPDX-License-Identifier: Apache-2.0
// weft-agent: weft-run with c10d's store. weft-run replaces itself by weft-agent if the nodes of a
// job meet at an endpoint.
#include <torch/headeronly/version.h>

#include <weft/base/version.h>
#include <weft/engine/launch/job.h>
#include <weft/engine/launch/tcp_shared_store.h>

int main(int argc, char** argv) {
  const std::string version = "weft-agent " + weft::version() + " (libtorch " TORCH_VERSION ")";
  return weft::launch::run_command(argc, argv, version, weft::launch::open_tcp_store);
}
