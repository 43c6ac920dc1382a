// SPDX-License-Identifier: Apache-2.0
// Mistakes of everyday use. compile_test.py compiles each "#ifdef NAME  // says: SENTENCE" of the
// other files of this folder in a namespace of its own, after the includes and a copy of the
// declarations of this file. It expects the sentence in at most 15 lines of output, which name a
// line of the mistake. "FIRST | SECOND" accepts either, where compilers word an error differently.
// "in 20 lines" sets another limit, where compilers show both overloads of remote(), or where a
// macro makes them say a thing twice.
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <weft/checkpoint.h>
#include <weft/codec.h>
#include <weft/fully_shard.h>
#include <weft/functional.h>
#include <weft/future.h>
#include <weft/group.h>
#include <weft/objects.h>
#include <weft/optim.h>
#include <weft/parallel.h>
#include <weft/rpc.h>

namespace mistakes {

using weft::DistributedDataParallel;
using weft::FullyShardedDataParallel;
using weft::Future;
using weft::ProcessGroup;
using weft::RRef;
using weft::rpc::Agent;

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
int plus(int a, int b) { return a + b; }
std::string text_of(int number) { return std::to_string(number); }

struct Counter {
  Counter() = default;
  explicit Counter(int first) : count(first) {}
  int add(int change) { return count += change; }
  void fill(std::vector<int>& numbers) { numbers.push_back(count); }
  const int* place() const { return &count; }
  int get() const { return count; }
  int get(int more) const { return count + more; }
  int count = 0;
};
struct Timer {
  double seconds() const { return 1; }
};
struct NetImpl : torch::nn::Module {
  NetImpl() : linear(register_module("linear", torch::nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& input) { return linear(input); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Net);

// A struct without WEFT_FIELDS.
struct Settings {
  double rate = 0.1;
};

}  // namespace mistakes
