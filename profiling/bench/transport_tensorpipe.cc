// SPDX-License-Identifier: Apache-2.0
// The TensorPipe peer of transport_bench: a message is one CPU tensor and a letter of metadata with
// an instruction for the other end. Arguments: the transport (shm, uv), the case.
#include <atomic>
#include <cstring>
#include <future>
#include <memory>

#include <tensorpipe/tensorpipe.h>

#include <unistd.h>

#include "transport_rounds.h"

namespace {

using weft::bench::seconds;

void check(const tensorpipe::Error& error) {
  if (!error) return;
  std::fprintf(stderr, "tensorpipe: %s\n", error.what().c_str());
  std::_Exit(3);
}

std::shared_ptr<tensorpipe::Context> make_context(const std::string& transport) {
  auto context = std::make_shared<tensorpipe::Context>();
  if (transport == "shm") {
    context->registerTransport(0, "shm", tensorpipe::transport::shm::create());
  } else {
    context->registerTransport(0, "uv", tensorpipe::transport::uv::create());
  }
  context->registerChannel(0, "basic", tensorpipe::channel::basic::create());
  return context;
}

tensorpipe::Message message(char wish, void* data, std::size_t bytes) {
  tensorpipe::Message result;
  result.metadata = std::string(1, wish);
  if (bytes > 0) {
    result.tensors.emplace_back();
    result.tensors[0].buffer = tensorpipe::CpuBuffer{.ptr = data};
    result.tensors[0].length = bytes;
  }
  return result;
}

// Reads all messages, into two buffers in turns, and calls `came` with the letter and the tensor's
// bytes.
class Reader {
 public:
  Reader(std::shared_ptr<tensorpipe::Pipe> pipe, std::function<void(char, std::size_t)> came)
      : pipe_(std::move(pipe)), came_(std::move(came)) {
    for (auto& piece : memory_) piece.assign(256 << 20, 1);
    next();
  }

 private:
  void next() {
    pipe_->readDescriptor([this](const tensorpipe::Error& error,
                                 tensorpipe::Descriptor descriptor) {
      if (error) return;
      tensorpipe::Allocation allocation;
      std::size_t bytes = 0;
      for (const auto& tensor : descriptor.tensors) {
        bytes = tensor.length;
        turn_ ^= 1;
        allocation.tensors.push_back({tensorpipe::CpuBuffer{.ptr = memory_[turn_].data()}});
      }
      pipe_->read(allocation,
                  [this, wish = descriptor.metadata[0], bytes](const tensorpipe::Error& failed) {
                    if (!failed) came_(wish, bytes);
                  });
      next();
    });
  }

  std::shared_ptr<tensorpipe::Pipe> pipe_;
  std::function<void(char, std::size_t)> came_;
  std::vector<char> memory_[2];
  int turn_ = 0;
};

int serve(const std::string& transport, int other) {
  const auto context = make_context(transport);
  const auto listener = context->listen({transport == "shm" ? "shm://" : "uv://127.0.0.1"});
  std::promise<std::shared_ptr<tensorpipe::Pipe>> accepted;
  listener->accept([&](const tensorpipe::Error& error, std::shared_ptr<tensorpipe::Pipe> pipe) {
    check(error);
    accepted.set_value(std::move(pipe));
  });
  const std::string url = listener->url(transport == "shm" ? "shm" : "uv") + "\n";
  if (write(other, url.data(), url.size()) < 0) return 2;
  const auto pipe = accepted.get_future().get();
  std::vector<char> memory(256 << 20, 1);
  Reader reader(pipe, [&](char wish, std::size_t bytes) {
    if (wish == 's') return;
    pipe->write(message('r', memory.data(), wish == 'e' ? bytes : 0),
                [](const tensorpipe::Error&) {});
  });
  char letter = 0;
  while (read(other, &letter, 1) == 1) {
  }
  std::_Exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int rank = std::atoi(std::getenv("RANK"));
  const int other = std::atoi(std::getenv("WEFT_BENCH_OTHER"));
  weft::bench::pin_to_core_of(rank);
  if (rank == 1) return serve(argv[1], other);
  std::string url;
  for (char letter = 0; read(other, &letter, 1) == 1 && letter != '\n';) url += letter;
  const auto context = make_context(argv[1]);
  const auto pipe = context->connect(url);
  std::vector<char> memory(256 << 20, 1);
  std::atomic<int> answers{0};
  std::mutex mutex;
  std::condition_variable changed;
  std::function<void()> then;
  Reader reader(pipe, [&](char, std::size_t) {
    if (then) then();
    {
      std::lock_guard<std::mutex> lock(mutex);
      ++answers;
    }
    changed.notify_all();
  });
  const auto wait_for = [&](int count) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return answers >= count; });
  };
  const auto send = [&](char wish, std::size_t bytes) {
    pipe->write(message(wish, memory.data(), bytes),
                [](const tensorpipe::Error& error) { check(error); });
  };
  const bool is_blocked = std::strcmp(argv[2], "blocked") == 0;
  const weft::bench::Participant tensorpipe_pipe{
      [&](std::size_t bytes, int count) {
        std::vector<double> times;
        answers = 0;
        double begin = seconds();
        if (is_blocked) {
          for (int i = 0; i < count; ++i) {
            begin = seconds();
            send('e', bytes);
            wait_for(i + 1);
            times.push_back(seconds() - begin);
          }
          return times;
        }
        // Sends the next message from the callback of the answer, on TensorPipe's own thread.
        then = [&] {
          const double end = seconds();
          times.push_back(end - begin);
          begin = end;
          if (static_cast<int>(times.size()) < count) send('e', bytes);
        };
        send('e', bytes);
        wait_for(count);
        then = nullptr;
        return times;
      },
      [&](std::size_t bytes, int count) {
        answers = 0;
        std::size_t under_way = 0;
        std::mutex sent_mutex;
        std::condition_variable sent;
        const double begin = seconds();
        for (int i = 0; i < count; ++i) {
          {
            std::unique_lock<std::mutex> lock(sent_mutex);
            sent.wait(lock, [&] { return under_way < weft::bench::window_of(bytes); });
            ++under_way;
          }
          pipe->write(message(i + 1 < count ? 's' : 'a', memory.data(), bytes),
                      [&](const tensorpipe::Error& error) {
                        check(error);
                        std::lock_guard<std::mutex> lock(sent_mutex);
                        --under_way;
                        sent.notify_all();
                      });
        }
        wait_for(1);
        const double end = seconds();
        std::unique_lock<std::mutex> lock(sent_mutex);
        sent.wait(lock, [&] { return under_way == 0; });
        return end - begin;
      },
      [&](std::size_t bytes, int count) {
        std::vector<double> times;
        answers = 0;
        for (int i = 0; i < count; ++i) {
          weft::bench::renew(memory.data(), bytes);
          const double begin = seconds();
          send('a', bytes);
          wait_for(i + 1);
          times.push_back(seconds() - begin);
        }
        return times;
      }};
  weft::bench::measure_case(tensorpipe_pipe, argv[2]);
  std::fflush(stdout);
  std::_Exit(0);  // skips the contexts' destructors, which take seconds
}
