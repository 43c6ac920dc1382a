// SPDX-License-Identifier: Apache-2.0
// The serving program. It makes no calls, so others can call only the functions that it exposes.
// Arguments: the job's address, the transport.
#include <cstdio>

#include <torch/jit.h>

#include <weft/tests/engine/rpc/two_programs/apart.h>

namespace apart {

// In the caller's program it takes an int.
int changed(long value) { return static_cast<int>(value); }

}  // namespace apart

int main(int arguments, char** values) {
  using namespace apart;
  if (arguments != 3) return 2;
  weft::rpc::expose<&plus>();
  weft::rpc::expose<&greet>();
  weft::rpc::expose<&nothing>();
  weft::rpc::expose<&doubled>();
  weft::rpc::expose<&later>();
  weft::rpc::expose<&throws>();
  weft::rpc::expose<&sum_of>();
  weft::rpc::expose<&owned>();
  weft::rpc::expose<&chain>();
  weft::rpc::expose<&changed>();
  weft::rpc::expose<Counter, int>();
  weft::rpc::expose<Counter, int, const char*>();
  weft::rpc::expose<&Counter::add>();
  weft::rpc::expose<Counter, &Counter::value>();
  weft::rpc::expose<&Counter::name>();
  weft::rpc::expose<Counter, &value_of>();
  weft::rpc::expose<&heap>();
  weft::rpc::expose<Heap, &pointers>();
  weft::rpc::expose<Weights, int>();
  weft::rpc::expose_script("math", torch::jit::compile(R"(
def scale(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by

def both(x: Tensor) -> Tuple[Tensor, int]:
    return x, 1
)"));
  try {
    weft::rpc::Agent agent = weft::rpc::init(
        "serving",
        {.rank = 1, .world_size = 2, .init_method = values[1], .transports = {values[2]}});
    agent.shutdown();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "serving: %s\n", error.what());
    return 1;
  }
  return 0;
}
