// SPDX-License-Identifier: Apache-2.0
// Measures the cost of a connection over its stream, for each message: over a stream in memory that
// accepts everything and contains what it was given, so that the figure includes no system call and
// no other thread. The peer is that stream alone: the same bytes as one write(), or as one peek()
// and consume().
#include <array>
#include <cstring>

#include <weft/profiling/bench/transport_participants.h>
#include <weft/tests/harness/memory_stream.h>
#include <weft/transport/stream/frame.h>
#include <weft/transport/stream/stream_connection.h>

namespace weft::bench {
namespace {

using transport::Arrival;
using transport::ByteStream;
using transport::Capabilities;
using transport::Connection;
namespace frame = transport::frame;

constexpr std::size_t kMessages = 2000;  // messages in one run
constexpr int kRuns = 400;
constexpr double kPerMessage = 1e9 / kMessages;

struct End {
  End() {
    auto owned = std::make_unique<harness::MemoryStream>();
    stream = owned.get();
    connection = transport::connect_over(std::move(owned), Capabilities(), "memory", loop);
  }
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("bench");
  harness::MemoryStream* stream = nullptr;
  std::shared_ptr<Connection> connection;
};

std::vector<std::byte> front_of(std::size_t header_bytes, std::span<const Slice> payloads) {
  std::vector<std::byte> front;
  frame::encode_front(header_bytes, payloads, front);
  return front;
}

void send(Report& report, const std::string& name, std::size_t header_bytes,
          std::span<const Slice> payloads) {
  const End end;
  const std::vector<std::byte> header(header_bytes);
  const std::vector<std::byte> front = front_of(header_bytes, payloads);
  std::vector<ByteStream::Bytes> pieces{front, header};
  for (const Slice& payload : payloads)
    pieces.emplace_back(static_cast<const std::byte*>(payload.data), payload.bytes);
  harness::MemoryStream alone;
  ByteStream& stream = alone;
  const auto samples = measure({{"weft",
                                 [&] {
                                   for (std::size_t i = 0; i < kMessages; ++i)
                                     end.connection->send(header, payloads, {}, {});
                                 }},
                                {"stream",
                                 [&] {
                                   for (std::size_t i = 0; i < kMessages; ++i) stream.write(pieces);
                                 }}},
                               kRuns);
  const std::size_t bytes = payloads.empty() ? 0 : payloads.front().bytes;
  report.add(time_row(name, "weft", bytes, samples[0], kPerMessage, "ns"));
  report.add(time_row(name, "stream", bytes, samples[1], kPerMessage, "ns"));
}

void receive(Report& report, const std::string& name, std::size_t header_bytes,
             std::span<const Slice> payloads) {
  const End end;
  std::vector<std::byte> message = front_of(header_bytes, payloads);
  message.resize(message.size() + header_bytes);
  for (const Slice& payload : payloads) message.resize(message.size() + payload.bytes);
  std::vector<std::byte> lane;
  for (std::size_t i = 0; i < kMessages; ++i)
    lane.insert(lane.end(), message.begin(), message.end());

  const auto preamble = frame::preamble();
  std::size_t arrived = 0;
  const auto on_loop = [&](const std::function<void()>& work) {
    std::atomic<bool> done{false};
    end.loop->post([&] {
      work();
      done = true;
    });
    end.loop->drive([&] { return done.load(); });
  };
  end.connection->receive({[&](const Arrival&) {
                             ++arrived;
                             end.connection->accept({}, {}, {});
                           },
                           [](const Error&) {}});
  on_loop([&] { end.stream->deliver(preamble); });
  harness::MemoryStream alone;
  alone.start(
      *end.loop, [] {}, [] {});
  ByteStream& stream = alone;
  // A connection lets others run after it has read much, so waits until all messages have arrived.
  std::size_t awaited = 0;
  const auto all_have_arrived = [&] {
    awaited += kMessages;
    end.loop->drive([&] { return arrived == awaited; });
  };
  const auto samples = measure({{"weft",
                                 [&] {
                                   on_loop([&] { end.stream->deliver(lane); });
                                   all_have_arrived();
                                 }},
                                {"stream",
                                 [&] {
                                   on_loop([&] {
                                     alone.deliver(lane);
                                     while (stream.peek(message.size()).size() >= message.size())
                                       stream.consume(message.size());
                                   });
                                 }}},
                               kRuns);
  const std::size_t bytes = payloads.empty() ? 0 : payloads.front().bytes;
  report.add(time_row(name, "weft", bytes, samples[0], kPerMessage, "ns"));
  report.add(time_row(name, "stream", bytes, samples[1], kPerMessage, "ns"));
}

}  // namespace

void measure_costs(Report& report) {
  std::vector<std::byte> memory(4096);
  const std::array small{Slice{memory.data(), 8, {}}};
  const std::array large{Slice{memory.data(), memory.size(), {}}};
  for (const auto& [name, header, payloads] :
       {std::tuple{"header of 8 B", std::size_t{8}, std::span<const Slice>()},
        std::tuple{"8 B", std::size_t{0}, std::span<const Slice>(small)},
        std::tuple{"header of 16 B and 4 KiB", std::size_t{16}, std::span<const Slice>(large)}}) {
    const std::string to_send = std::string("cost of send, ") + name;
    const std::string to_receive = std::string("cost of receive, ") + name;
    if (report.wants(to_send)) send(report, to_send, header, payloads);
    if (report.wants(to_receive)) receive(report, to_receive, header, payloads);
  }
}

}  // namespace weft::bench
