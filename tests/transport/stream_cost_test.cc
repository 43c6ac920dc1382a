// SPDX-License-Identifier: Apache-2.0
// The hot paths of a connection allocate nothing. This is a program of its own, because it counts
// what operator new allocates.
#include <array>
#include <cstdlib>
#include <new>

#include <gtest/gtest.h>

#include <weft/tests/harness/mail.h>
#include <weft/tests/harness/memory_stream.h>
#include <weft/transport/stream/frame.h>
#include <weft/transport/stream/stream_connection.h>

namespace {
thread_local std::size_t allocations = 0;  // of the current thread
}

// Not inlined: g++ 12 would inline only one of the pair and warn that free() does not match.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace weft::transport {
namespace {

using harness::bytes_of;

struct End {
  End() {
    auto owned = std::make_unique<harness::MemoryStream>();
    stream = owned.get();
    Capabilities limits;
    limits.inline_bytes = 4096;
    connection = connect_over(std::move(owned), limits, "memory", loop);
    // Once a message is sent at once, the preamble has been sent.
    loop->drive([&] { return connection->send({}, {}, nullptr, {}).ended(); }, harness::patience());
  }
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("test");
  harness::MemoryStream* stream = nullptr;
  std::shared_ptr<Connection> connection;
};

TEST(StreamCost, SendingAtOnceAllocatesNothing) {
  const End end;
  std::array<std::byte, 1000> memory{};
  const std::array payloads{Slice{memory.data(), 8, {}}, Slice{memory.data(), memory.size(), {}}};
  const Pin pin = std::make_shared<int>(0);
  const auto send = [&] { return end.connection->send(bytes_of("header"), payloads, pin, {}); };
  send();  // now the scratch memory has its full size
  const std::size_t before = allocations;
  bool all_ended = true;
  for (int i = 0; i < 1000; ++i) all_ended &= send().ended();
  EXPECT_EQ(allocations, before);
  EXPECT_TRUE(all_ended);
  EXPECT_EQ(pin.use_count(), 1);
}

TEST(StreamCost, ReceivingInPlaceAllocatesNothing) {
  const End end;
  std::array<std::byte, 500> memory{};
  std::vector<std::byte> lane;
  const auto append = [&](std::span<const std::byte> bytes) {
    lane.insert(lane.end(), bytes.begin(), bytes.end());
  };
  const std::array payloads{Slice{memory.data(), 8, {}}, Slice{memory.data(), memory.size(), {}}};
  std::vector<std::byte> front;
  frame::encode_front(6, payloads, front);
  const auto append_message = [&] {
    append(front);
    append(bytes_of("header"));
    append(std::span(memory).first(8));
    append(memory);
  };
  append(frame::preamble());
  append_message();
  const std::size_t first = lane.size();
  constexpr int kMessages = 1000;
  for (int i = 0; i < kMessages; ++i) append_message();

  struct Seen {
    int count = 0;
    int in_place = 0;
    std::size_t allocated = 0;
    std::atomic<bool> done{false};
  } seen;
  std::array<std::byte, 8> small{};
  std::array<std::byte, 500> large{};
  const std::array destinations{Slice{small.data(), small.size(), {}},
                                Slice{large.data(), large.size(), {}}};
  end.connection->receive({[&](const Arrival& arrival) {
                             ++seen.count;
                             seen.in_place += !arrival.in_place.empty();
                             const bool copies = seen.count % 2 == 0;
                             end.connection->accept(copies ? std::span<const Slice>(destinations)
                                                           : std::span<const Slice>(),
                                                    nullptr, {});
                           },
                           [](const Error&) {}});
  end.loop->post([&] {
    end.stream->deliver(frame::Bytes(lane).first(first));
    const std::size_t before = allocations;
    end.stream->deliver(frame::Bytes(lane).subspan(first));
    seen.allocated = allocations - before;
    seen.done = true;
  });
  ASSERT_TRUE(end.loop->drive([&] { return seen.done.load(); }, harness::patience()));
  EXPECT_EQ(seen.count, kMessages + 1);
  EXPECT_EQ(seen.in_place, kMessages + 1);
  EXPECT_EQ(seen.allocated, 0u);
}

}  // namespace
}  // namespace weft::transport
