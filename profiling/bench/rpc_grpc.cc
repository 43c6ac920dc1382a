// SPDX-License-Identifier: Apache-2.0
// The gRPC peer of rpc_bench, over a unix socket.
#include <deque>
#include <future>
#include <memory>

#include <grpcpp/grpcpp.h>

#include "rpc_peer.grpc.pb.h"
#include "rpc_peer.h"

namespace {

using namespace weft::bench;

class Server final : public Peer::Service {
 public:
  std::promise<void> ended;

 private:
  grpc::Status Add(grpc::ServerContext*, const Numbers* numbers, Number* sum) override {
    sum->set_value(numbers->a() + numbers->b());
    return grpc::Status::OK;
  }
  grpc::Status GiveBack(grpc::ServerContext*, const Memory* memory, Memory* same) override {
    same->set_data(memory->data());
    return grpc::Status::OK;
  }
  grpc::Status End(grpc::ServerContext*, const Nothing*, Nothing*) override {
    ended.set_value();
    return grpc::Status::OK;
  }
};

void serve(const Order& order) {
  Server service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(order.address, grpc::InsecureServerCredentials());
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  if (!server) std::exit(1);
  service.ended.get_future().wait();
  server->Shutdown();
}

void check(const grpc::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "grpc: %s\n", status.error_message().c_str());
  std::exit(1);
}

// Keeps as many calls open as the order says.
void add_at_once(Peer::Stub& peer, const Order& order) {
  struct Call {
    grpc::ClientContext context;
    Number sum;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<Number>> reader;
  };
  grpc::CompletionQueue queue;
  const auto end_one = [&] {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    const std::unique_ptr<Call> call(static_cast<Call*>(tag));
    check(call->status);
  };
  Numbers numbers;
  for (int i = 0; i < order.calls; ++i) {
    if (static_cast<std::size_t>(i) >= order.at_once) end_one();
    auto* const call = new Call;
    numbers.set_a(i);
    numbers.set_b(1);
    call->reader = peer.AsyncAdd(&call->context, numbers, &queue);
    call->reader->Finish(&call->sum, &call->status, call);
  }
  for (std::size_t i = 0; i < order.at_once; ++i) end_one();
}

void call(const Order& order) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  const auto channel =
      grpc::CreateCustomChannel(order.address, grpc::InsecureChannelCredentials(), arguments);
  if (!channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(30)))
    std::exit(1);
  const auto peer = Peer::NewStub(channel);
  Memory memory;
  memory.set_data(std::string(order.bytes, 'x'));
  print_times(order, [&] {
    if (order.at_once > 1) return add_at_once(*peer, order);
    for (int i = 0; i < order.calls; ++i) {
      grpc::ClientContext context;
      if (order.is_number) {
        Numbers numbers;
        numbers.set_a(1);
        numbers.set_b(2);
        Number sum;
        check(peer->Add(&context, numbers, &sum));
      } else {
        Memory same;
        check(peer->GiveBack(&context, memory, &same));
      }
    }
  });
  grpc::ClientContext context;
  Nothing nothing;
  check(peer->End(&context, nothing, &nothing));
}

}  // namespace

int main(int argc, char** argv) {
  const Order order = order_of(argc, argv);
  pin_to_core_of(own_rank());
  own_rank() == 0 ? call(order) : serve(order);
}
