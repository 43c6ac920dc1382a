// SPDX-License-Identifier: Apache-2.0
// Agents whose connections speak TLS. The whole program is given a certificate.
#include <gtest/gtest.h>

#include <torch/types.h>

#include <weft/tests/engine/rpc/workers.h>
#include <weft/tests/harness/tls_environment.h>

namespace encrypted {

at::Tensor doubled(const at::Tensor& tensor) { return tensor * 2; }

}  // namespace encrypted

namespace weft {
namespace {

using harness::As;
using harness::Setting;

harness::TlsEnvironment environment;

class RpcTls : public testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(, RpcTls,
                         testing::Values(Setting{As::Threads, "tcp", 2},
                                         Setting{As::Processes, "tcp", 3}),
                         harness::name_of);

TEST_P(RpcTls, CallsCarryTensors) {
  harness::run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = harness::after(agent, 1);
    for (const int elements : {1, 100'000, 1'500'000}) {
      const at::Tensor sent = at::full({elements}, agent.self().rank + 1.0);
      EXPECT_TRUE(agent.sync<&encrypted::doubled>(to, sent).equal(sent * 2));
    }
    EXPECT_EQ(agent.transport_to(to), "tcp");
  });
}

}  // namespace
}  // namespace weft
