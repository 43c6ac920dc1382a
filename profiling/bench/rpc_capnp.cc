// SPDX-License-Identifier: Apache-2.0
// The Cap'n Proto peer of rpc_bench, over a unix socket.
#include <deque>
#include <vector>

#include <capnp/ez-rpc.h>
#include <kj/async-io.h>

#include <unistd.h>

#include "rpc_peer.capnp.h"
#include "rpc_peer.h"

namespace {

using weft::bench::Order;

// Lifts the limits for a trusted peer: Cap'n Proto refuses more than 64 MiB by default.
capnp::ReaderOptions no_limits() {
  capnp::ReaderOptions options;
  options.traversalLimitInWords = 1ULL << 40;
  return options;
}

class Server final : public Peer::Server {
 public:
  explicit Server(kj::Own<kj::PromiseFulfiller<void>> ended) : ended_(kj::mv(ended)) {}

 private:
  kj::Promise<void> add(AddContext context) override {
    context.getResults().setValue(context.getParams().getA() + context.getParams().getB());
    return kj::READY_NOW;
  }
  kj::Promise<void> giveBack(GiveBackContext context) override {
    const auto data = context.getParams().getData();
    context.getResults(capnp::MessageSize{data.size() / 8 + 16, 0}).setData(data);
    return kj::READY_NOW;
  }
  kj::Promise<void> end(EndContext) override {
    ended_->fulfill();
    return kj::READY_NOW;
  }
  kj::Own<kj::PromiseFulfiller<void>> ended_;
};

void serve(const Order& order) {
  auto ended = kj::newPromiseAndFulfiller<void>();
  capnp::EzRpcServer server(kj::heap<Server>(kj::mv(ended.fulfiller)), order.address, 0,
                            no_limits());
  ended.promise.wait(server.getWaitScope());
  // The reply of end() must leave before the server ends.
  server.getIoProvider().getTimer().afterDelay(200 * kj::MILLISECONDS).wait(server.getWaitScope());
}

void call(const Order& order) {
  const std::string path = order.address.substr(5);
  for (int i = 0; i < 3000 && ::access(path.c_str(), F_OK) != 0; ++i) ::usleep(10'000);
  capnp::EzRpcClient client(order.address, 0, no_limits());
  auto peer = client.getMain<Peer>();
  auto& scope = client.getWaitScope();
  const std::vector<kj::byte> memory(order.bytes, 1);
  const auto add = [&](int a, int b) {
    auto request = peer.addRequest();
    request.setA(a);
    request.setB(b);
    return request.send();
  };
  weft::bench::print_times(order, [&] {
    if (order.at_once > 1) {
      std::deque<decltype(add(0, 0))> waiting;
      for (int i = 0; i < order.calls; ++i) {
        if (waiting.size() == order.at_once) {
          waiting.front().wait(scope);
          waiting.pop_front();
        }
        waiting.push_back(add(i, 1));
      }
      for (auto& one : waiting) one.wait(scope);
      return;
    }
    for (int i = 0; i < order.calls; ++i) {
      if (order.is_number) {
        add(1, 2).wait(scope);
      } else {
        auto request = peer.giveBackRequest(capnp::MessageSize{memory.size() / 8 + 16, 0});
        request.setData(kj::arrayPtr(memory.data(), memory.size()));
        request.send().wait(scope);
      }
    }
  });
  peer.endRequest().send().wait(scope);
}

}  // namespace

int main(int argc, char** argv) {
  const Order order = weft::bench::order_of(argc, argv);
  weft::bench::pin_to_core_of(weft::bench::own_rank());
  weft::bench::own_rank() == 0 ? call(order) : serve(order);
}
