// A small all_reduce allocates its Op and nothing else. In a program of its own, which counts what operator new does.
#include <cstdlib>
#include <new>

#include <gtest/gtest.h>

#include <weft/transport/mesh/mesh_communicator.h>

namespace {
thread_local std::size_t allocations = 0;  // of this thread
}

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace weft::transport::mesh {
namespace {

// A lane whose other end takes everything at once.
class Swallowing final : public Connection {
 public:
  std::string_view transport() const override { return "swallowing"; }
  std::string peer() const override { return "nobody"; }
  const Capabilities& capabilities() const override { return capabilities_; }
  void receive(Handlers) override {}
  Op send(std::span<const std::byte>, std::span<const Slice>, Pin, Fence) noexcept override { return Op(); }
  Op accept(std::span<const Slice>, Pin, Fence) noexcept override { return Op(); }
  void close(const Error&) noexcept override {}

 private:
  Capabilities capabilities_;
};

TEST(MeshCost, ASmallAllReduceAllocatesItsOpAndNothingElse) {
  JoinOptions options;
  options.size = 3;
  options.timeout = std::chrono::hours(1);
  options.loop = std::make_shared<EventLoop>("test");
  const auto core = std::make_shared<Core>(options, "swallowing");
  MeshCommunicator communicator(core);
  for (const int peer : {1, 2}) {
    for (const Lane lane : {Lane::Collectives, Lane::Messages}) {
      core->post(event::Adopted{peer, lane, std::make_shared<Swallowing>()});
    }
  }
  float number = 1;
  const float theirs = 2;
  const Pin pin = std::make_shared<int>(0);
  Header header;
  header.call = {Kind::AllReduce, Dtype::Float32, ReduceOp::Sum, 0, 4};
  const std::uint64_t size = 4;
  const auto all_reduce = [&] {
    number = 1;
    const Op op = communicator.all_reduce({{&number, 4, Device::host()}, Dtype::Float32}, ReduceOp::Sum, pin, Fence());
    const auto bytes = encode(header);
    for (const int peer : {2, 1}) {  // rank 2's waits until rank 1's is in
      core->arrived(peer, Lane::Collectives,
                    {bytes, {&size, 1}, {reinterpret_cast<const std::byte*>(&theirs), sizeof theirs}});
    }
    ++header.sequence;
    return op.ended() && !op.error() && number == 5;
  };
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(all_reduce());  // everything has its size now
  const std::size_t before = allocations;
  constexpr std::size_t kCalls = 1000;
  bool all_right = true;
  for (std::size_t i = 0; i < kCalls; ++i) all_right &= all_reduce();
  EXPECT_TRUE(all_right);
  // The flag and the state; a queue's block now and then.
  EXPECT_LE(allocations - before, kCalls * 2 + kCalls / 32);
  EXPECT_EQ(pin.use_count(), 1);
}

}  // namespace
}  // namespace weft::transport::mesh
