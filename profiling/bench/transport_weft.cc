// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>

#include <weft/profiling/bench/transport_on_gpu.h>
#include <weft/profiling/bench/transport_participants.h>
#include <weft/profiling/bench/transport_rounds.h>
#include <weft/profiling/bench/workers.h>
#include <weft/transport/registry.h>

namespace weft::bench {

namespace {

using transport::Arrival;
using transport::Connection;

// What the other end does with a message; the header's only byte.
enum class Wish : char { Echo = 'e', Swallow = 's', Acknowledge = 'a' };

std::span<const std::byte> header_of(const Wish& wish) {
  return std::as_bytes(std::span(&wish, 1));
}

[[noreturn]] void give_up(const Error& why) {
  std::fprintf(stderr, "transport_bench: %s\n", why.what());
  std::exit(3);
}

// Memory of payloads, touched before it is used. Uses two pieces in turns, as a program would.
class Buffers {
 public:
  // Uses GPU memory if `gpu` is set.
  explicit Buffers(GpuLanes* gpu) : gpu_(gpu) {}

  Slice next(std::size_t bytes) {
    turn_ ^= 1;
    if (gpu_ != nullptr) return gpu_->memory(this, turn_, bytes);
    if (memory_[0].size() < bytes) {
      for (auto& piece : memory_) piece.assign(bytes, std::byte{1});
    }
    return {memory_[turn_].data(), bytes, Device::host()};
  }

 private:
  GpuLanes* gpu_;
  std::array<std::vector<std::byte>, 2> memory_;
  std::size_t turn_ = 0;
};

// Rank 1: answers until the connection ends.
class Server {
 public:
  Server(Connection& connection, const std::shared_ptr<EventLoop>& loop, GpuLanes* gpu)
      : connection_(connection), buffers_(gpu) {
    connection.receive({[this](const Arrival& arrival) { take(arrival); },
                        [this](const Error&) { ended_ = true; }});
    loop->drive([this] { return ended_; });
  }

 private:
  void take(const Arrival& arrival) {
    const auto wish = static_cast<Wish>(arrival.header[0]);
    const Slice to = buffers_.next(static_cast<std::size_t>(arrival.sizes[0]));
    const Op came = connection_.accept({&to, 1}, {}, {});
    if (wish == Wish::Swallow) return;
    const auto answer = [this, wish, to] {
      connection_.send({}, {&to, wish == Wish::Echo ? std::size_t{1} : std::size_t{0}}, {}, {});
    };
    if (came.ended()) {
      answer();
    } else {
      came.on_ended(answer);
    }
  }

  Connection& connection_;
  Buffers buffers_;
  bool ended_ = false;
};

// Rank 0.
class Client {
 public:
  Client(std::shared_ptr<Connection> connection, std::shared_ptr<EventLoop> loop, bool is_polled,
         GpuLanes* gpu)
      : connection_(std::move(connection)),
        loop_(std::move(loop)),
        is_polled_(is_polled),
        buffers_(gpu) {
    connection_->receive({[this](const Arrival& arrival) { take(arrival); },
                          [](const Error& why) { give_up(why); }});
  }

  Participant participant() {
    return {[this](std::size_t bytes, int count) {
              return is_polled_ ? polled(bytes, count) : blocked(bytes, count);
            },
            [this](std::size_t bytes, int count) { return stream(bytes, count); },
            [this](std::size_t bytes, int count) { return fresh(bytes, count); }};
  }

 private:
  void take(const Arrival& arrival) {
    if (arrival.sizes.empty()) {
      connection_->accept({}, {}, {});
      return answered();
    }
    const Slice to = buffers_.next(static_cast<std::size_t>(arrival.sizes[0]));
    const Op came = connection_->accept({&to, 1}, {}, {});
    if (came.ended()) return answered();
    came.on_ended([this] { answered(); });
  }

  void answered() {
    ++answers_;
    if (then_) then_();
  }

  void send(Wish wish, std::size_t bytes) { send(wish, buffers_.next(bytes)); }
  void send(Wish wish, const Slice& from) {
    const Op op = connection_->send(header_of(wish), {&from, 1}, {}, {});
    if (op.ended() && op.error()) give_up(*op.error());
  }

