// SPDX-License-Identifier: Apache-2.0
// Helpers shared by the tests of streams.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <weft/transport/tcp/striped_stream.h>
#include <weft/transport/tcp/tcp_listener.h>

namespace weft::transport::tcp {

inline Deadline patience() { return Deadline::in(std::chrono::seconds(60)); }

inline std::shared_ptr<EventLoop> make_loop(const std::string& name = "test") {
  return std::make_shared<EventLoop>(name);
}

// Bytes in a recognizable order, which depend on the seed only.
std::string pattern(std::size_t bytes, unsigned seed = 1);

// Drives the loop until `so` returns true; throws if that does not happen in time.
void wait_until(EventLoop& loop, const std::function<bool()>& so, const std::string& what);

// One end of a stream, used as a connection uses it: writes until the stream takes no more and
// again when there is room; reads on the loop until no bytes are left.
class End {
 public:
  End(std::shared_ptr<EventLoop> loop, std::unique_ptr<ByteStream> stream);
  ~End();

  // Queues the bytes, cut into pieces of `piece` bytes if that is not 0.
  void send(const std::string& bytes, std::size_t piece = 0);
  void finish_writing();
  // With true, stops reading, as an end without room; with false, continues.
  void hold(bool held);
  // Blocks until that many bytes have arrived, or the stream has ended, and takes them.
  std::string take(std::size_t bytes);
  std::size_t received() const;
  // Blocks until the kernel has taken all queued bytes.
  void wait_sent();
  // Blocks until the stream has ended; bytes received before can still be taken.
  Error wait_end();
  bool ended() const;
  ByteStream& stream() { return *core_->stream; }
  EventLoop& loop() { return *loop_; }

 private:
  struct Core {
    mutable std::mutex mutex;
    std::unique_ptr<ByteStream> stream;
    std::deque<std::string> unsent;
    std::size_t offset = 0;  // in the first of `unsent`
    std::string received;
    std::optional<Error> end;
    bool held = false;
    void write();
    void read();
  };
  std::shared_ptr<EventLoop> loop_;
  std::shared_ptr<Core> core_;
};

// A listener whose accepted streams can be taken one by one.
class Lobby {
 public:
  explicit Lobby(std::shared_ptr<EventLoop> loop, const std::string& interface_address = "",
                 const Settings& settings = {});
  ~Lobby();
  std::string address() const { return listener_->address(); }
  // The port of its first address.
  int port() const;
  std::unique_ptr<ByteStream> take();
  std::size_t waiting() const;
  void close() { listener_.reset(); }

 private:
  struct Core {
    mutable std::mutex mutex;
    std::deque<std::unique_ptr<ByteStream>> streams;
  };
  std::shared_ptr<EventLoop> loop_;
  std::shared_ptr<Core> core_;
  std::unique_ptr<TcpListener> listener_;
};

std::unique_ptr<ByteStream> dial(const std::shared_ptr<EventLoop>& loop, const std::string& address,
                                 Deadline deadline = patience(), const Settings& settings = {},
                                 bool refusal_ends = false);

// Two connected descriptors: Unix sockets, or TCP over the loopback.
std::pair<Descriptor, Descriptor> socket_pair();
std::pair<Descriptor, Descriptor> tcp_pair();
// Raises the limit on descriptors to `count`; returns false if this process may not.
bool may_have_descriptors(std::size_t count);
// Returns a blocking socket that is connected to the port of 127.0.0.1.
Descriptor raw_connect(int port);
// Returns a socket that is bound to a port of 127.0.0.1 but does not listen: no other socket gets
// the port, and connecting to it is refused.
Descriptor reserved_port();

// A forked process that runs the body and then exits. Fork it before the test makes threads.
class Child {
 public:
  // `to_parent` is a socket to the test.
  explicit Child(const std::function<void(int to_parent)>& body);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  pid_t process() const { return process_; }
  int socket() const { return socket_.get(); }
  // Blocks for one byte that the body sent; returns 0 when the process has ended.
  char hear() const;
  void say(char letter) const;
  void signal(int number) const;
  // Blocks until the process has ended; returns its exit status, or minus the signal.
  int wait();

 private:
  Descriptor socket_;
  pid_t process_ = -1;
};

}  // namespace weft::transport::tcp