  // The caller stays on the loop and sends the next message as soon as the answer has arrived.
  std::vector<double> polled(std::size_t bytes, int count) {
    std::vector<double> times;
    times.reserve(static_cast<std::size_t>(count));
    double begin = seconds();
    answers_ = 0;
    then_ = [&] {
      const double end = seconds();
      times.push_back(end - begin);
      begin = end;
      if (answers_ < count) send(Wish::Echo, bytes);
    };
    send(Wish::Echo, bytes);
    loop_->drive([&] { return answers_ == count; });
    then_ = nullptr;
    return times;
  }

  // The caller is a thread that blocks on each answer; like every blocked thread, it drives the
  // loop meanwhile.
  std::vector<double> blocked(std::size_t bytes, int count) {
    std::vector<double> times;
    times.reserve(static_cast<std::size_t>(count));
    answers_ = 0;
    for (int i = 0; i < count; ++i) {
      const double begin = seconds();
      send(Wish::Echo, bytes);
      loop_->drive([&] { return answers_ > i; });
      times.push_back(seconds() - begin);
    }
    return times;
  }

  std::vector<double> fresh(std::size_t bytes, int count) {
    std::vector<double> times;
    times.reserve(static_cast<std::size_t>(count));
    answers_ = 0;
    for (int i = 0; i < count; ++i) {
      const Slice from = buffers_.next(bytes);
      renew(from.data, from.bytes);
      const double begin = seconds();
      send(Wish::Acknowledge, from);
      loop_->drive([&] { return answers_ > i; });
      times.push_back(seconds() - begin);
    }
    return times;
  }

  double stream(std::size_t bytes, int count) {
    std::deque<Op> under_way;
    answers_ = 0;
    const double begin = seconds();
    for (int i = 0; i < count; ++i) {
      const Slice from = buffers_.next(bytes);
      const bool is_last = i == count - 1;
      const Op op = connection_->send(header_of(is_last ? Wish::Acknowledge : Wish::Swallow),
                                      {&from, 1}, {}, {});
      if (op.ended()) continue;
      under_way.push_back(op);
      if (under_way.size() < window_of(bytes)) continue;
      if (!under_way.front().done().synchronize())
        give_up(Error(Blame::Timeout, "a message does not leave"));
      under_way.pop_front();
    }
    loop_->drive([&] { return answers_ == 1; });
    return seconds() - begin;
  }

  const std::shared_ptr<Connection> connection_;
  const std::shared_ptr<EventLoop> loop_;
  const bool is_polled_;
  Buffers buffers_;
  std::function<void()> then_;
  std::atomic<int> answers_{0};
};

}  // namespace

int be_weft(const std::string& backend, const std::string& name) {
  const int rank = rank_of_worker();
  pin_to_core_of(rank);
  const auto loop = std::make_shared<EventLoop>("bench");
  const bool is_on_gpu = backend == "cuda_ipc";
  const auto gpu = is_on_gpu ? GpuLanes::open() : nullptr;
  const auto transport = transport::open(is_on_gpu ? "shm" : backend);
  if (rank == 1) {
    std::mutex mutex;
    std::shared_ptr<Connection> accepted;
    const auto listener =
        transport->connector()->listen({loop, "", [&](std::shared_ptr<Connection> connection) {
                                          std::lock_guard lock(mutex);
                                          accepted = std::move(connection);
                                        }});
    tell_other(listener->address());
    loop->drive([&] {
      std::lock_guard lock(mutex);
      return accepted != nullptr;
    });
    if (gpu) accepted = gpu->over(std::move(accepted), loop);
    const Server until_the_lane_ends(*accepted, loop, gpu.get());
    return 0;
  }
  auto connection =
      transport->connector()->connect(hear_other(), {loop, Deadline::in(std::chrono::seconds(10))});
  if (gpu) connection = gpu->over(std::move(connection), loop);
  Client client(connection, loop, name != "blocked", gpu.get());
  return measure_case(client.participant(), name);
}

}  // namespace weft::bench
